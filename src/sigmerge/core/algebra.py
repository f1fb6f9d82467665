"""Linear algebra in float64 for operators that solve for a whole matrix, on the processor.

Matrices of an algebra add, multiply, slice and transpose alike, whoever holds them; the methods
here are what differs between numpy and torch (gpu/algebra.py).
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from sigmerge.core import Array

_BLOCK = 128
"""Rows of a triangle that are solved at once; larger ones by products of their halves."""
_STEPS = 5
"""Of the estimate of a condition number, at most."""

Matrix: TypeAlias = Any
"""float64, of an algebra: of numpy, or of torch."""


class Algebra(Protocol):
    """Where matrices lie and are solved."""

    dense: int
    """Up to this many rows it is faster to decompose all of a symmetric matrix than to find some
    eigenvectors by applying it to vectors."""

    def matrix(self, values: Array) -> Matrix:
        """Values in memory as a matrix; perhaps not a copy."""

    def symmetric(self, triangle: Array) -> Matrix:
        """The symmetric matrix of an upper triangle, row after row."""

    def array(self, matrix: Matrix) -> Array:
        """The values in memory, float64."""

    def zeros(self, *shape: int) -> Matrix: ...

    def norm(self, matrix: Matrix) -> float:
        """‖·‖_F."""

    def eigh(self, matrix: Matrix) -> tuple[Matrix, Matrix]:
        """Eigenvalues of a symmetric matrix, ascending, and eigenvectors in columns."""

    def cholesky(self, matrix: Matrix) -> tuple[Matrix, float]:
        """The lower factor and an estimate of the condition number; infinite if there is none."""

    def solved(self, factor: Matrix, rhs: Matrix) -> Matrix:
        """rhs · A⁻¹ by the lower factor of A."""


class ProcessorAlgebra:
    """NumPy and its LAPACK."""

    dense = 1024

    def matrix(self, values: Array) -> Matrix:
        return np.asarray(values, np.float64)

    def symmetric(self, triangle: Array) -> Matrix:
        size = side(triangle.size)
        gram, position = np.empty((size, size)), 0
        for i in range(size):
            row = triangle[position : position + size - i]
            gram[i, i:] = row
            gram[i:, i] = row
            position += size - i
        return gram

    def array(self, matrix: Matrix) -> Array:
        values: Array = matrix
        return values

    def zeros(self, *shape: int) -> Matrix:
        return np.zeros(shape)

    def norm(self, matrix: Matrix) -> float:
        return float(np.linalg.norm(matrix))

    def eigh(self, matrix: Matrix) -> tuple[Matrix, Matrix]:
        return np.linalg.eigh(matrix)

    def cholesky(self, matrix: Matrix) -> tuple[Matrix, float]:
        try:
            factor = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            return matrix, np.inf
        return factor, condition(factor, float(np.linalg.norm(matrix, 1)))

    def solved(self, factor: Matrix, rhs: Matrix) -> Matrix:
        return _inverse_times(factor, rhs.T).T


PROCESSOR = ProcessorAlgebra()


def side(entries: int) -> int:
    """Rows of the square matrix whose upper triangle has so many entries."""
    return (int(np.sqrt(8 * entries + 1)) - 1) // 2


def condition(factor: Array, norm: float) -> float:
    """An estimate of ‖A‖₁ ‖A⁻¹‖₁ from the lower factor of A and its norm (Higham, TOMS 1988)."""
    size = len(factor)
    at = np.full(size, 1.0 / size)
    inverse, sign = 0.0, np.zeros(size)
    for _ in range(_STEPS):
        column = _inverse_times(factor, at)
        found, signs = float(np.abs(column).sum()), np.where(column < 0, -1.0, 1.0)
        if found <= inverse or np.array_equal(signs, sign):
            inverse = max(inverse, found)
            break
        inverse, sign = found, signs
        slope = _inverse_times(factor, sign)
        at = np.zeros(size)
        at[np.abs(slope).argmax()] = 1.0
    rising = (1.0 + np.arange(size) / max(1, size - 1)) * np.where(np.arange(size) % 2, -1.0, 1.0)
    other = 2.0 * float(np.abs(_inverse_times(factor, rising)).sum()) / (3.0 * size)
    return norm * max(inverse, other) if np.isfinite(inverse) else np.inf


def _inverse_times(factor: Array, rhs: Array) -> Array:
    """A⁻¹ · rhs by the lower factor of A."""
    return _lower(factor[::-1, ::-1].T, _lower(factor, rhs)[::-1])[::-1]


def _lower(factor: Array, rhs: Array) -> Array:
    """The solution of a lower triangle. The transpose of one is one, read from its end."""
    size = len(factor)
    if size <= _BLOCK:
        solution: Array = np.linalg.solve(factor, rhs)
        return solution
    half = size // 2
    first = _lower(factor[:half, :half], rhs[:half])
    rest = rhs[half:] - factor[half:, :half] @ first
    return np.concatenate([first, _lower(factor[half:, half:], rest)])
