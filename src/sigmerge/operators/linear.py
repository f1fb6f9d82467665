"""Linear soup: the weighted mean of the experts (Wortsman et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sigmerge.core import Array
from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula, scale
from sigmerge.operators.base import OUTSIDE, WEIGHT, Chunk, Operator, Parameter, Site, Tile


def plain_mean(tile: Tile) -> None:
    """The mean of the experts' rows."""
    weighted_mean(tile, np.ones(len(tile.experts), np.float32))


def weighted_mean(tile: Tile, weights: Array) -> None:
    """Σ w θ / Σ w of the experts' rows."""
    loops.weighted_sum(tile.experts, weights, tile.out)
    scale(tile.out, float(weights.sum(dtype=np.float32)), 1.0)


class Linear(Operator):
    """θ = Σ_d w_d θ_d / Σ_d w_d."""

    name = "linear"
    title = "Linear soup"
    paper = "Wortsman et al., Model soups, ICML 2022 (arXiv:2203.05482)"
    needs_reference = False
    gives_vector = False
    parameters = (
        WEIGHT,
        Parameter("normalize", bool, "divide by the sum of the weights", True, True),
        OUTSIDE,
    )

    def ends_anywhere(self, site: Site) -> bool:
        return True

    def check(self, sites: Sequence[Site]) -> list[str]:
        for site in sites:
            if site.settings["normalize"] and site.weights().sum(dtype=np.float32) == 0:
                return [
                    f"the weights of {site.tensor} sum to zero and cannot be normalised; "
                    "give others, or normalize: false"
                ]
        return []

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        weights = chunk.site.weights()
        total = float(weights.sum(dtype=np.float32)) if chunk.site.settings["normalize"] else 1.0
        return loops.formula(weights, vectors=False, divisor=total)
