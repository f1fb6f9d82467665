"""PCB-Merging: entries weighed by how they compete within a task and between tasks (Du et al.)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.core import Array
from sigmerge.operators.base import LAMBDA, OUTSIDE, WEIGHT, Parameter, Site
from sigmerge.operators.features import sum_of
from sigmerge.operators.matrices import REST, MatrixOperator, weighted

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra, Matrix

OUTLIERS = 1e-4
"""Share of the entries at either end that are brought to the next one."""


class Pcb(MatrixOperator):
    """λ Σ_d s_d Δ_d / Σ_d s_d, s_d the scores of expert d, its largest `density` kept.

    Score: exp(K · norm(|Δ_d|)²) · tanh(Δ_d Σ_j Δ_j), norm to [0, 1]; the largest scores, to [0, 1]
    again. The authors' code, which has tanh where the paper has another softmax, ranks over the
    whole model; ours matrix by matrix.
    """

    name = "pcb"
    title = "PCB-Merging"
    paper = (
        "Du et al., Parameter competition balancing for model merging, NeurIPS 2024 "
        "(arXiv:2410.02396)"
    )
    copies, copies_per_expert = 10.0, 1.0
    parameters = (
        WEIGHT,
        LAMBDA,
        Parameter("density", float, "share of the entries that compete", 0.1, 0.1, False, 0, 1),
        REST,
        OUTSIDE,
    )

    def operations_of_one(self, outputs: int, inputs: int, site: Site) -> float:
        return 0.0

    def combined(self, rows: Array, site: Site, algebra: Algebra) -> tuple[Matrix, dict[str, Any]]:
        every = [algebra.array(delta) for delta in weighted(rows, site, algebra)]
        total = sum_of(each * 1.0 for each in every)
        moved, scores = np.zeros_like(total), np.zeros_like(total)
        for delta in every:
            sizes = clamped(np.abs(delta), OUTLIERS, OUTLIERS)
            score = np.exp(len(every) * normalized(sizes) ** 2) * np.tanh(delta * total)
            share = normalized(clamped(score, 1 - site.settings["density"], 0.0))
            moved += np.sign(delta) * sizes * share
            scores += share
        return algebra.matrix(moved / np.maximum(scores, 1e-12)), {}


def clamped(values: Array, low: float, high: float) -> Array:
    """Values with these shares of the smallest and the largest brought to the next ones."""
    ranked, size = values.ravel(), values.size
    places = min(int(size * low), size - 1), max(int(size * (1 - high) - 1), 0)
    ranked = np.partition(ranked, places)
    return np.clip(values, ranked[places[0]], ranked[places[1]])


def normalized(values: Array) -> Array:
    """To [0, 1]; all zero where all are equal."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)
