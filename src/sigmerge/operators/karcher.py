"""The Karcher mean: the point of the sphere nearest to all models' directions (Karcher, 1977)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from sigmerge.core import Array
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
)
from sigmerge.operators.slerp import add_parts, inner_products


class Karcher(Operator):
    """θ = mean length times the Karcher mean of the directions θ_d/‖θ_d‖, tensor by tensor.

    Every step of the iteration stays a weighted sum of the models, so it is carried out on the
    weights alone, from inner products that one pass sums.
    """

    name = "karcher"
    title = "Karcher mean"
    paper = "Karcher, Riemannian center of mass, 1977; for model merging: arXiv:2603.04972"
    needs_reference = False
    gives_vector = False
    parameters = (
        Parameter("max_iter", int, "steps at most", 10, 10, low=0),
        Parameter("tol", float, "angle that ends the iteration", 1e-5, 1e-5, low=0),
        OUTSIDE,
    )

    def ends_anywhere(self, site: Site) -> bool:
        return True

    def prepare(self, site: Site, survey: Any) -> Passes:
        visit = partial(inner_products, vectors=False, reference=False)
        dots = yield Pass(visit, add_parts)
        return _mean(dots, site.settings["max_iter"], site.settings["tol"])

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        return loops.formula(chunk.state, vectors=False)


def _mean(dots: Array, steps: int, tol: float) -> Array:
    """The coefficient of every model, from their inner products."""
    norms = np.sqrt(np.diag(dots))
    coefficients = np.zeros(len(norms))
    if len(norms) == 1:
        return np.ones(1, np.float32)
    valid = norms > tol
    if not valid.any():
        return coefficients.astype(np.float32)
    units = (dots / np.outer(norms, norms).clip(1e-300))[np.ix_(valid, valid)]
    coefficients[valid] = norms.mean() * _on_sphere(units, steps, tol) / norms[valid]
    return coefficients.astype(np.float32)


def _on_sphere(units: Array, steps: int, tol: float) -> Array:
    """Weights of unit vectors that make their Karcher mean."""
    count = len(units)
    mean = np.full(count, 1 / count)
    length = _length(mean, units)
    mean = np.eye(count)[0] if length < tol else mean / length
    for _ in range(steps):
        tangent = np.zeros(count)
        for i, cosine in enumerate(np.clip(units @ mean, -1, 1).tolist()):
            angle = math.acos(cosine)
            if angle >= tol:
                toward = np.eye(count)[i] - cosine * mean
                tangent += angle / math.sin(angle) * toward / count
        length = _length(tangent, units)
        if length < tol:
            break
        mean = math.cos(length) * mean + math.sin(length) * tangent / length
        length = _length(mean, units)
        mean = mean / length if length > tol else mean
    return mean


def _length(weights: Array, units: Array) -> float:
    return math.sqrt(max(float(weights @ units @ weights), 0.0))
