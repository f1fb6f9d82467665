"""Exact top-k by magnitude without a sort.

The magnitude of a float32 is ordered like its 31-bit pattern. One histogram over the upper 16 of
those bits finds the bin of the k-th largest value, a second over the lower 15 bits inside that bin
finds the value itself. Counts of tiles add up, so a threshold over a whole model costs two passes
and constant memory. Equal magnitudes are admitted from the lowest flat index on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sigmerge.kernels.jit import kernel

Array = np.ndarray[Any, Any]

HIGH_BINS = 1 << 16
LOW_BINS = 1 << 15
LOW_BITS = 15


class Cut(NamedTuple):
    """Where a top-k ends: everything above `threshold`, and the first `ties` entries equal to it.

    `threshold` is a 31-bit magnitude pattern.
    """

    threshold: int
    ties: int


@kernel
def count_high(values: Array, histogram: Array) -> None:
    """Add the upper 16 bits of every magnitude pattern to a histogram of 65536 bins."""
    bits = values.view(np.uint32)
    for i in range(bits.size):
        histogram[(bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(LOW_BITS)] += 1


@kernel
def count_low(values: Array, high: int, histogram: Array) -> None:
    """Among magnitudes whose upper bits are `high`, add the lower 15 bits to a histogram."""
    bits = values.view(np.uint32)
    wanted = np.uint32(high)
    for i in range(bits.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        if magnitude >> np.uint32(LOW_BITS) == wanted:
            histogram[magnitude & np.uint32(LOW_BINS - 1)] += 1


def bin_of_rank(histogram: Array, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest entry (k from 1), and how many are wanted from it."""
    from_top = np.cumsum(histogram[::-1])
    position = int(np.searchsorted(from_top, k))
    above = int(from_top[position - 1]) if position else 0
    return histogram.size - 1 - position, k - above


def threshold_of(high: int, low: int) -> int:
    return (high << LOW_BITS) | low
