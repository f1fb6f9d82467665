"""Thinning a task vector out: by two cuts, or at random with the odds of an entry's rank."""

from __future__ import annotations

from typing import Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import kernel
from sigmerge.kernels.merge import trim
from sigmerge.kernels.philox import fill

DIGIT: Final = 256


@kernel
def cut_out(
    values: Array, threshold: int, ties: int, outlier: int, outlier_ties: int
) -> tuple[int, int]:
    """Keep what lies in the larger top and not in the smaller; thresholds and ties as in `trim`.

    Returns the ties of both that may still be kept further on.
    """
    largest = values.copy()
    outlier_ties = int(trim(largest, outlier, outlier_ties))
    ties = int(trim(values, threshold, ties))
    for i in range(values.size):
        values[i] = values[i] if largest[i] == 0 else np.float32(0)
    return ties, outlier_ties


@kernel
def prune_by_rank(
    values: Array,
    length: int,
    inner: int,
    key: tuple[int, int],
    start: int,
    least: float,
    most: float,
    inverse: bool,
) -> None:
    """Keep each entry with a probability from `least` to `most`, in equal steps by its rank.

    Ranks are those of magnitudes along an axis; equal ones rank by index. With `inverse` a survivor
    is divided by its probability. Seen along the axis `values` are (outer, length, inner), and
    `start` is the flat index of the first.
    """
    drawn = np.empty(values.size, np.uint32)
    fill(key, start, drawn)
    bits = values.view(np.uint32)
    order, room = np.empty(length, np.uint64), np.empty(length, np.uint64)
    step = (most - least) / (length - 1) if length > 1 else 0.0
    for vector in range(values.size // length):
        first = vector // inner * length * inner + vector % inner
        for k in range(length):
            magnitude = bits[first + k * inner] & np.uint32(0x7FFFFFFF)
            order[k] = (np.uint64(magnitude) << np.uint64(32)) | np.uint64(k)
        _sort(order, room)
        for rank in range(length):
            place = first + np.int64(order[rank] & np.uint64(0xFFFFFFFF)) * inner
            probability = least + step * rank
            if np.float64(drawn[place]) >= probability * 4294967296.0:
                values[place] = 0
            elif inverse:
                values[place] /= np.float32(probability)


@kernel
def _sort(entries: Array, room: Array) -> None:
    """Sort by the upper 32 bits, equal ones as they come: four passes of counting a byte."""
    counts = np.empty(DIGIT + 1, np.int64)
    for byte in range(4):
        shift = np.uint64(32 + 8 * byte)
        counts[:] = 0
        for i in range(entries.size):
            counts[np.int64((entries[i] >> shift) & np.uint64(0xFF)) + 1] += 1
        for digit in range(DIGIT):
            counts[digit + 1] += counts[digit]
        for i in range(entries.size):
            own = np.int64((entries[i] >> shift) & np.uint64(0xFF))
            room[counts[own]] = entries[i]
            counts[own] += 1
        entries[:] = room
