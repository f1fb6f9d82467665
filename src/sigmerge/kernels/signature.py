"""Direction and sign statistics of the task vectors, both in one pass.

Every float64 sum runs in `LANES` interleaved lanes: coordinate j of the tile belongs to lane
j mod `LANES`, a lane adds its coordinates in increasing j, and the lanes are added from 0 up. That
order is written out here rather than left to the compiler, so the loops vectorise without any
licence to reassociate. The product of two float32 is exact in float64, so it does not matter
either whether a machine fuses multiply and add. Together: the same bits everywhere.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sigmerge.kernels import LANES, Array
from sigmerge.kernels.jit import kernel, part
from sigmerge.kernels.stored import load, load_less

SIGNATURE_STRIP: Final = 8 * LANES
"""Coordinates taken at once, few enough for the first-level cache. A lane has eight of them."""


@kernel
def signature(
    addresses: Array,
    kinds: Array,
    start: int,
    size: int,
    tile: int,
    dots: Array,
    mass: Array,
) -> bool:
    """Add every task vector, tile by tile, to the sums behind Eq. views (p and s).

    Members are the experts and the reference; returns whether everything read is finite.
    `dots` float64 (experts, experts) gains ⟨Δ_d, Δ_d'⟩; the diagonal is ‖Δ_d‖².
    `mass` float64 (2,) gains [Σ_j m_j c_j, Σ_j m_j], with m_j = max_d |Δ_d[j]| and c_j = 1 where
    some Δ_d[j] > 0 and some Δ_d[j] < 0.
    """
    experts, fine = len(dots), True
    products = np.empty((experts, experts, LANES), dtype=np.float64)
    masses = np.empty((2, LANES), dtype=np.float64)
    base, room = np.empty(SIGNATURE_STRIP, np.float32), np.empty(SIGNATURE_STRIP, np.float32)
    # Beyond the end of the tile these stay zero, which changes no sum.
    wide = np.empty((experts, SIGNATURE_STRIP), dtype=np.float64)
    highest = np.empty(SIGNATURE_STRIP, dtype=np.float32)
    lowest = np.empty(SIGNATURE_STRIP, dtype=np.float32)
    for first in range(0, size, tile):
        products[:], masses[:] = 0.0, 0.0
        last = min(first + tile, size)
        for begin in range(first, last, SIGNATURE_STRIP):
            highest[:], lowest[:] = 0.0, 0.0
            row, less = (
                room[: min(SIGNATURE_STRIP, last - begin)],
                base[: min(SIGNATURE_STRIP, last - begin)],
            )
            fine &= load(addresses[experts], kinds[experts], begin, less)
            for expert in range(experts):
                fine &= load_less(addresses[expert], kinds[expert], begin, less, row)
                widen(row, wide[expert])
                _stretch(row, highest, lowest)
            _add_mass(highest, lowest, masses[0], masses[1])
            for a in range(experts):
                for b in range(a, experts):
                    add_products(wide[a], wide[b], products[a, b])
        for a in range(experts):
            for b in range(a, experts):
                pair = lane_sum(products[a, b])
                dots[a, b] += pair
                if a != b:
                    dots[b, a] += pair
        mass[0] += lane_sum(masses[0])
        mass[1] += lane_sum(masses[1])
    return fine


@part
def widen(row: Array, wide: Array) -> None:
    for i in range(row.size):
        wide[i] = row[i]
    wide[row.size :] = 0.0


@part
def _stretch(row: Array, highest: Array, lowest: Array) -> None:
    """Let the range of every coordinate hold one more expert's value."""
    for i in range(row.size):
        value, high, low = row[i], highest[i], lowest[i]
        highest[i] = value if value > high else high
        lowest[i] = value if value < low else low


@part
def _add_mass(highest: Array, lowest: Array, contested: Array, total: Array) -> None:
    zero = np.float32(0.0)
    for start in range(0, SIGNATURE_STRIP, LANES):
        highs, lows = highest[start : start + LANES], lowest[start : start + LANES]
        for i in range(LANES):
            high, low = highs[i], lows[i]
            largest = high if high > -low else -low
            total[i] += largest
            contested[i] += largest if (high > zero) & (low < zero) else zero


@part
def add_products(left: Array, right: Array, lanes: Array) -> None:
    for i in range(LANES):
        total = lanes[i] + left[i] * right[i]
        total += left[i + LANES] * right[i + LANES]
        total += left[i + 2 * LANES] * right[i + 2 * LANES]
        total += left[i + 3 * LANES] * right[i + 3 * LANES]
        total += left[i + 4 * LANES] * right[i + 4 * LANES]
        total += left[i + 5 * LANES] * right[i + 5 * LANES]
        total += left[i + 6 * LANES] * right[i + 6 * LANES]
        total += left[i + 7 * LANES] * right[i + 7 * LANES]
        lanes[i] = total


@part
def lane_sum(lanes: Array) -> float:
    total = 0.0
    for i in range(LANES):
        total += lanes[i]
    return total
