"""What the operators that read features share: RegMean, LOT and CAT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.core import Array
from sigmerge.messages import matrix_name
from sigmerge.operators.base import Chunk, Operator, Parameter, Site, Statistics, Tile

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra, Matrix

RTOL = Parameter(
    "rtol", float, "eigenvalues below this times the largest count as zero", 1e-10, 1e-10,
    False, 0, 1,
)  # fmt: skip
NORMALIZE_TOKENS = "divide each expert's sums by its tokens"


FORMED = 8192
"""Outputs of a weight up to which CAT forms a matrix of them where its solver does not end soon."""


class FeatureOperator(Operator):
    """Base of those that read Grams."""

    needs = "features"
    solves = True

    def scratch(self, site: Site) -> int:
        """Also of what no capture will have measured: that is not known before."""
        weight = site.block is not None and len(site.shape) > 1
        return peak_bytes(len(site.experts), site.shape) if weight else 0


def peak_bytes(experts: int, shape: tuple[int, ...]) -> int:
    """What merging a weight with Grams takes at most: CAT, which takes most, holds the updates in
    float32 and float64, every expert's Gram, and at times a few matrices of its outputs."""
    *_, rows, columns = shape
    size, outputs = rows * columns, min(rows, FORMED)
    return 12 * (experts + 3) * size + 8 * (experts + 8) * columns**2 + 32 * outputs**2


def matrix_size(site: Site) -> int:
    """Coordinates of a measured tensor that are merged together: one matrix of a stack."""
    return prod(site.shape[-2:])


def is_stack(site: Site) -> bool:
    """Whether matrices, each with its own Gram, are stored in one tensor: a mixture's experts."""
    return len(site.shape) == 3


def matrix_of(site: Site, number: int) -> Site:
    """One matrix of a stack as an operator sees it."""
    name, shape = matrix_name(site.tensor, number), site.shape[1:]
    return replace(site, tensor=name, shape=shape, size=prod(shape))


def reached(site: Site, statistics: Statistics) -> bool:
    """Whether a token of any expert's exemplars was among the inputs of a weight."""
    return any(statistics.rows(expert, site.tensor) for expert in site.experts)


def parts_of(tile: Tile, site: Site) -> Iterator[tuple[Tile, Site]]:
    """The matrix that a tile holds, or each of a stack."""
    if not is_stack(site):
        yield tile, site
        return
    size = matrix_size(site)
    for start in range(0, tile.out.size, size):
        part = slice(start, start + size)
        one = Tile(tile.start + start, tile.experts[:, part], tile.out[part])
        yield one, matrix_of(site, one.start // size)


def weights_of(tile: Tile, site: Site, statistics: Statistics) -> Iterator[tuple[Tile, Site]]:
    """The weight that a tile holds, or each of a stack that a token reached."""
    for part, one in parts_of(tile, site):
        if not is_stack(site) or reached(one, statistics):
            yield part, one


def note_solved(chunk: Chunk, notes: dict[str, Any]) -> None:
    """What the plan says about a weight; of a stack, how many there are."""
    chunk.notes.update({"matrices": chunk.site.shape[0]} if is_stack(chunk.site) else notes)


def grams(site: Site, statistics: Statistics, mean: bool, algebra: Algebra) -> Iterator[Matrix]:
    """S_k of every expert in turn, summed over its tokens or their mean."""
    for expert in site.experts:
        tokens = (statistics.rows(expert, site.tensor) if mean else 0) or 1
        yield algebra.symmetric(statistics.triangle(expert, site.tensor)) / tokens


def energies(site: Site, statistics: Statistics, mean: bool) -> Array:
    """e_k = Σ x̂_k² of every expert, one row each, or the mean over its tokens."""
    return np.stack([
        statistics.energy(expert, site.tensor)
        / (statistics.rows(expert, site.tensor) if mean else 1)
        for expert in site.experts
    ])  # fmt: skip


def matrices(rows: Array, site: Site, algebra: Algebra) -> Iterator[Matrix]:
    """The experts' rows of a whole tile as float64 matrices, (out, in), one at a time."""
    for row in rows:
        matrix = algebra.matrix(row.reshape(site.shape))
        yield matrix.T if site.transposed else matrix


def stored(matrix: Matrix, site: Site, algebra: Algebra) -> Array:
    """A matrix, (out, in), flat in the order its tensor is stored in, and in memory."""
    return algebra.array((matrix.T if site.transposed else matrix).ravel())


def note_fallback(chunk: Chunk, what: str) -> None:
    """A matrix of a block that no capture measured is not merged silently by a plainer rule."""
    site = chunk.site
    if not site.measured and site.block is not None and len(site.shape) > 1:
        chunk.notes["fallback"] = what


def sum_of(matrices: Iterable[Matrix]) -> Matrix:
    """The sum of matrices that come one by one; the first is added into."""
    left = iter(matrices)
    total = next(left)
    for matrix in left:
        total += matrix
    return total
