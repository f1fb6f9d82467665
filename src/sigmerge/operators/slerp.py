"""Spherical interpolation between two models or among several (Shoemake, 1985).

A tensor is one vector, or many along an axis (`nuslerp`). All that is needed beforehand are inner
products, which one pass sums in float64; the merge is then a weighted sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from sigmerge.core import Array, products
from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula
from sigmerge.errors import PoolError
from sigmerge.operators.base import (
    OUTSIDE,
    WEIGHT,
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
    Tile,
    add,
)

NEARLY_PARALLEL = 0.9995
"""Cosine above which mergekit's slerp interpolates on the straight line."""
LEAST_NORM = 1e-8


def inner_products(chunk: Chunk, vectors: bool, reference: bool) -> Array:
    """Of a chunk's task vectors, or of its members' values, by part."""
    members = len(chunk.site.experts) + (reference and not vectors)
    dots = chunk.sums(members, members)
    chunk.read(products.gram, vectors, chunk.step, dots, reference=reference)
    return dots.sums


def add_parts(total: Array | None, parts: Array) -> Array:
    """Inner products of one more chunk, added part by part."""
    first, *others = parts
    return reduce(add, others, add(total, first))


class Slerp(Operator):
    """θ = sin((1−t)φ)/sin φ · θ_ref + sin(tφ)/sin φ · θ_1, φ the angle between the two tensors."""

    name = "slerp"
    title = "SLERP"
    paper = "Shoemake, Animating rotation with quaternion curves, SIGGRAPH 1985"
    gives_vector = False
    most = 1
    parameters = (
        Parameter("t", float, "0 is the base model, 1 the other", None, None),
        OUTSIDE,
    )

    def ends_anywhere(self, site: Site) -> bool:
        return True

    def prepare(self, site: Site, survey: Any) -> Passes:
        return (yield Pass(partial(inner_products, vectors=False, reference=True), add_parts))

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        other, base = arc(chunk.state, float(chunk.site.settings["t"]))
        return loops.formula(np.array([other], np.float32), vectors=False).plus_reference(base)


def arc(dots: Array, t: float) -> tuple[float, float]:
    """The coefficients of the other model and of the base, from their inner products."""
    norms = [norm if norm > LEAST_NORM else 1.0 for norm in np.sqrt(np.diag(dots)).tolist()]
    cosine = min(1.0, max(-1.0, float(dots[0, 1]) / norms[0] / norms[1]))
    if abs(cosine) > NEARLY_PARALLEL:
        return t, 1 - t
    angle = math.acos(cosine)
    return math.sin(t * angle) / math.sin(angle), math.sin((1 - t) * angle) / math.sin(angle)


class NuSlerp(Operator):
    """The shortest arc between two task vectors, or two models where there is no base model.

    The second one's share is t = w_2 / (w_1 + w_2). With `nuslerp_flatten: false` the vectors are
    a tensor's rows; with `nuslerp_row_wise` too, its columns, as mergekit has it.
    """

    name = "nuslerp"
    title = "NuSLERP"
    paper = Slerp.paper
    least = most = 2
    parameters = (
        WEIGHT,
        Parameter("nuslerp_flatten", bool, "a tensor is one vector", True, True),
        Parameter("nuslerp_row_wise", bool, "vectors along the first axis, not the last",
                  False, False),
        OUTSIDE,
    )  # fmt: skip

    def __init__(self, reference: bool = True) -> None:
        self.needs_reference = self.gives_vector = reference

    def with_reference(self, given: bool) -> Operator:
        return NuSlerp(given)

    def granule(self, site: Site) -> int:
        if site.settings["nuslerp_flatten"] or not site.shape:
            return super().granule(site)
        return site.size if site.settings["nuslerp_row_wise"] else site.shape[-1]

    def ends_anywhere(self, site: Site) -> bool:
        return bool(site.settings["nuslerp_flatten"])

    def prepare(self, site: Site, survey: Any) -> Passes:
        if not site.settings["nuslerp_flatten"]:
            return None
        reference = self.needs_reference
        visit = partial(inner_products, vectors=reference, reference=reference)
        return (yield Pass(visit, add_parts))

    def formula(self, chunk: Chunk, survey: Any) -> Formula | None:
        if chunk.state is None:
            return None
        coefficients = shortest_arcs(chunk.state[None], _share(chunk.site))[0]
        return loops.formula(coefficients, vectors=self.needs_reference)

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        shape, columns = chunk.site.shape or (1,), chunk.site.settings["nuslerp_row_wise"]
        length = shape[0] if columns else shape[-1]
        inner = math.prod(shape[1:]) if columns else 1
        for tile in chunk.tiles("reference" if self.needs_reference else None):
            dots = np.empty((tile.out.size // length, 2, 2))
            products.grams_along(tile.experts, length, inner, dots)
            coefficients = shortest_arcs(dots, _share(chunk.site))
            products.combine_along(tile.experts, length, inner, coefficients, tile.out)
            yield tile


def _share(site: Site) -> float:
    first, second = site.settings["weight"]
    return 0.5 if abs(first + second) < 1e-6 else second / (first + second)


def shortest_arcs(dots: Array, t: float) -> Array:
    """float32 coefficients (vectors, 2) from the inner products of each pair."""
    norms = np.maximum(np.sqrt(np.diagonal(dots, axis1=1, axis2=2)), 1e-7)
    cosine = np.clip(dots[:, 0, 1] / norms[:, 0] / norms[:, 1], -1, 1)
    parallel = 1 - cosine**2 <= 1e-16
    angle = np.arccos(np.where(parallel, 0.0, cosine))
    arcs = np.stack([np.sin((1 - t) * angle), np.sin(t * angle)], 1) / np.sin(angle)[:, None]
    return np.where(parallel[:, None], [1 - t, t], arcs).astype(np.float32)


class MultiSlerp(Operator):
    """The weighted mean of several directions, at the weighted mean of their lengths.

    mergekit maps the directions to the tangent space at their weighted mean, averages there and
    maps back. That average is zero, because the tangent space is taken at the mean; so this is the
    mean direction itself.
    """

    name = "multislerp"
    title = "Multi-SLERP"
    paper = "Goddard, Multi-SLERP, 2025 (goddard.blog/posts/multislerp-wow-what-a-cool-idea)"
    parameters = (
        WEIGHT,
        Parameter("normalize_weights", bool, "divide the weights by their sum", True, True),
        Parameter("eps", float, "what counts as zero", 1e-8, 1e-8),
        OUTSIDE,
    )

    def __init__(self, reference: bool = True) -> None:
        self.needs_reference = self.gives_vector = reference

    def with_reference(self, given: bool) -> Operator:
        return MultiSlerp(given)

    def check(self, sites: Sequence[Site]) -> list[str]:
        for site in sites:
            if site.settings["normalize_weights"] and sum(site.settings["weight"]) == 0:
                return [
                    f"the weights of {site.tensor} sum to zero and cannot be normalised; "
                    "give others, or normalize_weights: false"
                ]
        return []

    def ends_anywhere(self, site: Site) -> bool:
        return True

    def prepare(self, site: Site, survey: Any) -> Passes:
        if len(site.experts) == 1:
            return np.ones(1, np.float32)
        reference = self.needs_reference
        visit = partial(inner_products, vectors=reference, reference=reference)
        return _mean_direction(site, (yield Pass(visit, add_parts)))

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        return loops.formula(chunk.state, vectors=self.needs_reference)


def _mean_direction(site: Site, dots: Array) -> Array:
    """The coefficient of every expert."""
    settings, eps = site.settings, float(site.settings["eps"])
    weights = np.array(settings["weight"], np.float64)
    if settings["normalize_weights"]:
        weights = weights / weights.sum()
    norms = np.sqrt(np.diag(dots))
    shares = weights / (norms + eps)
    length = math.sqrt(max(float(shares @ dots @ shares), 0.0))
    if length < eps:
        if len(weights) == 2:
            return weights.astype(np.float32)
        raise PoolError(
            f"{site.tensor}: multislerp has no mean direction, because the weighted directions add "
            "up to zero. Give the experts other weights."
        )
    scale = float(norms @ weights) * math.cos(eps) / length
    return np.asarray(shares * scale, np.float32)
