"""Direction and sign statistics of the task vectors, both in one pass.

Sums are float64 in the fixed order of `products`.
"""

from __future__ import annotations

import numpy as np

from sigmerge.kernels import LANES, Array
from sigmerge.kernels.jit import kernel, part
from sigmerge.kernels.products import PRODUCT_STRIP, add_lanes, add_products, lane_sum
from sigmerge.kernels.rooms import room
from sigmerge.kernels.stored import load, load_less
from sigmerge.kernels.window import Window, ready


def signature(
    addresses: Array,
    kinds: Array,
    window: Window,
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
    lanes = room((*dots.shape, LANES), np.float64, "lanes")
    masses = room((2, LANES), np.float64, "masses")
    strips = room((len(dots) + 3, PRODUCT_STRIP), np.float32, "strips")
    given = (addresses, kinds, window, size, tile, dots, mass, lanes, masses, strips)
    return bool(_signature(*given))


@kernel
def _signature(
    addresses: Array, kinds: Array, window: Window, size: int, tile: int, dots: Array, mass: Array,
    lanes: Array, masses: Array, strips: Array,
) -> bool:  # fmt: skip
    experts, fine, filled = len(dots), True, 0
    rows, base = strips[:experts], strips[experts]
    highest, lowest = strips[experts + 1], strips[experts + 2]
    for first in range(0, size, tile):
        lanes[:], masses[:] = 0.0, 0.0
        last = min(first + tile, size)
        for begin in range(first, last, PRODUCT_STRIP):
            count = min(PRODUCT_STRIP, last - begin)
            less = base[:count]
            filled = ready(addresses, window, begin, begin + count, size, filled)
            highest[:], lowest[:] = 0.0, 0.0
            fine &= load(addresses[experts], kinds[experts], begin, less)
            for expert in range(experts):
                row = rows[expert, :count]
                fine &= load_less(addresses[expert], kinds[expert], begin, less, row)
                rows[expert, count:] = 0  # which changes no sum
                _stretch(row, highest, lowest)
            _add_mass(highest, lowest, masses[0], masses[1])
            add_products(rows, lanes)
        add_lanes(lanes, dots)
        mass[0] += lane_sum(masses[0])
        mass[1] += lane_sum(masses[1])
    return fine


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
    for start in range(0, PRODUCT_STRIP, LANES):
        highs, lows = highest[start : start + LANES], lowest[start : start + LANES]
        for i in range(LANES):
            high, low = highs[i], lows[i]
            largest = high if high > -low else -low
            total[i] += largest
            contested[i] += largest if (high > zero) & (low < zero) else zero
