"""W + s·BA, formed on any run of coordinates.

A product of two float32 numbers is exact in float64, and the sum over the rank has one order: an
entry has the same bits in whatever piece it is formed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import kernel

WIDTH: Final = 1024
"""Columns of a row that are added up at a time: their float64 sums stay in the first cache."""


@kernel
def add_low_rank(left: Array, right: Array, scale: float, skip: int, out: Array) -> None:
    """Add float32(scale · Σ_k left[r, k] · right[k, c]) to `out`, which lies row by row.

    Its first entry is that of row 0 and column `skip`.
    """
    columns = right.shape[1]
    room = np.empty(WIDTH, np.float64)
    position = 0
    while position < out.size:
        row, column = (skip + position) // columns, (skip + position) % columns
        count = min(columns - column, out.size - position, WIDTH)
        for j in range(count):
            room[j] = 0.0
        for k in range(right.shape[0]):
            factor = np.float64(left[row, k])
            values = right[k, column : column + count]
            for j in range(count):
                room[j] += factor * np.float64(values[j])
        for j in range(count):
            out[position + j] += np.float32(scale * room[j])
        position += count


@kernel
def add_squares(values: Array, columns: int, skip: int, by_row: bool, sums: Array) -> None:
    """Add squares to the float64 sum of their row, or of their column; row 0, column `skip` first.

    Squares are added in the order of the coordinates.
    """
    for i in range(values.size):
        place = (skip + i) // columns if by_row else (skip + i) % columns
        sums[place] += np.float64(values[i]) * np.float64(values[i])


@kernel
def multiply_along(values: Array, columns: int, skip: int, by_row: bool, factors: Array) -> None:
    """Multiply each value by the float64 factor of its row, or of its column, and round."""
    for i in range(values.size):
        place = (skip + i) // columns if by_row else (skip + i) % columns
        values[i] = np.float32(np.float64(values[i]) * factors[place])
