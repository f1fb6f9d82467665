"""KnOTS: merge task vectors in the basis of their common outputs (Stoica et al., 2025).

Notation: [Δ_1 … Δ_K] = U Σ [V_1 … V_K]ᵀ, side by side along the inputs; an expert's coordinates in
the common basis are Σ V_dᵀ = Uᵀ Δ_d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.core import Array
from sigmerge.operators.base import LAMBDA, OUTSIDE, WEIGHT, Parameter, Site
from sigmerge.operators.features import sum_of
from sigmerge.operators.matrices import REST, SPECTRUM, VANISHING, MatrixOperator, weighted

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra, Matrix


class Knots(MatrixOperator):
    """U merged(Σ V_1ᵀ, …, Σ V_Kᵀ), by TIES or by DARE, matrix by matrix.

    Σ stands with V_d, as the authors have it. `ties` keeps the `density` largest entries of an
    expert, elects signs and averages what agrees; `dare` keeps entries at random, divides them by
    the density and adds them up. The authors take one threshold over all matrices.
    """

    name = "knots"
    title = "KnOTS"
    paper = "Stoica et al., Model merging with SVD to tie the KnOTS, ICLR 2025 (arXiv:2410.19735)"
    copies, copies_per_expert = 6.0, 3.0
    parameters = (
        WEIGHT,
        LAMBDA,
        Parameter("inner", ("ties", "dare"), "what merges in the common basis", "ties", "ties"),
        Parameter("density", float, "fraction of entries kept", 0.2, 0.2, True, 0, 1),
        REST,
        VANISHING,
        OUTSIDE,
    )

    def operations_of_one(self, outputs: int, inputs: int, site: Site) -> float:
        products = 4 * len(site.experts) + 2
        return SPECTRUM * outputs**3 + products * inputs * outputs**2

    def side(self, site: Site) -> int:
        return site.shape[-2]

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> tuple[Matrix, dict[str, Any]]:
        options = site.settings
        squares, vectors = algebra.eigh(
            sum_of(delta @ delta.T for delta in weighted(rows, site, algebra))
        )
        values = np.sqrt(np.maximum(algebra.array(squares), 0.0))
        first = len(values) - int((values > options["rtol"] * values[-1]).sum())
        basis = vectors[:, first:]
        parts = [algebra.array(basis.T @ delta) for delta in weighted(rows, site, algebra)]
        if options["inner"] == "ties":
            kept = [trimmed(each, d) for each, d in zip(parts, options["density"], strict=True)]
            merged = elected_mean(kept)
        else:
            merged = sum_of(
                dropped(each, density, site, expert)
                for each, density, expert in zip(
                    parts, options["density"], site.experts, strict=True
                )
            )
        return basis @ algebra.matrix(merged), {"rank": basis.shape[1]}


def trimmed(values: Array, density: float) -> Array:
    """The ⌊density · size⌋ entries largest in magnitude, at least one unless density is 0.

    Of equal ones the first stay.
    """
    count = min(values.size, max(1, int(density * values.size))) if density > 0 else 0
    if count == 0 or values.size == 0:
        return np.zeros_like(values)
    sizes = np.abs(values).ravel()
    least = np.partition(sizes, sizes.size - count)[sizes.size - count]
    stays = sizes > least
    tied = np.flatnonzero(sizes == least)[: count - int(stays.sum())]
    stays[tied] = True
    return np.where(stays.reshape(values.shape), values, 0.0)


def elected_mean(kept: list[Array]) -> Array:
    """The mean of the entries that have the sign of the sum; a sum of zero elects +."""
    elected = np.where(sum_of(each * 1.0 for each in kept) < 0, -1.0, 1.0)
    total, count = np.zeros_like(elected), np.zeros_like(elected)
    for each in kept:
        agrees = each * elected > 0
        total += np.where(agrees, each, 0.0)
        count += agrees
    return total / np.maximum(count, 1.0)


def dropped(values: Array, density: float, site: Site, expert: str) -> Array:
    """Each entry kept with probability `density`, and divided by it."""
    if density >= 1:
        return values
    if density <= 0:
        return np.zeros_like(values)
    words = [site.seed, *(int.from_bytes(name.encode()) for name in (expert, site.tensor))]
    draws = np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
    return np.where(draws.random(values.shape) < density, values / density, 0.0)
