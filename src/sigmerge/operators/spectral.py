"""Merges by singular values: Iso-C, Iso-CTS, TSV-Merge, subspace boosting.

A full decomposition gives arbitrary singular vectors where singular values are zero, and methods
that raise these values add noise there; ours leaves such directions at the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.core import Array
from sigmerge.operators.base import LAMBDA, OUTSIDE, WEIGHT, Parameter, Site
from sigmerge.operators.features import matrices, sum_of
from sigmerge.operators.matrices import (
    REST,
    SPECTRUM,
    VANISHING,
    Factors,
    MatrixOperator,
    factors,
    operations_of_factors,
    orthonormal,
    weighted,
)

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra, Matrix

ISOTROPIC = "Marczak et al., No task left behind: isotropic model merging with common and " \
    "task-specific subspaces, ICML 2025 (arXiv:2502.04959)"  # fmt: skip
ISO_SCALE = Parameter("lambda", float, LAMBDA.doc, 1.3, 1.3)

Combined = tuple["Matrix", dict[str, Any]]


class OfTheSum(MatrixOperator):
    """Base of those that decompose the sum of the task vectors and put it together again."""

    def operations_of_one(self, outputs: int, inputs: int, site: Site) -> float:
        side = min(outputs, inputs)
        return operations_of_factors(outputs, inputs) + 2 * outputs * inputs * side


class IsoC(OfTheSum):
    """The sum of the task vectors, every singular value of a matrix replaced by their mean.

    The mean is over min(out, in) values, zeros among them.
    """

    name = "iso_c"
    title = "Iso-C"
    paper = ISOTROPIC
    parameters = (WEIGHT, ISO_SCALE, REST, VANISHING, OUTSIDE)

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> Combined:
        total = sum_of(weighted(rows, site, algebra))
        found = factors(total, site.settings["rtol"], algebra)
        level = found.values.sum() / min(total.shape)
        return (found.left * level) @ found.right.T, _rank(found)


class Boost(OfTheSum):
    """The sum of the task vectors, singular values below one of them raised to it.

    That is the one at which the values, from the largest down, have summed up to the share `beta`
    of all. The authors boost the result of any method; ours is task arithmetic's.
    """

    name = "boost"
    title = "Subspace boosting"
    paper = "Skorobogat et al., Subspace-boosted model merging, 2025 (arXiv:2506.16506)"
    parameters = (
        WEIGHT,
        LAMBDA,
        Parameter("beta", float, "share of the sum of singular values that is left", 0.2, 0.2,
                  False, 0, 1),
        REST,
        VANISHING,
        OUTSIDE,
    )  # fmt: skip

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> Combined:
        total = sum_of(weighted(rows, site, algebra))
        found = factors(total, site.settings["rtol"], algebra)
        raised = algebra.matrix(boosted(found.values, site.settings["beta"]))
        return (found.left * raised) @ found.right.T, _rank(found)


class Tsv(MatrixOperator):
    """Every task vector cut to its share of the rank, then all singular vectors orthonormalised.

    U = [U_1 … U_K] and V = [V_1 … V_K] hold min(out, in)/K singular vectors of each Δ_d; U⊥ and V⊥
    are their polar factors, and the result is U⊥ diag(w_d σ_d) V⊥ᵀ. Weights scale singular values
    only, so the result is linear in them.
    """

    name = "tsv"
    title = "TSV-Merge"
    paper = (
        "Gargiulo et al., Task singular vectors: reducing task interference in model merging, "
        "CVPR 2025 (arXiv:2412.00081)"
    )
    copies = 6.0
    parameters = (WEIGHT, LAMBDA, REST, VANISHING, OUTSIDE)

    def operations_of_one(self, outputs: int, inputs: int, site: Site) -> float:
        experts = len(site.experts)
        each = operations_of_factors(outputs, inputs, 1 / experts)
        return experts * each + operations_beside(outputs, inputs)

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> Combined:
        experts, outputs, inputs = len(rows), site.outputs, site.inputs
        share = max(1, min(outputs, inputs) // experts)
        beside = Beside(outputs, inputs, share * experts, algebra)
        for delta, weight in zip(
            matrices(rows, site, algebra), site.settings["weight"], strict=True
        ):
            found = factors(delta, site.settings["rtol"], algebra, share)
            beside.add(found, found.values * float(weight), share)
        return beside.product(beside.values, site.settings["rtol"]), {"rank": share}


class IsoCts(MatrixOperator):
    """Iso-C whose last directions are given to each task's own residual directions.

    The first directions of the sum's left singular vectors are common; what they leave of each
    task vector gives its share of the others. All are orthonormalised together, and every singular
    value is their mean.
    """

    name = "iso_cts"
    title = "Iso-CTS"
    paper = ISOTROPIC
    copies = 8.0
    parameters = (
        WEIGHT,
        ISO_SCALE,
        Parameter("common", float, "share of directions that are common", 0.8, 0.8, False, 0, 1),
        REST,
        VANISHING,
        OUTSIDE,
    )  # fmt: skip

    def operations_of_one(self, outputs: int, inputs: int, site: Site) -> float:
        experts, common = len(site.experts), float(site.settings["common"])
        total = operations_of_factors(outputs, inputs, common)
        each = operations_of_factors(outputs, inputs, (1 - common) / experts)
        each += 4 * common * outputs * inputs * min(outputs, inputs)
        return total + experts * each + operations_beside(outputs, inputs)

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> Combined:
        experts, outputs, inputs = len(rows), site.outputs, site.inputs
        rank, rtol = min(outputs, inputs), site.settings["rtol"]
        own = own_directions(rank, experts, site.settings["common"])
        total = sum_of(weighted(rows, site, algebra))
        common = factors(total, rtol, algebra, rank - experts * own)
        largest = float(common.values.max(initial=0.0))
        beside = Beside(outputs, inputs, rank, algebra)
        for delta in weighted(rows, site, algebra):
            left = delta - common.left @ (common.left.T @ delta)
            found = factors(left, rtol, algebra, own, largest)
            beside.add(found, found.values, own)
        beside.add(common, common.values, rank - experts * own)
        level = np.full(rank, beside.values.mean())
        return beside.product(level, rtol), {"common": rank - experts * own, "own": own}


class Beside:
    """Singular vectors of several matrices side by side, each in its place; zero where few are."""

    def __init__(self, outputs: int, inputs: int, most: int, algebra: Algebra) -> None:
        self.left, self.right = algebra.zeros(outputs, most), algebra.zeros(inputs, most)
        self.values = np.zeros(most)
        self._algebra, self._begin = algebra, 0

    def add(self, found: Factors, values: Array, places: int) -> None:
        place = slice(self._begin, self._begin + len(values))
        self.left[:, place], self.right[:, place] = found.left, found.right
        self.values[place] = values
        self._begin += places

    def product(self, values: Array, rtol: float) -> Matrix:
        """U⊥ diag(values) V⊥ᵀ."""
        left, right = (orthonormal(each, rtol, self._algebra) for each in (self.left, self.right))
        return (left * self._algebra.matrix(values)) @ right.T


def operations_beside(outputs: int, inputs: int) -> float:
    """Of two polar factors, their inverse roots among them, and the product."""
    side = min(outputs, inputs)
    polar = 2 * (SPECTRUM + 2) * side**3 + 4 * (outputs + inputs) * side**2
    return polar + 2 * outputs * inputs * side


def boosted(values: Array, beta: float) -> Array:
    """Singular values, ascending, the small ones raised."""
    if not len(values):
        return values
    sums = np.cumsum(values[::-1])
    place = int(np.argmax(sums >= beta * sums[-1]))
    return np.maximum(values, values[::-1][place])


def own_directions(rank: int, experts: int, common: float) -> int:
    """How many directions each task has of its own, as the authors round."""
    return min(rank // experts, round((rank - int(rank * common)) / experts))


def _rank(found: Factors) -> dict[str, Any]:
    return {"rank": len(found.values)}
