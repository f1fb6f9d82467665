"""W + s·BA, formed on any run of coordinates (native/low_rank.cpp).

A product of two float32 numbers is exact in float64, and the sum over the rank has one order: an
entry has the same bits in whatever piece it is formed. A run begins at the flat index `skip`.
"""

from __future__ import annotations

from sigmerge import _native
from sigmerge.core import Array


def add_low_rank(left: Array, right: Array, scale: float, skip: int, out: Array) -> None:
    """Add float32(scale · Σ_k left[r, k] · right[k, c]) to `out`, which lies row by row.

    The factors are float64 that hold float32.
    """
    _native.add_low_rank(left, right, scale, skip, out)


def add_squares(values: Array, columns: int, skip: int, by_row: bool, sums: Array) -> None:
    """Add squares to the float64 sum of their row, or of their column, in their order."""
    _native.add_squares(values, columns, skip, by_row, sums)


def multiply_along(values: Array, columns: int, skip: int, by_row: bool, factors: Array) -> None:
    """Multiply each value by the float64 factor of its row, or of its column, and round."""
    _native.multiply_along(values, columns, skip, by_row, factors)
