"""Exact top-k by magnitude without a sort.

The magnitude of a float32 is ordered like its 31-bit pattern. One histogram over the upper 16 of
those bits finds the bin of the k-th largest value, a second over the lower 15 bits inside that bin
finds the value itself. Counts of tiles add up, so a threshold over a whole model costs two passes
and constant memory. Equal magnitudes are admitted from the lowest flat index on.

Differences of bfloat16 numbers take few values, so a threshold is one that a good part of the
entries have, and the histograms of a sample tell which. One count over everything proves such a
guess right or wrong; only after a wrong one are the exact histograms made.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from sigmerge.kernels.jit import kernel
from sigmerge.kernels.stored import load, load_less

Array = np.ndarray[Any, Any]

HIGH_BINS = 1 << 16
LOW_BINS = 1 << 15
LOW_BITS = 15
MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
STRIP: Final = 4096
"""Coordinates whose task vector is held at a time."""
SAMPLE: Final = 16
"""One strip in this many is looked at to guess a threshold."""
WORTH_A_GUESS: Final = 1 / 1024
"""Share of a sample that must sit exactly on the guessed threshold for the guess to be tried."""


class Cut(NamedTuple):
    """Where a top-k ends: everything above `threshold`, and the first `ties` entries equal to it.

    `threshold` is a 31-bit magnitude pattern.
    """

    threshold: int
    ties: int


@kernel
def count_high(
    addresses: Array, kinds: Array, start: int, size: int, experts: Array, every: int, counts: Array
) -> bool:
    """Count the upper 16 bits of |Δ_d|'s patterns, one row of 65536 bins per wanted expert.

    Only one strip in `every` is looked at. Members are all experts and the reference; returns
    whether everything read is finite.
    """
    room, base, fine = np.empty(STRIP, np.float32), np.empty(STRIP, np.float32), True
    for begin in range(0, size, STRIP * every):
        count = min(STRIP, size - begin)
        delta, less = room[:count], base[:count]
        fine &= load(addresses[-1], kinds[-1], begin, less)
        for row in range(len(experts)):
            d = experts[row]
            fine &= load_less(addresses[d], kinds[d], begin, less, delta)
            bits, histogram = delta.view(np.uint32), counts[row]
            for i in range(count):
                histogram[(bits[i] & MAGNITUDE) >> np.uint32(LOW_BITS)] += np.uint32(1)
    return fine


@kernel
def count_low(
    addresses: Array,
    kinds: Array,
    start: int,
    size: int,
    experts: Array,
    every: int,
    bins: Array,
    counts: Array,
) -> bool:
    """Among magnitudes whose upper bits are an expert's bin, count the lower 15 bits."""
    room, base, fine = np.empty(STRIP, np.float32), np.empty(STRIP, np.float32), True
    inside = np.empty(STRIP, np.uint16)
    for begin in range(0, size, STRIP * every):
        count = min(STRIP, size - begin)
        delta, less = room[:count], base[:count]
        fine &= load(addresses[-1], kinds[-1], begin, less)
        for row in range(len(experts)):
            d, wanted, found = experts[row], np.uint32(bins[row]), 0
            fine &= load_less(addresses[d], kinds[d], begin, less, delta)
            bits, histogram = delta.view(np.uint32), counts[row]
            for i in range(count):
                # Adding 0 or 1 keeps the loop free of a branch that no one can predict.
                magnitude = bits[i] & MAGNITUDE
                inside[found] = magnitude & np.uint32(LOW_BINS - 1)
                found += magnitude >> np.uint32(LOW_BITS) == wanted
            for i in range(found):
                histogram[inside[i]] += np.uint32(1)
    return fine


@kernel
def count_cut(
    addresses: Array,
    kinds: Array,
    start: int,
    size: int,
    experts: Array,
    thresholds: Array,
    counts: Array,
) -> bool:
    """How many magnitudes lie above each wanted expert's threshold, and how many equal it."""
    room, base, fine = np.empty(STRIP, np.float32), np.empty(STRIP, np.float32), True
    for begin in range(0, size, STRIP):
        count = min(STRIP, size - begin)
        delta, less = room[:count], base[:count]
        fine &= load(addresses[-1], kinds[-1], begin, less)
        for row in range(len(experts)):
            d = experts[row]
            fine &= load_less(addresses[d], kinds[d], begin, less, delta)
            above, tied = _above_and_tied(delta, np.int32(thresholds[row]))
            counts[row, 0] += above
            counts[row, 1] += tied
    return fine


@kernel
def _above_and_tied(values: Array, cut: np.int32) -> tuple[int, int]:
    bits = values.view(np.int32)
    above, tied = np.int32(0), np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))
        above = np.int32(above + np.int32(magnitude > cut))
        tied = np.int32(tied + np.int32(magnitude == cut))
    return int(above), int(tied)


def bin_of_rank(histogram: Array, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest entry (k from 1), and how many are wanted from it."""
    from_top = np.cumsum(histogram[::-1])
    position = int(np.searchsorted(from_top, k))
    above = int(from_top[position - 1]) if position else 0
    return histogram.size - 1 - position, k - above


def threshold_of(high: int, low: int) -> int:
    return (high << LOW_BITS) | low
