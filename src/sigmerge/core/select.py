"""Exact top-k by magnitude without a sort.

The magnitude of a float32 is ordered like its 31-bit pattern. A histogram over the upper 16 of
those bits finds the bin of the k-th largest value, a second one, of the patterns inside that bin,
the value itself. Counts of tiles add up, so a threshold over a whole model takes constant memory.
Equal magnitudes are admitted from the lowest flat index on.

Differences of bfloat16 numbers take few values, so that a sample finds the k-th one, and a count of
what lies above and on it, in one pass over everything, proves it. Where values are many, the first
histogram of the sample finds the bin, give or take a few: then the second is made of all of those,
in the same pass, and shows whether the k-th value lies inside. A wide range is counted without the
last bits; the count is exact as long as all entries that fall into one place have the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from sigmerge import _native
from sigmerge.core import Array, buffers

HIGH_BINS = 1 << 16
HIGH_PLACES = 2 * HIGH_BINS
"""Counts of `count_high`: by upper bits, first where all lower bits are zero, then the others."""
LOW_BINS = 1 << 15
LOW_BITS = 15
MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
SAMPLE: Final = 16
"""One run of SAMPLE_RUN coordinates in this many is looked at to guess a threshold."""
FEW: Final = 64
"""Bins of `count_high` that may lie around a rank for their patterns to be counted at once."""
WORTH_A_GUESS: Final = 1 / 1024
"""Share of a sample that must sit exactly on the guessed threshold for the guess to be tried."""


class Cut(NamedTuple):
    """Where a top-k ends: everything above `threshold`, and the first `ties` entries equal to it.

    `threshold` is a 31-bit magnitude pattern.
    """

    threshold: int
    ties: int


def count_high(
    members: Array, start: int, size: int, experts: Array, every: int, counts: Array
) -> bool:
    """Count the upper 16 bits of |Δ_d|'s patterns, one row of HIGH_PLACES per wanted expert.

    Differences of bfloat16 numbers have few bits: most are counted in the first place of a bin,
    where all have one pattern. Only one run of SAMPLE_RUN coordinates in `every` is looked at.
    Members are all experts and the reference; returns whether everything read is finite.
    """
    return _native.count_high(members, size, experts, every, counts)


def count_inside(
    members: Array,
    start: int,
    size: int,
    experts: Array,
    every: int,
    ranges: Array,
    counts: Array,
    left_out: Array,
    above: Array,
) -> bool:
    """Count the magnitude patterns inside a range, and how many lie above it; as `count_high`.

    Row by row for the wanted experts: `ranges` holds a range's first pattern, its length and a
    shift; an offset into the range is counted without its last `shift` bits (at most 8). What was
    left out goes to `left_out`: the union of these bits in the lower byte, of their complements in
    the upper one. above[row] gains how many patterns lie above the range. Members are all experts
    and the reference; returns whether everything is finite.
    """
    given = (experts, every, ranges, counts, left_out, above)
    return _native.count_inside(members, size, *given)


def counters(rows: int, places: int) -> Array:
    """Zeros to count in, until `occupied` takes them."""
    return buffers.blank((rows, places), np.uint32, "counts")


def notes_left_out(counts: Array) -> Array:
    """The same for what is left out in counting; see `count_inside`."""
    return buffers.blank(counts.shape, np.uint16, "left out")


def occupied(counts: Array, left_out: Array) -> list[Array]:
    """Row by row the places that have a count: uint32 (place, count, left out), ascending.

    Of what was left out nothing is known where `left_out` has no rows. Both are zeros afterwards.
    """
    stops = np.zeros(len(counts) + 1, np.int64)
    kept = buffers.room((3, counts.size), np.uint32, "occupied")
    _native.take_occupied(counts, left_out, kept, stops)
    buffers.keep_blank(counts, "counts")
    if len(left_out):
        buffers.keep_blank(left_out, "left out")
    found = kept[:, : stops[-1]].copy()
    return [found[:, stops[row] : stops[row + 1]] for row in range(len(counts))]


def joined(parts: Sequence[Array]) -> Array:
    """The places that are `occupied` in several counts, as int64."""
    runs = [part for part in parts if part.shape[1]]
    if not runs:
        return np.zeros((3, 0), np.int64)
    first = min(int(run[0, 0]) for run in runs)
    total = np.zeros((2, max(int(run[0, -1]) for run in runs) + 1 - first), np.int64)
    for run in runs:
        places, counts, left_out = np.ascontiguousarray(run, np.int64)
        _native.add_run(places, counts, left_out, first, total[0], total[1])
    places = np.flatnonzero(total[0])
    return np.concatenate([places[None] + first, total[:, places]])


def bin_of_rank(histogram: Array, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest entry (k from 1), and how many are wanted from it.

    Bin −1 if there are fewer entries.
    """
    return _native.bin_of_rank(np.ascontiguousarray(histogram, np.int64), k)


def entries(histogram: Array) -> int:
    """How many there are."""
    return _native.entries(np.ascontiguousarray(histogram, np.int64))


def entries_at(places: Array, histogram: Array, place: int) -> int:
    """How many have this place, of some in ascending order."""
    at = int(np.searchsorted(places, place))
    return int(histogram[at]) if at < len(places) and places[at] == place else 0


def place_of_rank(kept: Array, k: int) -> tuple[int, int, int]:
    """As `bin_of_rank`, of the places that `joined` holds; and how many entries are there."""
    at, left = bin_of_rank(kept[1], k)
    return int(kept[0, at]), left, int(kept[1, at])


def bins_around(sample: Array, share: float) -> tuple[int, int]:
    """The first and last bin in which the entry at this share of the top lies, by a sample.

    `sample` is what `count_high` counted, as `joined` holds it.
    """
    seen = entries(sample[1])
    last, _, _ = place_of_rank(sample, max(1, int(share * seen) - slack(seen)))
    first, _, _ = place_of_rank(sample, min(seen, int(share * seen) + slack(seen)))
    return first // 2, last // 2


def slack(seen: int) -> int:
    """By how many places a rank in a sample of this size can be wrong.

    Entries of a sample come in strips and resemble one another, hence eight standard deviations.
    """
    return 4 * math.isqrt(seen) + 1


class Range(NamedTuple):
    """Magnitude patterns that `count_inside` counts, without their last `shift` bits."""

    first: int
    length: int
    shift: int

    @property
    def places(self) -> int:
        """How many counts it takes."""
        return ((self.length - 1) >> self.shift) + 1


def range_of(first: int, last: int) -> Range:
    """The patterns of some bins, in at most LOW_BINS · 2 counts."""
    length = (last - first + 1) << LOW_BITS
    return Range(first << LOW_BITS, length, max(0, (length - 1).bit_length() - LOW_BITS - 1))


def threshold_of(high: int, low: int) -> int:
    return (high << LOW_BITS) | low
