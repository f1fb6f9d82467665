"""Rules for one coordinate of all members against NumPy, bit by bit."""

import numpy as np
import pytest

from sigmerge.core import coordinates, select
from sigmerge.core.dtypes import F32, address_of

SIZE = 5000
_GENERATOR = np.random.default_rng(7)
_PLAIN = _GENERATOR.normal(size=(3, SIZE)).astype(np.float32)
ROWS = {
    "floats": _PLAIN,
    "few values": np.round(_PLAIN * 8) / 8,
    "one row twice": np.stack([_PLAIN[0], _PLAIN[0], _PLAIN[1]]),
    "far from zero": _PLAIN + np.float32(1e4),
    "tiny": _PLAIN * np.float32(1e-20),
    "below all floats": _PLAIN * np.float32(1e-30),
    "huge": _PLAIN * np.float32(1e37),
    "equal": np.repeat(_PLAIN[:1], 3, axis=0),
}


def members(rows):
    """Whoever calls it keeps the rows, which are contiguous."""
    return np.array([(F32, -1, address_of(row)) for row in rows], np.int64)


def variances(rows):
    mean, total = np.zeros(SIZE), np.zeros(SIZE)
    for row in rows:
        mean += row.astype(np.float64)
    mean /= len(rows)
    for row in rows:
        total += (row.astype(np.float64) - mean) ** 2
    with np.errstate(over="ignore"):
        return (total / len(rows)).astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_variances_are_those_of_float64(rows):
    found, base = variances(rows), np.zeros(SIZE, np.float32)
    table = members([*rows, base])
    high = np.zeros(select.HIGH_BINS + 1, np.int64)
    assert coordinates.count_variances(table, 0, SIZE, -1, high)
    assert np.array_equal(high[:-1], np.bincount(found >> 15, minlength=select.HIGH_BINS))
    assert high[-1] == (found == 0).sum()
    upper = int(np.sort(found)[-SIZE // 5]) >> 15
    low = np.zeros(select.LOW_BINS, np.int64)
    coordinates.count_variances(table, 0, SIZE, upper, low)
    inside = found[found >> 15 == upper] & 0x7FFF
    assert np.array_equal(low, np.bincount(inside, minlength=select.LOW_BINS))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_what_varies_most_counts_the_first_of_equals(rows):
    found = variances(rows)
    cut = int(np.sort(found)[-SIZE // 5])
    first = np.flatnonzero(found == cut)[:3]
    stays = found > cut
    stays[first] = True
    stays &= found != 0
    total, base = np.zeros(3), np.zeros(SIZE, np.float32)
    table = members([*rows, base])
    assert coordinates.squares_of_varying(table, 0, SIZE, cut, 3, 1800, total)
    for row, sum_of_squares in zip(rows, total, strict=True):
        squares, expected = np.where(stays, row, np.float32(0)).astype(np.float64) ** 2, 0.0
        for begin in range(0, SIZE, 1800):
            # All lanes of a tile are added to what is there.
            some = squares[begin : begin + 1800]
            in_rows = np.append(some, np.zeros(-some.size % 64)).reshape(-1, 64)
            for lane in np.add.accumulate(in_rows, axis=0)[-1]:
                expected += lane
        assert sum_of_squares == expected


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_variance_that_is_not_finite_counts_as_the_largest(bad):
    """The sign of a NaN must not lead out of the table of counts."""
    rows = _PLAIN.copy()
    rows[1, ::7] = bad
    around = np.zeros(4 * select.HIGH_BINS, np.int64)
    base = np.zeros(SIZE, np.float32)
    table = members([*rows, base])
    assert not coordinates.count_variances(table, 0, SIZE, -1, around[: select.HIGH_BINS + 1])
    assert not around[select.HIGH_BINS :].any()
    assert around[np.float32(np.inf).view(np.uint32) >> 15 :].sum() == len(rows[0, ::7])


def test_sums_that_only_just_overflow_do_not_vary():
    """Of Σ v² · n and (Σ v)² of equal rows, one may be infinite in float32 and the other not."""
    count = 12
    middle = int(np.float32(2.0**64 / count).view(np.uint32))
    row = np.arange(middle - 300, middle + 300, dtype=np.uint32).view(np.float32)
    rows, total = np.repeat(row[None], count, axis=0), np.zeros(count)
    base = np.zeros(row.size, np.float32)
    table = members([*rows, base])
    one = int(np.float32(1).view(np.uint32))
    assert coordinates.squares_of_varying(table, 0, row.size, one, 1, 512, total)
    assert not total.any()


SOME = np.where(np.abs(_PLAIN) < 0.7, np.float32(0), _PLAIN)


def test_a_value_moves_to_what_is_near():
    base, other, t = _PLAIN[0], _PLAIN[1] * np.float32(1e-3) + _PLAIN[0], np.float32(1e-3)
    out = np.empty(SIZE, np.float32)
    coordinates.swap_near(other, base, float(t), out)
    share = np.clip(t / np.maximum(np.abs(base - other), np.float32(1e-6)), 0, 1).astype(np.float32)
    expected = share * other + (np.float32(1) - share) * base
    assert out.tobytes() == expected.tobytes()
    assert 0 < (out == other).sum() < SIZE


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_entries_that_stand_alone(least):
    above = np.abs(SOME) > np.float32(least)
    changed = above.sum(axis=0)
    alone, shared = np.ones(3, np.int64), np.ones(3, np.int64)
    coordinates.count_changes(SOME, least, alone, shared)
    assert alone.tolist() == (1 + (above & (changed == 1)).sum(axis=1)).tolist()
    assert shared.tolist() == (1 + (above & (changed > 1)).sum(axis=1)).tolist()
    factors, out = np.array([1.5, 1.25, 1.1], np.float32), np.empty(SIZE, np.float32)
    coordinates.reinforce(SOME, least, factors, out)
    mean, own = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for row, mask, factor in zip(SOME, above, factors, strict=True):
        mean = np.where(mask, mean + row / np.maximum(changed, 1).astype(np.float32), mean)
        own = np.where(mask, row * factor, own)
    assert out.tobytes() == np.where(changed == 1, own, mean).tobytes()


def test_divergences_of_rows():
    """Of the machine's own exponential and logarithm, whose last bits are not ours."""
    values, base = _PLAIN[0], _PLAIN[1]
    out = np.empty(50)
    coordinates.divergences(values, base, 100, out)
    p, q = (np.exp(row.reshape(50, 100).astype(np.float64)) for row in (values, base))
    p, q = (each / each.sum(axis=1, keepdims=True) + 1e-8 for each in (p, q))
    np.testing.assert_allclose(out, (p * np.log(p / q)).sum(axis=1), rtol=1e-12)


def test_scores_by_row_and_what_they_keep():
    factors = np.random.default_rng(1).normal(size=50)
    scores, out = np.empty(SIZE, np.float32), np.empty(SIZE, np.float32)
    coordinates.scale_rows(_PLAIN[0], 100, factors, scores)
    expected = np.abs(_PLAIN[0]) * np.repeat(factors.astype(np.float32), 100)
    assert scores.tobytes() == expected.tobytes()
    bound = float(np.median(scores))
    coordinates.keep_from(_PLAIN[0], scores, bound, out)
    kept = np.where(scores >= np.float32(bound), _PLAIN[0], np.float32(0))
    assert out.tobytes() == kept.tobytes()


def test_numbers_are_counted_by_keys_in_their_order():
    values = np.append(_PLAIN[0], np.array([0.0, -0.0, np.inf, -np.inf, 1e-45], np.float32))
    upper = np.zeros(select.HIGH_BINS, np.int64)
    coordinates.count_keys(values, -1, upper)
    ordered, smallest = np.sort(values), 0
    for place in np.flatnonzero(upper):
        lower = np.zeros(select.HIGH_BINS, np.int64)
        coordinates.count_keys(values, int(place), lower)
        assert lower.sum() == upper[place]
        for low in np.flatnonzero(lower):
            value = coordinates.key_value(int(place) << 16 | int(low))
            some = ordered[smallest : smallest + lower[low]]
            assert (some == value).all()
            smallest += int(lower[low])
    assert smallest == values.size
