"""LOT: the one task vector that moves every expert's features least (Sun et al., 2025).

Notation: D_k = W_k − W_ref, (out, in) as torch stores it; S_k = X_kᵀX_k; e_k = Σ x̂_k² over tokens.
The tolerance of the pseudo-inverse and the scale for language models are stated nowhere: options.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sigmerge.core import Array
from sigmerge.core.algebra import Algebra, Matrix
from sigmerge.core.merge import scale
from sigmerge.operators.base import (
    LAMBDA,
    OUTSIDE,
    Chunk,
    Parameter,
    Site,
    Statistics,
    Tile,
)
from sigmerge.operators.features import (
    RTOL,
    FeatureOperator,
    energies,
    grams,
    is_stack,
    matrices,
    matrix_size,
    note_fallback,
    note_solved,
    stored,
    sum_of,
    weights_of,
)
from sigmerge.operators.linear import plain_mean
from sigmerge.operators.task_arithmetic import task_vectors


class Spectrum(NamedTuple):
    """The eigenvectors of Σ S_k that are kept, and the inverses of their eigenvalues."""

    basis: Matrix
    inverse: Matrix


class Lot(FeatureOperator):
    """θ = θ_ref + λ T, T minimising Σ_k ‖X_k (T − T_k)‖², X_k expert k's own features.

    Linear weights: D = (Σ_k D_k S_k)(Σ_k S_k)⁺; in directions that no exemplar shows the reference
    stays. Norm scales: the mean weighted by e_k, channel by channel; zero where Σ_k e_k is zero.
    Biases and tensors without features: the plain mean of the task vectors.
    """

    name = "lot"
    title = "LOT"
    paper = "Sun et al., Towards minimizing feature drift in model merging (LOT Merging), 2025"
    parameters = (
        LAMBDA,
        RTOL,
        Parameter(
            "normalize_tokens", bool, "divide each expert's Gram by its tokens", False, False
        ),
        OUTSIDE,
    )

    def granule(self, site: Site) -> int:
        return matrix_size(site) if site.measured else 4

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        site = chunk.site
        for tile in task_vectors(chunk):
            if not site.measured or is_stack(site):
                note_fallback(chunk, "mean of the task vectors")
                plain_mean(tile)
            if site.measured == "gram":
                for part, one in weights_of(tile, site, chunk.statistics):
                    linear = partial(_linear, part, one, chunk.statistics)
                    part.out[:], rank = chunk.solve(linear)
                    note_solved(chunk, {"rank": rank, "of": one.inputs})
            elif site.measured == "energy":
                mean = site.settings["normalize_tokens"]
                tile.out[:] = weighted_mean(tile.experts, energies(site, chunk.statistics, mean))
            scale(tile.out, 1.0, site.settings["lambda"])
            yield tile


def spectrum(total: Matrix, rtol: float, algebra: Algebra) -> Spectrum:
    """(Σ S_k)⁺ in its eigenbasis."""
    values, vectors = algebra.eigh(total)
    kept = values > rtol * max(values[-1], 0.0)
    return Spectrum(vectors[:, kept], 1.0 / values[kept])


def weighted_mean(vectors: Array, weights: Array) -> Array:
    """Σ_k e_k T_k / Σ_k e_k, zero where no energy was seen."""
    total = weights.sum(axis=0)
    mixed: Array = (weights * vectors).sum(axis=0)
    return np.divide(mixed, total, out=np.zeros_like(total), where=total > 0)


def _linear(tile: Tile, site: Site, statistics: Statistics, algebra: Algebra) -> tuple[Array, int]:
    """D = (Σ_k D_k S_k)(Σ_k S_k)⁺ and the rank that was kept."""
    options = site.settings

    def every() -> Iterator[Matrix]:
        return grams(site, statistics, options["normalize_tokens"], algebra)

    basis, inverse = statistics.once(
        site.tensor,
        tuple(options.items()),
        lambda: spectrum(sum_of(every()), options["rtol"], algebra),
    )
    pairs = zip(matrices(tile.experts, site, algebra), every(), strict=True)
    moved = sum_of(delta @ gram for delta, gram in pairs)
    return stored(((moved @ basis) * inverse) @ basis.T, site, algebra), len(inverse)
