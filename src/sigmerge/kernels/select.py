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

from sigmerge.kernels import SAMPLE_RUN, STRIP, Array, rooms
from sigmerge.kernels.jit import brief, kernel, part
from sigmerge.kernels.raw import bits_as
from sigmerge.kernels.stored import load, load_less
from sigmerge.kernels.window import Window, ready

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
GROUP: Final = 64
"""Coordinates that are looked through one by one if any of them lies in a range."""
WORTH_A_GUESS: Final = 1 / 1024
"""Share of a sample that must sit exactly on the guessed threshold for the guess to be tried."""


class Cut(NamedTuple):
    """Where a top-k ends: everything above `threshold`, and the first `ties` entries equal to it.

    `threshold` is a 31-bit magnitude pattern.
    """

    threshold: int
    ties: int


@part
def high_place(bits: np.uint32) -> np.uint32:
    """Where `count_high` counts a pattern. The order of places is that of magnitudes."""
    magnitude = np.uint32(bits & MAGNITUDE)
    others = np.uint32(magnitude & np.uint32(LOW_BINS - 1) != np.uint32(0))
    return np.uint32(((magnitude >> np.uint32(LOW_BITS)) << np.uint32(1)) | others)


def count_high(
    addresses: Array, kinds: Array, window: Window, start: int, size: int, experts: Array,
    every: int, counts: Array,
) -> bool:  # fmt: skip
    """Count the upper 16 bits of |Δ_d|'s patterns, one row of HIGH_PLACES per wanted expert.

    Differences of bfloat16 numbers have few bits: most are counted in the first place of a bin,
    where all have one pattern. Only one run of SAMPLE_RUN coordinates in `every` is looked at.
    Members are all experts and the reference; returns whether everything read is finite.
    """
    strips = rooms.room((2, SAMPLE_RUN), np.float32, "strips")
    return bool(_count_high(addresses, kinds, window, size, experts, every, counts, strips))


@kernel
def _count_high(
    addresses: Array, kinds: Array, window: Window, size: int, experts: Array, every: int,
    counts: Array, strips: Array,
) -> bool:  # fmt: skip
    fine, filled = True, 0
    for begin in range(0, size, SAMPLE_RUN * every):
        count = min(SAMPLE_RUN, size - begin)
        stop = size if every == 1 else begin + count
        filled = ready(addresses, window, begin, begin + count, stop, filled)
        delta, less = strips[0, :count], strips[1, :count]
        fine &= load(addresses[-1], kinds[-1], begin, less)
        for row in range(len(experts)):
            d = experts[row]
            fine &= load_less(addresses[d], kinds[d], begin, less, delta)
            bits, histogram = bits_as(delta, np.uint32), counts[row]
            for i in range(count):
                histogram[high_place(bits[i])] += np.uint32(1)
    return fine


def count_inside(
    addresses: Array,
    kinds: Array,
    window: Window,
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
    strip = STRIP if every == 1 else SAMPLE_RUN
    strips = rooms.room((2, strip), np.float32, "strips")
    inside = rooms.room(strip + 1, np.uint32, "inside")
    found = (ranges, counts, left_out, above, strips, inside)
    return bool(_count_inside(addresses, kinds, window, size, experts, every, *found))


@kernel
def _count_inside(
    addresses: Array, kinds: Array, window: Window, size: int, experts: Array, every: int,
    ranges: Array, counts: Array, left_out: Array, above: Array, strips: Array, inside: Array,
) -> bool:  # fmt: skip
    fine, filled, strip = True, 0, strips.shape[1]
    for begin in range(0, size, strip * every):
        count = min(strip, size - begin)
        stop = size if every == 1 else begin + count
        filled = ready(addresses, window, begin, begin + count, stop, filled)
        delta, less = strips[0, :count], strips[1, :count]
        fine &= load(addresses[-1], kinds[-1], begin, less)
        for row in range(len(experts)):
            lowest, width = np.uint32(ranges[row, 0]), np.uint32(ranges[row, 1])
            d, shift = experts[row], np.uint32(ranges[row, 2])
            fine &= load_less(addresses[d], kinds[d], begin, less, delta)
            more, found = _gather(bits_as(delta, np.uint32), lowest, width, inside)
            above[row] += more
            if width == 1:
                counts[row, 0] += np.uint32(found)
            else:
                _count_places(inside[:found], shift, counts[row], left_out[row])
    return fine


@part
def _gather(bits: Array, lowest: np.uint32, width: np.uint32, inside: Array) -> tuple[int, int]:
    """How many magnitudes lie above a range, and how many inside; their offsets go to `inside`.

    Offsets in a range of one pattern are zero, and are not written.
    """
    above, hits = _count_range(bits, lowest, width)
    if width == 1 or hits == 0:
        return above, hits
    if hits * GROUP > bits.size:
        return above, _append(bits, lowest, width, inside, 0)
    found = 0
    for begin in range(0, bits.size, GROUP):  # most have no entry in a narrow range
        part = bits[begin : begin + GROUP]
        if _count_range(part, lowest, width)[1]:
            found = _append(part, lowest, width, inside, found)
    return above, found


@part
def _count_range(bits: Array, lowest: np.uint32, width: np.uint32) -> tuple[int, int]:
    """How many magnitudes lie above a range, and how many inside; a loop that runs in vectors."""
    above, hits, top = np.uint32(0), np.uint32(0), np.uint32(lowest + width)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        above = np.uint32(above + np.uint32(magnitude >= top))
        hits = np.uint32(hits + np.uint32(np.uint32(magnitude - lowest) < width))
    return int(above), int(hits)


@part
def _append(bits: Array, lowest: np.uint32, width: np.uint32, inside: Array, found: int) -> int:
    """Write the offsets inside a range behind the first `found`; returns how many there are now."""
    for i in range(bits.size):
        # Adding 0 or 1 keeps the loop free of a branch that no one can predict.
        offset = np.uint32(np.uint32(bits[i] & MAGNITUDE) - lowest)
        inside[found] = offset
        found += int(offset < width)
    return found


@part
def _count_places(offsets: Array, shift: np.uint32, counts: Array, left_out: Array) -> None:
    mask = np.uint32((np.uint32(1) << shift) - np.uint32(1))
    for i in range(offsets.size):
        place, last = offsets[i] >> shift, offsets[i] & mask
        counts[place] += np.uint32(1)
        left_out[place] |= np.uint16(last | ((last ^ mask) << np.uint32(8)))


def counters(rows: int, places: int) -> Array:
    """Zeros to count in, until `occupied` takes them."""
    return rooms.blank((rows, places), np.uint32, "counts")


def notes_left_out(counts: Array) -> Array:
    """The same for what is left out in counting; see `count_inside`."""
    return rooms.blank(counts.shape, np.uint16, "left out")


def occupied(counts: Array, left_out: Array) -> list[Array]:
    """Row by row the places that have a count: uint32 (place, count, left out), ascending.

    Of what was left out nothing is known where `left_out` has no rows. Both are zeros afterwards.
    """
    stops = np.zeros(len(counts) + 1, np.int64)
    kept = rooms.room((3, counts.size), np.uint32, "occupied")
    _take_occupied(counts, left_out, kept, stops)
    rooms.keep_blank(counts, "counts")
    if len(left_out):
        rooms.keep_blank(left_out, "left out")
    found = kept[:, : stops[-1]].copy()
    return [found[:, stops[row] : stops[row + 1]] for row in range(len(counts))]


@kernel
def _take_occupied(counts: Array, left_out: Array, kept: Array, stops: Array) -> None:
    """`stops`: how many places of all rows before each have a count."""
    found = 0
    for row in range(len(counts)):
        for begin in range(0, counts.shape[1], GROUP):  # most places of most groups are empty
            own, some = counts[row, begin : begin + GROUP], np.uint32(0)
            for i in range(own.size):
                some |= own[i]
            if some == np.uint32(0):
                continue
            for i in range(own.size):
                if own[i] > np.uint32(0):
                    kept[0, found], kept[1, found] = np.uint32(begin + i), own[i]
                    kept[2, found], own[i] = np.uint16(0), np.uint32(0)
                    if len(left_out):
                        kept[2, found] = left_out[row, begin + i]
                        left_out[row, begin + i] = np.uint16(0)
                    found += 1
        stops[row + 1] = found


def joined(parts: Sequence[Array]) -> Array:
    """The places that are `occupied` in several counts, as int64."""
    runs = [part for part in parts if part.shape[1]]
    if not runs:
        return np.zeros((3, 0), np.int64)
    first = min(int(run[0, 0]) for run in runs)
    total = np.zeros((2, max(int(run[0, -1]) for run in runs) + 1 - first), np.int64)
    for run in runs:
        _add_run(run, first, total)
    places = np.flatnonzero(total[0])
    return np.concatenate([places[None] + first, total[:, places]])


@brief
def _add_run(run: Array, first: int, total: Array) -> None:
    """Add counts, and what was left out, to those of the same place."""
    for i in range(run.shape[1]):
        place = np.int64(run[0, i]) - first
        total[0, place] += np.int64(run[1, i])
        total[1, place] |= np.int64(run[2, i])


@brief
def bin_of_rank(histogram: Array, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest entry (k from 1), and how many are wanted from it.

    Bin −1 if there are fewer entries.
    """
    left = k
    for place in range(histogram.size - 1, -1, -1):
        here = int(histogram[place])
        if here >= left:
            return place, left
        left -= here
    return -1, left


@brief
def entries(histogram: Array) -> int:
    """How many there are."""
    total = 0
    for place in range(histogram.size):
        total += int(histogram[place])
    return total


@brief
def entries_at(places: Array, histogram: Array, place: int) -> int:
    """How many have this place, of some in ascending order."""
    first, last = 0, places.size
    while first < last:
        middle = (first + last) // 2
        if int(places[middle]) < place:
            first = middle + 1
        else:
            last = middle
    return int(histogram[first]) if first < places.size and int(places[first]) == place else 0


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
