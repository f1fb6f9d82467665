"""Linear algebra in float64 for operators that solve for a whole matrix, on the processor.

Matrices of an algebra add, multiply, slice and transpose alike, whoever holds them; the methods
here are what differs between numpy and torch (kernels/tensor_algebra.py).
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
from scipy.linalg import cho_solve
from scipy.linalg.lapack import dpocon, dpotrf

from sigmerge.kernels import Array

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
    """numpy and LAPACK."""

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
        factor, failed = dpotrf(matrix, lower=1, clean=1)
        return factor, np.inf if failed else condition(factor, np.linalg.norm(matrix, 1))

    def solved(self, factor: Matrix, rhs: Matrix) -> Matrix:
        return cho_solve((factor, True), rhs.T).T


PROCESSOR = ProcessorAlgebra()


def side(entries: int) -> int:
    """Rows of the square matrix whose upper triangle has so many entries."""
    return (int(np.sqrt(8 * entries + 1)) - 1) // 2


def condition(factor: Array, norm: Any) -> float:
    """LAPACK's estimate from the lower factor of a matrix and its norm ‖·‖₁."""
    reciprocal, _ = dpocon(factor, norm, uplo="L")
    return 1.0 / reciprocal if reciprocal > 0 else np.inf
