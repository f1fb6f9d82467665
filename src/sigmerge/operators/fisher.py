"""Fisher merging: experts weighted by how sure they are of each weight (Matena & Raffel, 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sigmerge.core import Array
from sigmerge.operators.base import (
    OUTSIDE,
    WEIGHT,
    Chunk,
    Operator,
    Parameter,
    Site,
    Statistics,
    Tile,
)
from sigmerge.operators.features import note_fallback
from sigmerge.operators.linear import plain_mean


class Fisher(Operator):
    """θ = Σ_k c_k F_k θ_k / Σ_k c_k F_k, F_k the diagonal Fisher information of expert k.

    `normalize: global_l2` divides F_k by its norm over the whole model first, without which one
    expert with large gradients decides everything. Then F_k is at least `floor`. The authors take
    the exact expectation over labels, which a vocabulary makes infeasible: where labels come from
    is said in the recipe's capture: section. Tensors without statistics are averaged.
    """

    name = "fisher"
    title = "Fisher"
    paper = "Matena & Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022 (arXiv:2111.09832)"  # noqa: E501
    needs = "fisher"
    needs_reference = False
    gives_vector = False
    parameters = (
        WEIGHT,
        Parameter(
            "normalize",
            ("global_l2", "none"),
            "divide each expert's Fisher by its norm over the model",
            "global_l2",
            "global_l2",
        ),
        Parameter("floor", float, "least Fisher of a weight, after normalising", 1e-6, 1e-6, low=0),
        OUTSIDE,
    )

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        for tile in chunk.tiles():
            if chunk.site.measured == "fisher":
                weights = _weights(tile, chunk.site, chunk.statistics)
                tile.out[:] = weighted_average(tile.experts, weights)
            else:
                note_fallback(chunk, "mean of the experts")
                plain_mean(tile)
            yield tile


def weighted_average(values: Array, weights: Array) -> Array:
    """Σ w θ / Σ w in float64; where all weights are zero, the mean."""
    total = weights.sum(axis=0)
    average: Array = (weights * values).sum(axis=0)
    mean = values.mean(axis=0, dtype=np.float64)
    return np.divide(average, total, out=mean, where=total != 0)


def _weights(tile: Tile, site: Site, statistics: Statistics) -> Array:
    """c_k F_k of a tile, one row per expert."""
    stop = tile.start + tile.out.size
    rows = []
    for expert, weight in zip(site.experts, site.settings["weight"], strict=True):
        row = statistics.fisher(expert, site.tensor, tile.start, stop).astype(np.float64)
        if site.settings["normalize"] == "global_l2":
            row /= statistics.fisher_norm(expert) or 1.0
        rows.append(weight * np.maximum(row, site.settings["floor"]))
    return np.stack(rows)
