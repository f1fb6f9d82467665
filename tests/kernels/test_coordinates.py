"""Variances of coordinates against NumPy's float64, bit by bit."""

import numpy as np
import pytest

from sigmerge.kernels import coordinates, select
from sigmerge.kernels.stored import members

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
    assert coordinates.count_variances(*table, 0, SIZE, -1, high)
    assert np.array_equal(high[:-1], np.bincount(found >> 15, minlength=select.HIGH_BINS))
    assert high[-1] == (found == 0).sum()
    upper = int(np.sort(found)[-SIZE // 5]) >> 15
    low = np.zeros(select.LOW_BINS, np.int64)
    coordinates.count_variances(*table, 0, SIZE, upper, low)
    inside = found[found >> 15 == upper] & 0x7FFF
    assert np.array_equal(low, np.bincount(inside, minlength=select.LOW_BINS))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_what_varies_most_stays_the_first_of_equals(rows):
    found = variances(rows)
    cut = int(np.sort(found)[-SIZE // 5])
    first = np.flatnonzero(found == cut)[:3]
    kept, room = rows.copy(), np.empty(SIZE, np.float32)
    assert coordinates.keep_varying(kept, cut, 3, room) == 3 - len(first)
    stays = found > cut
    stays[first] = True
    stays &= found != 0
    assert np.array_equal(kept, np.where(stays, rows, np.float32(0)))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_variance_that_is_not_finite_counts_as_the_largest(bad):
    """The sign of a NaN must not lead out of the table of counts."""
    rows = _PLAIN.copy()
    rows[1, ::7] = bad
    around = np.zeros(4 * select.HIGH_BINS, np.int64)
    base = np.zeros(SIZE, np.float32)
    table = members([*rows, base])
    assert not coordinates.count_variances(*table, 0, SIZE, -1, around[: select.HIGH_BINS + 1])
    assert not around[select.HIGH_BINS :].any()
    assert around[np.float32(np.inf).view(np.uint32) >> 15 :].sum() == len(rows[0, ::7])


def test_sums_that_only_just_overflow_do_not_vary():
    """Of Σ v² · n and (Σ v)² of equal rows, one may be infinite in float32 and the other not."""
    count = 12
    middle = int(np.float32(2.0**64 / count).view(np.uint32))
    row = np.arange(middle - 300, middle + 300, dtype=np.uint32).view(np.float32)
    rows, room = np.repeat(row[None], count, axis=0), np.empty(row.size, np.float32)
    coordinates.keep_varying(rows, int(np.float32(1).view(np.uint32)), 1, room)
    assert not rows.any()
