"""Solving by NumPy's LAPACK, beside SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import cho_solve
from scipy.linalg.lapack import dpocon

from sigmerge.core.algebra import PROCESSOR


def gram(size: int, spread: float, seed: int = 0) -> np.ndarray:
    """A symmetric matrix whose eigenvalues fall from 1 to 1 / spread."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    made = (basis * np.geomspace(1, 1 / spread, size)) @ basis.T
    return (made + made.T) / 2


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_solutions_are_those_of_scipy(size: int, spread: float) -> None:
    matrix = gram(size, spread)
    rhs = np.random.default_rng(1).standard_normal((7, size))
    factor, number = PROCESSOR.cholesky(matrix)
    np.testing.assert_allclose(factor @ factor.T, matrix, atol=1e-14)
    found = PROCESSOR.solved(factor, rhs)
    wanted = cho_solve((factor, True), rhs.T).T
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-15 * spread * abs(wanted).max())
    np.testing.assert_allclose(found @ matrix, rhs, rtol=0, atol=1e-14 * spread)
    reciprocal, failed = dpocon(factor, np.linalg.norm(matrix, 1), uplo="L")
    assert not failed and number == pytest.approx(1 / reciprocal, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_of_a_condition_number_is_close(seed: int) -> None:
    matrix = gram(60, 10.0 ** (2 * seed), seed)
    _, number = PROCESSOR.cholesky(matrix)
    exact = np.linalg.cond(matrix, 1)
    assert exact / 3 <= number <= exact * (1 + 1e-6)


@pytest.mark.parametrize("worst", [0.0, -1e-3, np.nan])
def test_what_has_no_factor_has_no_condition(worst: float) -> None:
    matrix = np.diag([1.0, 2.0, worst])
    assert PROCESSOR.cholesky(matrix)[1] == np.inf
