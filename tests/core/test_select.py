"""Histograms of |Δ| against a sort, for members of any stored type."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.core import SAMPLE_RUN, STRIP, dtypes, select

NASTY = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.0, -1.0, 1.0000001, 2.0**-13, -(2.0**-13), 3e38]


ZEROS = np.zeros(1 << 20, np.float32)


def table(values: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Members of a kernel: one expert whose task vector is `values`, and a reference of zeros."""
    return dtypes.table([values, ZEROS[: values.size]]), 0, values.size


def high_of(tiles: list[np.ndarray], every: int = 1) -> np.ndarray:
    counts = np.zeros((1, select.HIGH_PLACES), np.uint32)
    for tile in tiles:
        assert select.count_high(*table(tile), np.array([0]), every, counts)
    return counts[0]


def inside_of(tiles: list[np.ndarray], first: int, last: int) -> tuple[np.ndarray, np.ndarray, int]:
    counts = np.zeros((1, 2 * select.LOW_BINS), np.uint32)
    left_out, above = np.zeros(counts.shape, np.uint16), np.zeros(1, np.int64)
    ranges = np.array([select.range_of(first, last)])
    for tile in tiles:
        arguments = (np.array([0]), 1, ranges, counts, left_out, above)
        assert select.count_inside(*table(tile), *arguments)
    return counts[0], left_out[0], int(above[0])


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(
        st.sampled_from(NASTY) | st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=60,
    ),
    data=st.data(),
)
def test_cut_is_that_of_a_sort(values, data):
    array = np.array(values, np.float32)
    k = data.draw(st.integers(1, array.size))
    split = data.draw(st.integers(0, array.size))
    tiles = [array[:split], array[split:]]
    upper = select.bin_of_rank(high_of(tiles), k)[0] // 2
    counts, _, above = inside_of(tiles, upper, upper)
    lower, ties = select.bin_of_rank(counts, k - above)
    magnitude = np.sort(np.abs(array.astype(np.float64)))[::-1]
    threshold = np.uint32(select.threshold_of(upper, lower)).view(np.float32)
    assert threshold == magnitude[k - 1]
    assert ties == k - int(np.sum(magnitude > magnitude[k - 1]))
    assert counts[lower] == int(np.sum(magnitude == magnitude[k - 1]))


def test_a_wide_range_counts_without_the_last_bits_and_says_which():
    first = 29760
    patterns = (first << select.LOW_BITS) + np.array([0, 32, 32, 37, 64, 64 + 31, (1 << 20) + 5])
    values = np.array([*patterns, (first + 40) << select.LOW_BITS, 1], np.uint32).view(np.float32)
    _, _, shift = select.range_of(first, first + 33)
    assert shift == 5
    counts, left_out, above = inside_of([values], first, first + 33)
    assert above == 1
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {
        0: 1,
        1: 3,
        2: 2,
        1 << 15: 1,
    }
    same = {int(i): not (left_out[i] & 255) & (left_out[i] >> 8) for i in np.flatnonzero(counts)}
    assert same == {0: True, 1: False, 2: False, 1 << 15: True}
    assert left_out[1 << 15] & 255 == 5


def test_the_first_magnitude_behind_a_range_lies_above_it():
    first = 29760 << select.LOW_BITS
    behind = first + select.LOW_BINS
    values = np.array([first - 1, first, behind - 1, behind], np.uint32).view(np.float32)
    counts, _, above = inside_of([values], 29760, 29760)
    assert above == 1
    assert np.flatnonzero(counts).tolist() == [0, select.LOW_BINS - 1]


@pytest.mark.parametrize("bins", [1, 2, 3, 34, 64])
def test_a_range_has_a_place_for_every_offset_without_its_last_bits(bins):
    found = select.range_of(7, 6 + bins)
    offsets = np.arange(bins * select.LOW_BINS) >> found.shift
    assert found.places == len(np.unique(offsets)) <= 2 * select.LOW_BINS


def test_places_with_a_count_are_kept_row_by_row():
    rng = np.random.default_rng(3)
    counts = (rng.integers(0, 9, (3, 1000)) == 1).astype(np.uint32) * rng.integers(1, 99, 1000)
    counts = counts.astype(np.uint32)
    counts[1], counts[2, 500:] = 0, 0
    left_out = rng.integers(1, 1 << 16, (3, 1000)).astype(np.uint16)
    left_out[counts == 0] = 0
    for bits in (left_out, left_out[:0]):
        taken, noted = counts.copy(), bits.copy()
        for row, kept in enumerate(select.occupied(taken, noted)):
            there = np.flatnonzero(counts[row])
            assert kept[0].tolist() == there.tolist()
            assert kept[1].tolist() == counts[row, there].tolist()
            assert kept[2].tolist() == (bits[row, there] if len(bits) else 0 * there).tolist()
        assert not taken.any() and not noted.any()


def test_counters_are_zeros_again_once_their_places_are_taken():
    first = select.counters(2, 300)
    first[1, 7] = 3
    select.occupied(first, np.empty((0, 0), np.uint16))
    again = select.counters(1, 400)
    assert np.shares_memory(first, again) and not again.any()
    again[:] = 5  # and nobody takes them: what was counted there is not met again
    other = select.counters(1, 400)
    assert not np.shares_memory(again, other) and not other.any()


@pytest.mark.parametrize(("seed", "lists"), [*((i, 3) for i in range(4)), (4, 70), (5, 1030)])
def test_lists_of_places_are_joined_as_if_they_were_counted_together(seed, lists):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 3, (lists, 200)).astype(np.uint32)
    counts[seed % 3] = 0 if seed else counts[0]
    left_out = rng.integers(1, 1 << 16, (lists, 200)).astype(np.uint16)
    parts = select.occupied(counts.copy(), left_out.copy())
    total = select.joined(parts)
    assert np.array_equal(total, select.joined([select.joined(parts[:2]), *parts[2:]]))
    assert select.joined([]).shape == (3, 0)
    there = np.flatnonzero(counts.sum(axis=0))
    bits = np.bitwise_or.reduce(np.where(counts > 0, left_out, 0), axis=0)
    assert total[0].tolist() == there.tolist()
    assert total[1].tolist() == counts.sum(axis=0)[there].tolist()
    assert total[2].tolist() == bits[there].tolist()


def test_a_sample_looks_at_one_run_in_so_many():
    values = np.random.default_rng(0).normal(0, 1, 7 * SAMPLE_RUN - 9).astype(np.float32)
    runs = [values[i * SAMPLE_RUN : (i + 1) * SAMPLE_RUN] for i in (0, 3, 6)]
    assert np.array_equal(high_of([values], every=3), high_of(runs))


@pytest.mark.parametrize("every", [1, 3])
def test_what_lies_inside_a_range_is_counted_in_one_run_of_so_many(every):
    values = np.random.default_rng(0).normal(0, 1, 7 * SAMPLE_RUN - 9).astype(np.float32)
    seen = np.concatenate([values[i * SAMPLE_RUN :][:SAMPLE_RUN] for i in range(0, 7, every)])
    bits = np.abs(seen).view(np.uint32).astype(np.int64)
    first, length, shift = select.range_of(int(np.median(bits)) >> select.LOW_BITS, 32500)
    counts, left_out = np.zeros((1, 1 << 16), np.uint32), np.zeros((1, 1 << 16), np.uint16)
    above, given = np.zeros(1, np.int64), np.array([[first, length, shift]])
    how = (0, values.size, np.array([0]), every, given, counts, left_out, above)
    assert select.count_inside(dtypes.table([values, np.zeros_like(values)]), *how)
    inside = bits[(bits >= first) & (bits < first + length)]
    assert above[0] == np.sum(bits >= first + length) > 0
    assert counts[0].tolist() == np.bincount((inside - first) >> shift, minlength=1 << 16).tolist()


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.999])
def test_the_bins_around_a_rank_hold_it(share):
    rng = np.random.default_rng(1)
    values = rng.normal(0, 1, 200 * SAMPLE_RUN).astype(np.float32)
    sample = high_of([values], every=select.SAMPLE)
    there = np.flatnonzero(sample)
    kept = np.array([there, sample[there], np.zeros_like(there)])
    first, last = select.bins_around(kept, share)
    exact, _ = select.bin_of_rank(high_of([values]), int(share * values.size))
    assert first <= exact // 2 <= last


@pytest.mark.parametrize("bad", [0, 1])
def test_what_is_not_finite_is_reported(bad):
    rows = [np.ones(5000, np.float32), np.ones(5000, np.float32)]
    rows[bad][4999] = np.inf
    counts = np.zeros((1, select.HIGH_PLACES), np.uint32)
    assert not select.count_high(dtypes.table(rows), 0, 5000, np.array([0]), 1, counts)


def test_counts_above_and_on_a_pattern():
    rng = np.random.default_rng(2)
    values = (rng.integers(-9, 10, 3 * STRIP + 7) * 2.0**-13).astype(np.float32)
    rows = [values, -2 * values, np.zeros_like(values)]
    level = np.float32(3 * 2.0**-13)
    ranges = np.array([select.Range(int(level.view(np.int32)), 1, 0)] * 2)
    counts, left_out = np.zeros((2, 1), np.uint32), np.zeros((2, 1), np.uint16)
    above, wanted = np.zeros(2, np.int64), np.array([1, 0])
    given = (wanted, 1, ranges, counts, left_out, above)
    assert select.count_inside(dtypes.table(rows), 0, values.size, *given)
    for row, d in enumerate(wanted):
        magnitude = np.abs(rows[d])
        assert above[row] == np.sum(magnitude > level)
        assert counts[row, 0] == np.sum(magnitude == level)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_entries_of_places(dtype):
    places, counts = np.array([2, 3, 7, 11], dtype), np.array([5, 1, 2**31, 4], dtype)
    known = dict(zip(places.tolist(), counts.tolist(), strict=True))
    assert select.entries(counts) == sum(known.values())
    found = [select.entries_at(places, counts, place) for place in range(13)]
    assert found == [known.get(place, 0) for place in range(13)]
    assert select.entries(counts[:0]) == select.entries_at(places[:0], counts[:0], 2) == 0
