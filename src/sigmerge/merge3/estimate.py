"""Estimators of a candidate's accuracy on N items from its answers to n of them.

    mean      Σ w_i y_i
    p-IRT     (n/N)·observed mean + (1 − n/N)·mean predicted P over the unseen items
    gp-IRT    c·Σ w_i y_i + (1 − c)·p-IRT
    mp-IRT    p-IRT with an ability that is a linear mix of the endpoints', γ = Σ_j ω_j γ_j
    gmp-IRT   c·Σ w_i y_i + (1 − c)·mp-IRT

If n = N and the weights are uniform, all of them are the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from sigmerge.core import Array
from sigmerge.merge3.irt import WEAK, Items, ability, mixture


@dataclass(frozen=True)
class ItemModel:
    """One benchmark: its N items, the endpoints' abilities [J, dimension], the rows to answer.

    `seen` are the rows of the n items of the subset, `weights` their w_i, which sum to 1; `trust`
    is c, and `precision` that of the weak prior of an ability.
    """

    items: Items
    endpoints: Array
    seen: Array
    weights: Array
    trust: float = 0.5
    precision: float = WEAK

    def score(self, answers: Array, gamma: Array) -> float:
        """(n/N)·observed mean + (1 − n/N)·mean P of ability γ over the unseen items."""
        unseen = np.ones(len(self.items), bool)
        unseen[self.seen] = False
        if not unseen.any():
            return float(np.mean(answers))
        share = len(self.seen) / len(self.items)
        predicted = self.items[unseen].probability(gamma).mean()
        return float(share * np.mean(answers) + (1 - share) * predicted)


def trust(bias: float, variance: float, count: int) -> float:
    """c = b² / (v/(4n) + b²): the larger the IRT model's bias b, the more the answers count."""
    return bias**2 / (variance / (4 * count) + bias**2)


def mean(model: ItemModel, answers: Array) -> float:
    """Σ w_i y_i."""
    return float(model.weights @ np.asarray(answers, np.float64))


def p_irt(model: ItemModel, answers: Array) -> float:
    """γ is fitted freely on the n answers."""
    gamma = ability(model.items[model.seen], answers, model.precision)
    return model.score(answers, gamma)


def mp_irt(model: ItemModel, answers: Array) -> float:
    """γ = Σ_j ω_j γ_j; only ω is fitted on the n answers."""
    seen = model.items[model.seen]
    omega = mixture(seen, answers, model.endpoints, model.precision)
    return model.score(answers, omega @ model.endpoints)


def gp_irt(model: ItemModel, answers: Array) -> float:
    """c·Σ w_i y_i + (1 − c)·p-IRT."""
    c = model.trust
    return c * mean(model, answers) + (1 - c) * p_irt(model, answers)


def gmp_irt(model: ItemModel, answers: Array) -> float:
    """c·Σ w_i y_i + (1 − c)·mp-IRT."""
    c = model.trust
    return c * mean(model, answers) + (1 - c) * mp_irt(model, answers)


Estimator = Callable[[ItemModel, Array], float]

ESTIMATORS: dict[str, Estimator] = {
    "mean": mean,
    "p-irt": p_irt,
    "gp-irt": gp_irt,
    "mp-irt": mp_irt,
    "gmp-irt": gmp_irt,
}
MIXED = ("mp-irt", "gmp-irt")
"""Estimators that need the abilities of at least two endpoints."""


def domain_estimates(
    domains: Mapping[str, Sequence[str]],
    models: Mapping[str, ItemModel],
    answers: Mapping[str, Sequence[int]],
    estimator: Estimator,
) -> dict[str, float]:
    """A candidate's estimated domain scores: the mean over each domain's benchmarks."""
    return {
        domain: fmean(estimator(models[name], np.array(answers[name])) for name in benchmarks)
        for domain, benchmarks in domains.items()
    }
