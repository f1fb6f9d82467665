"""Weighted sums of stored rows: what many merges come down to.

The same float32 operations in the same order as the loops of `merge` that thin and combine, but a
stored value is widened, multiplied and added in one loop, and no row of it is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sigmerge.kernels import STRIP, Array
from sigmerge.kernels.jit import kernel, part, variants
from sigmerge.kernels.raw import array_at
from sigmerge.kernels.rooms import room
from sigmerge.kernels.stored import BF16, load, save, take, take_less
from sigmerge.kernels.window import Drain, Window, drained, ready


def weighted_rows(
    weights: Array, vectors: bool, after: Array, addresses: Array, kinds: Array, window: Window,
    size: int, out: np.uint64, kind: int, drain: Drain,
) -> tuple[bool, bool]:  # fmt: skip
    """Σ_d w_d v_d, then the steps `after`, as of a formula; whether input and output are finite.

    A result that cannot be written counts as one that is not finite.
    """
    given = (weights, after, addresses, kinds, window, size, room((3, STRIP), np.float32, "sums"))
    fine, stored = _summing(vectors)(*given, out, kind, drain)
    return fine, stored


@variants
def _summing(vectors: bool) -> Any:
    @kernel
    def summing(
        weights: Array, after: Array, addresses: Array, kinds: Array, window: Window, size: int,
        rooms: Array, out: np.uint64, kind: int, drain: Drain,
    ) -> tuple[bool, bool]:  # fmt: skip
        last, fine, stored = len(weights), True, True
        filled, begun, place = 0, 0, out
        for begin in range(0, size, STRIP):
            count = min(STRIP, size - begin)
            filled = ready(addresses, window, begin, begin + count, size, filled)
            here, base, row = rooms[0, :count], rooms[1, :count], rooms[2, :count]
            if vectors:
                take(addresses[last], kinds[last], begin, base)
            for d in range(last):
                if vectors:
                    _add_less(addresses[d], kinds[d], begin, weights[d], d == 0, base, row, here)
                else:
                    _add(addresses[d], kinds[d], begin, weights[d], d == 0, row, here)
            for step in range(len(after)):
                scale(here, after[step, 0], after[step, 1])
                share = after[step, 2]
                if share != 0 and vectors:
                    add_scaled(here, base, share)
                elif share != 0:
                    _add(addresses[last], kinds[last], begin, share, False, row, here)
            if not save(here, place, kind, begin):
                # A sum with a term that is not finite is not: all others need not be looked at.
                stored = False
                for d in range(len(addresses)):
                    fine &= load(addresses[d], kinds[d], begin, row)
            begun = drained(drain, out, begun, begin + count, STRIP, size, stored)
            if begun < 0:
                return fine, False
            place = np.uint64(np.int64(out) - drain.width * begun)
        return fine, stored

    return summing


@part
def _add(
    address: np.uint64, kind: int, begin: int, weight: np.float32, first: bool, row: Array,
    total: Array,
) -> None:  # fmt: skip
    """Add w v to the total, or begin it so. `row` is room."""
    if kind != BF16:
        take(address, kind, begin, row)
        _add_row(row, weight, first, total)
        return
    raw = array_at(np.uint64(address + np.uint64(2) * np.uint64(begin)), total.size, np.uint16)
    if first:
        for i in range(total.size):
            total[i] = np.uint32(np.uint32(raw[i]) << np.uint32(16)).view(np.float32) * weight
    else:
        for i in range(total.size):
            value = np.uint32(np.uint32(raw[i]) << np.uint32(16)).view(np.float32)
            total[i] += value * weight


@part
def _add_less(
    address: np.uint64, kind: int, begin: int, weight: np.float32, first: bool, less: Array,
    row: Array, total: Array,
) -> None:  # fmt: skip
    """As `_add`, with w (v − less)."""
    if kind != BF16:
        take_less(address, kind, begin, less, row)
        _add_row(row, weight, first, total)
        return
    raw = array_at(np.uint64(address + np.uint64(2) * np.uint64(begin)), total.size, np.uint16)
    if first:
        for i in range(total.size):
            value = np.uint32(np.uint32(raw[i]) << np.uint32(16)).view(np.float32)
            total[i] = np.float32(value - less[i]) * weight
    else:
        for i in range(total.size):
            value = np.uint32(np.uint32(raw[i]) << np.uint32(16)).view(np.float32)
            total[i] += np.float32(value - less[i]) * weight


@part
def _add_row(row: Array, weight: np.float32, first: bool, total: Array) -> None:
    if first:
        for i in range(total.size):
            total[i] = row[i] * weight
    else:
        add_scaled(total, row, weight)


@kernel
def add_scaled(total: Array, values: Array, factor: np.float32) -> None:
    for i in range(total.size):
        total[i] += values[i] * factor


@kernel
def scale(out: Array, divisor: float, factor: float) -> None:
    """τ · factor / divisor, in place."""
    below, above = np.float32(divisor), np.float32(factor)
    if below == 1 and above == 1:
        return
    for i in range(out.size):
        out[i] = out[i] / below * above
