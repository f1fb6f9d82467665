"""Inner products of float32 rows, strip by strip, in float64.

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
from sigmerge.kernels.jit import exact, inlined, part

PRODUCT_STRIP: Final = 8 * LANES
"""Coordinates taken at once, few enough for the first-level cache. A lane has eight of them."""


@part
def add_products(rows: Array, lanes: Array) -> None:
    """Add the products of all pairs of rows (rows, PRODUCT_STRIP) to lanes (rows, rows, LANES).

    Rows are taken by twos, so that what is loaded and widened serves several products.
    """
    count = len(rows)
    for a in range(0, count - 1, 2):
        _triangle(rows[a], rows[a + 1], lanes[a, a], lanes[a, a + 1], lanes[a + 1, a + 1])
        for b in range(a + 2, count):
            _rectangle(rows[a], rows[a + 1], rows[b], lanes[a, b], lanes[a + 1, b])
    if count % 2:
        _square(rows[count - 1], lanes[count - 1, count - 1])


@exact
def _triangle(left: Array, right: Array, first: Array, mixed: Array, second: Array) -> None:
    """left·left, left·right and right·right."""
    for i in range(LANES):
        a, b, c = first[i], mixed[i], second[i]
        for j in range(i, i + PRODUCT_STRIP, LANES):
            x, y = np.float64(left[j]), np.float64(right[j])
            a += x * x
            b += x * y
            c += y * y
        first[i], mixed[i], second[i] = a, b, c


@exact
def _rectangle(left: Array, right: Array, other: Array, first: Array, second: Array) -> None:
    """left·other and right·other."""
    for i in range(LANES):
        a, b = first[i], second[i]
        for j in range(i, i + PRODUCT_STRIP, LANES):
            x = np.float64(other[j])
            a += np.float64(left[j]) * x
            b += np.float64(right[j]) * x
        first[i], second[i] = a, b


@exact
def _square(row: Array, lanes: Array) -> None:
    for i in range(LANES):
        total = lanes[i]
        for j in range(i, i + PRODUCT_STRIP, LANES):
            total += np.float64(row[j]) * np.float64(row[j])
        lanes[i] = total


@inlined
def _bf16(raw: Array, i: int) -> np.float32:
    return np.uint32(np.uint32(raw[i]) << np.uint32(16)).view(np.float32)


@exact
def add_pair(left: Array, right: Array, lanes: Array) -> None:
    """As `add_products` of two rows of bfloat16 patterns, which never leave the registers.

    `lanes` is flat here and below: with a place in one array for each sum, the compiler sees that
    none is another.
    """
    for i in range(LANES):
        a, b, c = lanes[i], lanes[i + LANES], lanes[i + 3 * LANES]
        for j in range(i, i + PRODUCT_STRIP, LANES):
            x, y = np.float64(_bf16(left, j)), np.float64(_bf16(right, j))
            a += x * x
            b += x * y
            c += y * y
        lanes[i], lanes[i + LANES], lanes[i + 3 * LANES] = a, b, c


@exact
def add_pair_less(left: Array, right: Array, base: Array, lanes: Array) -> None:
    """As `add_pair`, of what two rows are more than a third, rounded to float32."""
    for i in range(LANES):
        a, b, c = lanes[i], lanes[i + LANES], lanes[i + 3 * LANES]
        for j in range(i, i + PRODUCT_STRIP, LANES):
            less = _bf16(base, j)
            x = np.float64(np.float32(_bf16(left, j) - less))
            y = np.float64(np.float32(_bf16(right, j) - less))
            a += x * x
            b += x * y
            c += y * y
        lanes[i], lanes[i + LANES], lanes[i + 3 * LANES] = a, b, c


@exact
def add_three_less(left: Array, middle: Array, right: Array, base: Array, lanes: Array) -> None:
    """As `add_pair_less`, of three rows."""
    for i in range(LANES):
        a, b, c = lanes[i], lanes[i + LANES], lanes[i + 2 * LANES]
        d, e, f = lanes[i + 4 * LANES], lanes[i + 5 * LANES], lanes[i + 8 * LANES]
        for j in range(i, i + PRODUCT_STRIP, LANES):
            less = _bf16(base, j)
            x = np.float64(np.float32(_bf16(left, j) - less))
            y = np.float64(np.float32(_bf16(middle, j) - less))
            z = np.float64(np.float32(_bf16(right, j) - less))
            a += x * x
            b += x * y
            c += x * z
            d += y * y
            e += y * z
            f += z * z
        lanes[i], lanes[i + LANES], lanes[i + 2 * LANES] = a, b, c
        lanes[i + 4 * LANES], lanes[i + 5 * LANES], lanes[i + 8 * LANES] = d, e, f


@part
def add_lanes(lanes: Array, dots: Array) -> None:
    """Add the sums of all lanes to the inner products."""
    for a in range(len(dots)):
        for b in range(a, len(dots)):
            pair = lane_sum(lanes[a, b])
            dots[a, b] += pair
            if a != b:
                dots[b, a] += pair


@part
def lane_sum(lanes: Array) -> float:
    total = 0.0
    for i in range(LANES):
        total += lanes[i]
    return total
