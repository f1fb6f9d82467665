"""The algebra of core/algebra.py in torch, on a device. Its last bits are the device's own."""

from __future__ import annotations

import numpy as np
import torch

from sigmerge.core import Array
from sigmerge.core.algebra import PROCESSOR, Matrix, condition, side


class TensorAlgebra:
    """Matrices on one device."""

    dense = 2048

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def matrix(self, values: Array) -> Matrix:
        # Sent as they are and widened there: float32 is half the bytes.
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device).double()

    def symmetric(self, triangle: Array) -> Matrix:
        size = side(triangle.size)
        gram = self.zeros(size, size)
        upper = torch.ones(size, size, dtype=torch.bool, device=self._device).triu_()
        gram.masked_scatter_(upper, self.matrix(triangle))
        return gram.add_(gram.triu(1).T)

    def array(self, matrix: Matrix) -> Array:
        values: Array = matrix.cpu().numpy()
        return values

    def zeros(self, *shape: int) -> Matrix:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def norm(self, matrix: Matrix) -> float:
        return float(torch.linalg.vector_norm(matrix))

    def eigh(self, matrix: Matrix) -> tuple[Matrix, Matrix]:
        try:
            values, vectors = torch.linalg.eigh(matrix)
        except torch.linalg.LinAlgError:  # many equal eigenvalues, which LAPACK takes
            values, vectors = map(self.matrix, PROCESSOR.eigh(self.array(matrix)))
        return values, vectors

    def cholesky(self, matrix: Matrix) -> tuple[Matrix, float]:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if failed:
            return factor, np.inf
        # Estimated in memory, as on the processor: it decides how the matrix is solved.
        return factor, condition(self.array(factor), float(torch.linalg.matrix_norm(matrix, 1)))

    def solved(self, factor: Matrix, rhs: Matrix) -> Matrix:
        return torch.cholesky_solve(rhs.T, factor).T
