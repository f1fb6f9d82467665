"""W + s·BA, formed on any run of coordinates.

A product of two float32 numbers is exact in float64, and the sum over the rank has one order: an
entry has the same bits in whatever piece it is formed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import kernel, part

WIDTH: Final = 1024
"""Columns of a row that are added up at a time: their float64 sums stay in the first cache."""


@part
def _add_four(factors: Array, a: Array, b: Array, c: Array, d: Array, sums: Array) -> None:
    first, second, third, fourth = factors[0], factors[1], factors[2], factors[3]
    for j in range(a.size):
        sums[j] = (((sums[j] + first * a[j]) + second * b[j]) + third * c[j]) + fourth * d[j]


@part
def _add_one(factor: float, values: Array, sums: Array) -> None:
    for j in range(values.size):
        sums[j] += factor * values[j]


@kernel
def add_low_rank(left: Array, right: Array, scale: float, skip: int, out: Array) -> None:
    """Add float32(scale · Σ_k left[r, k] · right[k, c]) to `out`, which lies row by row.

    Its first entry is that of row 0 and column `skip`. The factors are float64 that hold float32.
    """
    rank, columns = right.shape
    room = np.empty(WIDTH, np.float64)
    position = 0
    while position < out.size:
        row, column = (skip + position) // columns, (skip + position) % columns
        count = min(columns - column, out.size - position, WIDTH)
        for j in range(count):
            room[j] = 0.0
        end = column + count
        k = 0
        while k + 4 <= rank:  # in the same order as one by one, with fewer passes over the sums
            _add_four(left[row, k : k + 4], right[k, column:end], right[k + 1, column:end],
                      right[k + 2, column:end], right[k + 3, column:end], room)  # fmt: skip
            k += 4
        while k < rank:
            _add_one(left[row, k], right[k, column:end], room)
            k += 1
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
