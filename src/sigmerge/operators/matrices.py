"""What operators on whole matrices share: the two-dimensional weights of layers, one at a time.

Notation: Δ_d = W_d − W_ref, (out, in) as torch stores it; w_d the weight of an expert, which its
task vector is multiplied with before anything else; K experts. All else (embeddings, head, norm
scales, biases) is task arithmetic with a coefficient of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sigmerge.core import Array
from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula
from sigmerge.operators.base import Chunk, Operator, Parameter, Site, Tile
from sigmerge.operators.features import matrices, matrix_size, note_solved, parts_of, stored
from sigmerge.operators.task_arithmetic import task_vectors

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra, Matrix

REST = Parameter(
    "rest", float, "coefficient, beside the weights, of all that is no matrix of a layer", 0.4, 0.4
)
VANISHING = Parameter(
    "rtol", float, "singular values up to this times the largest count as zero", 1e-6, 1e-6,
    False, 0, 1,
)  # fmt: skip


SPECTRUM = 17.0
"""Operations of products in whose time a symmetric matrix of n rows is taken apart, a n³: one core
of an Intel Xeon with AVX-512 multiplies at 36 to 81 GFLOP/s (512 to 2,048 rows) and takes apart in
0.44 to 0.31 ns n³."""


def is_matrix(site: Site) -> bool:
    """Whether a tensor is a matrix of a layer, or a stack of them: the experts of a mixture."""
    return site.block is not None and len(site.shape) in (2, 3) and min(site.shape[-2:]) > 1


class MatrixOperator(Operator):
    """θ = θ_ref + λ F(w_1 Δ_1, …, w_K Δ_K) for every matrix; elsewhere θ_ref + rest Σ_d w_d Δ_d."""

    solves = True
    copies: float = 4.0
    """How many matrices in float64 solving for one takes, beside six Grams; a test counts them."""
    copies_per_expert: float = 0.0

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> tuple[Matrix, dict[str, Any]]:
        """F of one matrix, (out, in), and what the plan says about it. `rows` are the Δ_d, flat."""
        raise NotImplementedError

    def granule(self, site: Site) -> int:
        return matrix_size(site) if is_matrix(site) else 4

    def ends_anywhere(self, site: Site) -> bool:
        return not is_matrix(site)

    def scratch(self, site: Site) -> int:
        if not is_matrix(site):
            return 0
        size, experts = matrix_size(site), len(site.experts)
        doubles = (self.copies + self.copies_per_expert * experts) * size
        return 4 * (experts + 1) * size + int(8 * (doubles + 6 * self.side(site) ** 2))

    def operations(self, site: Site) -> float:
        if not is_matrix(site):
            return 0.0
        *_, outputs, inputs = site.shape
        stacked = site.size // (outputs * inputs)
        return stacked * self.operations_of_one(outputs, inputs, site)

    def operations_of_one(self, outputs: int, inputs: int, site: Site) -> float:
        """Of one matrix; `site` has experts and settings."""
        raise NotImplementedError

    def side(self, site: Site) -> int:
        """Rows of the Grams that are made of a matrix."""
        return min(site.shape[-2:])

    def formula(self, chunk: Chunk, survey: Any) -> Formula | None:
        site = chunk.site
        if is_matrix(site):
            return None
        return loops.formula(site.weights(), factor=float(site.settings["rest"]))

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        for tile in task_vectors(chunk):
            for part, one in parts_of(tile, chunk.site):
                part.out[:], notes = chunk.solve(partial(self._solved, part.experts, one))
                if notes:
                    note_solved(chunk, notes)
            yield tile

    def _solved(self, rows: Array, site: Site, algebra: Algebra) -> tuple[Array, dict[str, Any]]:
        merged, notes = self.combined(rows, site, algebra)
        return stored(merged * float(site.settings["lambda"]), site, algebra), notes


def weighted(rows: Array, site: Site, algebra: Algebra) -> Iterator[Matrix]:
    """w_d Δ_d of every expert in turn."""
    for matrix, weight in zip(matrices(rows, site, algebra), site.settings["weight"], strict=True):
        yield matrix * float(weight)


class Factors(NamedTuple):
    """A = left · diag(values) · rightᵀ, values ascending and in memory; zero ones are left out."""

    left: Matrix
    values: Array
    right: Matrix


def factors(
    matrix: Matrix, rtol: float, algebra: Algebra, most: int | None = None, beside: float = 0.0
) -> Factors:
    """The singular values above `rtol` times the largest, at most so many of them, and vectors.

    The largest, or one `beside` it: of what this is a remainder of.
    From the eigenvectors of the smaller Gram in float64: a direction whose singular value is s
    times the largest is true to about 1e-16 / s², by which float32's precision is kept down to
    s = 1e-4 and a ten-thousandth at 1e-6.
    """
    rows, columns = matrix.shape
    if rows < columns:
        found = factors(matrix.T, rtol, algebra, most, beside)
        return Factors(found.right, found.values, found.left)
    squares, vectors = algebra.eigh(matrix.T @ matrix)
    values = np.sqrt(np.maximum(algebra.array(squares), 0.0))
    kept = int((values > rtol * max(values[-1], beside)).sum())
    first = columns - (kept if most is None else min(kept, most))
    right, values = vectors[:, first:], values[first:]
    return Factors((matrix @ right) / algebra.matrix(values), values, right)


def operations_of_factors(outputs: int, inputs: int, kept: float = 1.0) -> float:
    """Of `factors`, a share of whose directions is kept."""
    side = min(outputs, inputs)
    return SPECTRUM * side**3 + 2 * (1 + kept) * outputs * inputs * side


def orthonormal(vectors: Matrix, rtol: float, algebra: Algebra) -> Matrix:
    """The nearest matrix with orthonormal columns: the polar factor, V (VᵀV)^(−1/2).

    Directions that the columns do not span stay zero.
    """
    squares, basis = algebra.eigh(vectors.T @ vectors)
    values = np.sqrt(np.maximum(algebra.array(squares), 0.0))
    kept = values > rtol * values[-1]
    inverse = np.divide(1.0, values, out=np.zeros_like(values), where=kept)
    return vectors @ ((basis * algebra.matrix(inverse)) @ basis.T)
