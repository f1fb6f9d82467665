"""Histograms of magnitudes against NumPy's sort."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sigmerge import _native
from sigmerge.core import SAMPLE_RUN
from sigmerge.core.dtypes import BF16, F16, F32
from tests.native.pools import Pool

KINDS = [[BF16] * 4, [F32] * 4, [BF16, F16, F32, BF16]]
EXPERTS = np.array([2, 0], np.int64)


def patterns(pool: Pool, expert: int, every: int) -> np.ndarray:
    delta = pool.values[expert] - pool.values[-1]
    seen = np.arange(delta.size) // SAMPLE_RUN % every == 0
    return delta.view(np.uint32)[seen] & 0x7FFFFFFF


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 70_000])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("filed", [(), (0, 3), (0, 1, 2, 3)])
def test_upper_bits(
    kinds: list[int], size: int, every: int, filed: tuple[int, ...], tmp_path: Path
) -> None:
    pool = Pool(kinds, size, tmp_path, filed, seed=size)
    counts = np.ones((2, 2 << 16), np.uint32)  # what was counted before stays
    assert _native.count_high(pool.table, size, EXPERTS, every, counts)
    for row, expert in enumerate(EXPERTS):
        found = patterns(pool, int(expert), every)
        places = 2 * (found >> 15) + (found & 0x7FFF != 0)
        expected = np.bincount(places, minlength=2 << 16) + 1
        np.testing.assert_array_equal(counts[row], expected)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("shift", [0, 5, 8])
@pytest.mark.parametrize("width", [1, 200, 1 << 18])
def test_patterns_inside_a_range(
    kinds: list[int], every: int, shift: int, width: int, tmp_path: Path
) -> None:
    size, places = 40_000, (1 << 18 >> shift) + 1
    pool = Pool(kinds, size, tmp_path, (0, 1), seed=5)
    first = [int(np.sort(patterns(pool, int(expert), 1))[size // 2]) for expert in EXPERTS]
    ranges = np.array([(one, width, shift) for one in first], np.int64)
    counts, left_out = np.zeros((2, places), np.uint32), np.zeros((2, places), np.uint16)
    above = np.array([7, 0], np.int64)
    given = (EXPERTS, every, ranges, counts, left_out, above)
    assert _native.count_inside(pool.table, size, *given)
    for row, expert in enumerate(EXPERTS):
        found = patterns(pool, int(expert), every).astype(np.int64)
        assert above[row] == (found >= first[row] + width).sum() + (7 if row == 0 else 0)
        offsets = found[(found >= first[row]) & (found < first[row] + width)] - first[row]
        expected = np.bincount(offsets >> shift, minlength=places)
        np.testing.assert_array_equal(counts[row], expected)
        if width == 1:  # of one pattern nothing is left out
            continue
        notes, mask = np.zeros(places, np.int64), (1 << shift) - 1
        last = offsets & mask
        np.bitwise_or.at(notes, offsets >> shift, last | (last ^ mask) << 8)
        np.testing.assert_array_equal(left_out[row], notes)


@pytest.mark.parametrize("member", [0, 2, 3])
def test_what_is_not_finite_is_reported(member: int, tmp_path: Path) -> None:
    pool = Pool([F32] * 4, 1000, tmp_path)
    pool.raw[member][900] = np.nan
    counts = np.zeros((2, 2 << 16), np.uint32)
    assert not _native.count_high(pool.table, 1000, EXPERTS, 1, counts)
    ranges, none = np.array([(0, 1, 0)] * 2, np.int64), np.zeros((2, 1), np.uint32)
    given = (EXPERTS, 1, ranges, none, np.zeros((2, 1), np.uint16), np.zeros(2, np.int64))
    assert not _native.count_inside(pool.table, 1000, *given)


@pytest.mark.parametrize("noted", [True, False])
def test_places_that_are_occupied(noted: bool) -> None:
    rng = np.random.default_rng(1)
    before = (rng.integers(0, 50, (3, 1000)) * (rng.random((3, 1000)) < 0.05)).astype(np.uint32)
    before[1] = 0
    notes = rng.integers(1, 999, (3, 1000)).astype(np.uint16) * (before > 0).astype(np.uint16)
    counts, left_out = before.copy(), notes.copy() if noted else np.zeros((0, 0), np.uint16)
    kept, stops = np.empty((3, 3000), np.uint32), np.zeros(4, np.int64)
    _native.take_occupied(counts, left_out, kept, stops)
    rows, places = np.nonzero(before)
    assert stops.tolist() == [0, *np.cumsum(np.bincount(rows, minlength=3))]
    found = kept[:, : stops[-1]]
    np.testing.assert_array_equal(found[0], places)
    np.testing.assert_array_equal(found[1], before[rows, places])
    np.testing.assert_array_equal(found[2], notes[rows, places] if noted else 0 * places)
    assert not counts.any() and not left_out.any()


def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pool = Pool([F32] * 4, 10, tmp_path)
    with pytest.raises(ValueError, match="no such expert"):
        wrong = np.array([3, 0], np.int64)
        _native.count_high(pool.table, 10, wrong, 1, np.zeros((2, 2 << 16), np.uint32))
    with pytest.raises(ValueError, match="a histogram for each"):
        _native.count_high(pool.table, 10, EXPERTS, 1, np.zeros((2, 100), np.uint32))
    pool.table[1, 0] = 3
    with pytest.raises(ValueError, match="no known type"):
        _native.count_high(pool.table, 10, EXPERTS, 1, np.zeros((2, 2 << 16), np.uint32))
