"""CAT: take out of every update what would move other tasks' features (Sun et al., 2025).

Notation: D_i = W_i − W_ref, (out, in) as torch stores it; S_k = X_kᵀX_k; t_i the task vector of a
norm scale or bias. The authors' code could not be read: the formulas come from a review, a preprint
and a third-party port that agree. Renormalising, the scale of the network that features come from
(capture: scale), dividing by token counts and all defaults are second-hand and therefore options.
Masks take positive scores only, as the projection takes positive eigenvalues only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from sigmerge.core import Array
from sigmerge.core import merge as loops
from sigmerge.core.algebra import PROCESSOR, Algebra, Matrix
from sigmerge.core.merge import scale
from sigmerge.errors import require
from sigmerge.operators.base import (
    LAMBDA,
    OUTSIDE,
    WEIGHT,
    Chunk,
    Parameter,
    Site,
    Statistics,
    Tile,
)
from sigmerge.operators.features import (
    FORMED,
    NORMALIZE_TOKENS,
    FeatureOperator,
    energies,
    grams,
    matrices,
    matrix_size,
    note_fallback,
    note_solved,
    stored,
    weights_of,
)
from sigmerge.operators.task_arithmetic import task_vectors

ZERO = 1e-10
"""Eigenvalues below this times the largest |eigenvalue| are not positive."""


Trim = Callable[[Matrix], Matrix]


class Cat(FeatureOperator):
    """θ = θ_ref + λ Σ_i w_i T_i′, T_i′ the task vector of i trimmed for every other task k.

    Linear weights: D_i ← (I − B_k B_kᵀ) D_i, B_k the eigenvectors of the `rank` largest positive
    eigenvalues of G_k = Σ_{i≠k} D_i (S_k − trade_off · S_i) D_iᵀ. Norm scales and biases: the
    entries of t_i with the largest scores of k are set to zero. Experts in the recipe's order.
    """

    name = "cat"
    title = "CAT"
    paper = "Sun et al., CAT Merging: conflict-aware task merging, 2025"
    parameters = (
        WEIGHT,
        Parameter("lambda", float, LAMBDA.doc, 0.4, 0.4),
        Parameter("rank", int, "directions taken out per task and weight", 4, 4, low=0),
        Parameter("trade_off", float, "how much a task's own features are spared", 5.0, 5.0, low=0),
        Parameter("norm_mask", int, "entries masked per task and norm scale", 4, 4, low=0),
        Parameter("norm_trade_off", float, "the same trade-off for norm scales", 10.0, 10.0, low=0),
        Parameter("bias_mask", int, "entries masked per task and bias", 4, 4, low=0),
        Parameter("renorm", bool, "restore an update's norm after each trim", False, False),
        Parameter("normalize_tokens", bool, NORMALIZE_TOKENS, True, True),
        OUTSIDE,
    )

    def granule(self, site: Site) -> int:
        return matrix_size(site) if site.measured or site.shift else 4

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        site = chunk.site
        for tile in task_vectors(chunk):
            if site.measured == "gram":
                for part, one in weights_of(tile, site, chunk.statistics):
                    project = partial(_projected, part.experts, one, chunk.statistics)
                    note_solved(chunk, {"rank": _refill(part, one, *chunk.solve(project))})
            elif site.measured or site.shift:
                trimmed = _masked(tile.experts, site, chunk.statistics)
                chunk.notes["masked"] = _refill(tile, site, *trimmed)
            else:
                note_fallback(chunk, "task vectors added untrimmed")
            loops.weighted_sum(tile.experts, site.weights(), tile.out)
            scale(tile.out, 1.0, site.settings["lambda"])
            yield tile


def _refill(
    tile: Tile, site: Site, vectors: Sequence[Array], taken: Sequence[int]
) -> dict[str, int]:
    """Put trimmed task vectors in their place; how much each task took out of the others'."""
    for row, vector in zip(tile.experts, vectors, strict=True):
        row[:] = vector
    return dict(zip(site.experts, taken, strict=True))


def _projected(
    rows: Array, site: Site, statistics: Statistics, algebra: Algebra
) -> tuple[list[Array], list[int]]:
    """The updates of a linear weight trimmed, and how many directions each task took out.

    All bases come from the untrimmed updates.
    """
    options = site.settings
    deltas = list(matrices(rows, site, algebra))
    features = list(grams(site, statistics, options["normalize_tokens"], algebra))
    bases = [
        removal_basis(deltas, features, k, options["rank"], options["trade_off"], algebra)
        for k in range(len(deltas))
    ]
    trims = [_projection(algebra.matrix(basis)) for basis in bases]
    trim_others(deltas, trims, options["renorm"], algebra)
    return [stored(delta, site, algebra) for delta in deltas], [b.shape[1] for b in bases]


def _masked(rows: Array, site: Site, statistics: Statistics) -> tuple[list[Array], list[int]]:
    """The task vectors of a norm scale or bias trimmed, and how many entries each task masked."""
    options, tasks = site.settings, range(len(rows))
    vectors = rows.astype(np.float64)
    if site.measured == "energy":
        seen = energies(site, statistics, mean=True)
        scores = [scale_scores(vectors, seen, k, options["norm_trade_off"]) for k in tasks]
        masks = [top_positive(score, options["norm_mask"]) for score in scores]
    else:
        masks = [top_positive(shift_scores(vectors, k), options["bias_mask"]) for k in tasks]
    trim_others(list(vectors), [_masking(mask) for mask in masks], options["renorm"], PROCESSOR)
    return list(vectors), [int(mask.sum()) for mask in masks]


def removal_basis(
    deltas: Sequence[Matrix],
    features: Sequence[Matrix],
    task: int,
    rank: int,
    trade_off: float,
    algebra: Algebra = PROCESSOR,
) -> Array:
    """B_k, (out, at most rank), in memory: eigenvectors of the largest positive eigenvalues of G_k.

    G_k is indefinite and may be large: it is only ever applied to vectors, and the largest
    algebraic eigenvalues are computed.
    """
    size = len(deltas[0])
    others = [i for i in range(len(deltas)) if i != task]

    def apply(vectors: Matrix) -> Matrix:
        total = algebra.zeros(*vectors.shape)
        for i in others:
            seen = deltas[i].T @ vectors
            total += deltas[i] @ (features[task] @ seen - trade_off * (features[i] @ seen))
        return total

    rank = min(rank, size)
    if rank == 0:
        return np.zeros((size, 0))
    values, vectors, largest = _top(apply, size, rank, algebra)
    # A copy: one column that was only turned round has a negative stride, which torch refuses.
    return vectors[:, np.flatnonzero(values > ZERO * largest)[::-1]]


def _top(apply: Trim, size: int, rank: int, algebra: Algebra) -> tuple[Array, Array, float]:
    """The largest algebraic eigenpairs in memory, ascending, and the largest |eigenvalue|."""
    if size > max(algebra.dense, rank + 1):
        require("CAT of wide layers", models=["scipy"])
        from scipy.sparse.linalg import ArpackNoConvergence

        try:
            return _lanczos(lambda v: algebra.array(apply(algebra.matrix(v))), size, rank)
        except ArpackNoConvergence:
            pass  # largest eigenvalues too close to one another: take all of them apart
    matrix = apply(algebra.matrix(np.eye(size)))
    matrix = (matrix + matrix.T) / 2
    norm = algebra.norm(matrix)
    zero = ZERO * norm / np.sqrt(size)
    # None is positive where this has a factor: the largest are a crowd around zero.
    if np.isfinite(algebra.cholesky(algebra.matrix(zero * np.eye(size)) - matrix)[1]):
        return np.zeros(0), np.zeros((size, 0)), norm
    values, vectors = algebra.eigh(matrix)
    top = algebra.array(values[-rank:]), algebra.array(vectors[:, -rank:])
    return *top, float(abs(values).max())


def _lanczos(apply: Callable[[Array], Array], size: int, rank: int) -> tuple[Array, Array, float]:
    """Without forming the matrix. It is scaled and shifted into [0, 2], so that the solver's
    tolerance is relative to the largest |eigenvalue| and not to an eigenvalue near zero."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    start = np.random.default_rng(0).standard_normal(size)
    if not apply(start).any():
        return np.zeros(0), np.zeros((size, 0)), 0.0
    plain = LinearOperator((size, size), matvec=apply, dtype=np.float64)
    found = eigsh(plain, 1, which="LM", v0=start, tol=0.01, return_eigenvectors=False)
    largest = float(np.abs(found[0]))
    shifted = LinearOperator((size, size), lambda v: apply(v) / largest + v, dtype=np.float64)
    space = min(size, max(64, 4 * rank))
    soon = max(4, size // 256) if size <= FORMED else None
    values, vectors = eigsh(shifted, rank, which="LA", v0=start, ncv=space, maxiter=soon, tol=ZERO)
    order = np.argsort(values)
    return (values[order] - 1.0) * largest, vectors[:, order], largest


def scale_scores(vectors: Array, seen: Array, task: int, trade_off: float) -> Array:
    """s_k = Σ_{i≠k} (mean x̂_k² − trade_off · mean x̂_i²) t_i²."""
    scores = (seen[task] - trade_off * seen) * vectors**2
    total: Array = np.delete(scores, task, axis=0).sum(axis=0)
    return total


def shift_scores(vectors: Array, task: int) -> Array:
    """s_k = Σ_{i≠k} t_i²: what a bias adds does not depend on features."""
    score: Array = (np.delete(vectors, task, axis=0) ** 2).sum(axis=0)
    return score


def top_positive(scores: Array, count: int) -> Array:
    """A mask of the largest positive scores, at most `count`; ties go to the lowest index."""
    mask = np.zeros(scores.size, bool)
    mask[np.argsort(-scores, kind="stable")[:count]] = True
    return mask & (scores > 0)


def _projection(basis: Array) -> Trim:
    return lambda delta: delta - basis @ (basis.T @ delta)


def _masking(mask: Array) -> Trim:
    return lambda vector: np.where(mask, 0.0, vector)


def trim_others(
    vectors: Sequence[Matrix], trims: Sequence[Trim], renorm: bool, algebra: Algebra = PROCESSOR
) -> None:
    """Each update, in its place, under the trims of all other tasks, in order: projections do not
    commute."""
    for i, vector in enumerate(vectors):
        for k, trim in enumerate(trims):
            if k == i:
                continue
            before = algebra.norm(vector) if renorm else 0.0
            vector[:] = trim(vector)
            if renorm and (after := algebra.norm(vector)) > 0:
                vector *= before / after
