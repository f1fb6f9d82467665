"""Model Stock: towards the mean of few models as far as their angles allow (Jang et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from sigmerge.core import Array, products
from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula
from sigmerge.operators.base import (
    OUTSIDE,
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
    Tile,
)
from sigmerge.operators.slerp import add_parts, inner_products


class ModelStock(Operator):
    """θ = θ_ref + t · mean Δ, t = K cos φ / (1 + (K − 1) cos φ), cos φ the mean over all pairs.

    One t per tensor, or with `filter_wise` one per row. Where the denominator vanishes the
    reference stays.
    """

    name = "model_stock"
    title = "Model Stock"
    paper = "Jang et al., Model Stock, ECCV 2024 (arXiv:2403.19522)"
    least = 2
    parameters = (
        Parameter("filter_wise", bool, "one ratio per row, not per tensor", False, False),
        OUTSIDE,
    )

    def granule(self, site: Site) -> int:
        rows = site.settings["filter_wise"] and len(site.shape) > 0
        return site.shape[-1] if rows else super().granule(site)

    def ends_anywhere(self, site: Site) -> bool:
        return not site.settings["filter_wise"]

    def prepare(self, site: Site, survey: Any) -> Passes:
        if site.settings["filter_wise"]:
            return None
        dots = yield Pass(partial(inner_products, vectors=True, reference=True), add_parts)
        return ratios(dots[None])[0]

    def formula(self, chunk: Chunk, survey: Any) -> Formula | None:
        if chunk.state is None:
            return None
        experts = len(chunk.site.experts)
        return loops.formula(np.full(experts, chunk.state / experts, np.float32))

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        length, experts = (chunk.site.shape or (1,))[-1], len(chunk.site.experts)
        for tile in chunk.tiles("reference"):
            dots = np.empty((tile.out.size // length, experts, experts))
            products.grams_along(tile.experts, length, 1, dots)
            each = (ratios(dots) / experts).astype(np.float32)
            coefficients = np.repeat(each[:, None], experts, 1)
            products.combine_along(tile.experts, length, 1, coefficients, tile.out)
            yield tile


def ratios(dots: Array) -> Array:
    """t of every vector from the inner products (vectors, K, K) of its task vectors."""
    norms = np.sqrt(np.diagonal(dots, axis1=1, axis2=2))
    products = np.maximum(norms[:, :, None] * norms[:, None, :], 1e-6)
    count = dots.shape[1]
    above = np.triu_indices(count, 1)
    cosine = np.clip(dots / products, -1, 1)[:, above[0], above[1]].mean(axis=1)
    below = 1 + (count - 1) * cosine
    singular = np.abs(below) < 1e-6
    return np.asarray(np.where(singular, 0.0, count * cosine / np.where(singular, 1.0, below)))
