"""Estimators of a candidate's accuracy on N items from its answers to n of them.

    mean      Σ w_i y_i
    p-IRT     (n/N)·observed mean + (1 − n/N)·mean predicted P over the unseen items
    gp-IRT    c·Σ w_i y_i + (1 − c)·p-IRT
    mp-IRT    p-IRT with an ability that is a linear mix of the endpoints', γ = Σ_j ω_j γ_j
    gmp-IRT   c·Σ w_i y_i + (1 − c)·mp-IRT

If n = N and the weights are uniform, all of them are the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sigmerge.merge3.irt import WEAK, Array, Items, ability, mixture


@dataclass(frozen=True)
class Benchmark:
    """One domain: its N items, the endpoints' abilities [J, dimension], what a candidate answers.

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


def mean(benchmark: Benchmark, answers: Array) -> float:
    """Σ w_i y_i."""
    return float(benchmark.weights @ np.asarray(answers, np.float64))


def p_irt(benchmark: Benchmark, answers: Array) -> float:
    """γ is fitted freely on the n answers."""
    gamma = ability(benchmark.items[benchmark.seen], answers, benchmark.precision)
    return benchmark.score(answers, gamma)


def mp_irt(benchmark: Benchmark, answers: Array) -> float:
    """γ = Σ_j ω_j γ_j; only ω is fitted on the n answers."""
    seen = benchmark.items[benchmark.seen]
    omega = mixture(seen, answers, benchmark.endpoints, benchmark.precision)
    return benchmark.score(answers, omega @ benchmark.endpoints)


def gp_irt(benchmark: Benchmark, answers: Array) -> float:
    """c·Σ w_i y_i + (1 − c)·p-IRT."""
    c = benchmark.trust
    return c * mean(benchmark, answers) + (1 - c) * p_irt(benchmark, answers)


def gmp_irt(benchmark: Benchmark, answers: Array) -> float:
    """c·Σ w_i y_i + (1 − c)·mp-IRT."""
    c = benchmark.trust
    return c * mean(benchmark, answers) + (1 - c) * mp_irt(benchmark, answers)


Estimator = Callable[[Benchmark, Array], float]

ESTIMATORS: dict[str, Estimator] = {
    "mean": mean,
    "p-irt": p_irt,
    "gp-irt": gp_irt,
    "mp-irt": mp_irt,
    "gmp-irt": gmp_irt,
}
MIXED = ("mp-irt", "gmp-irt")
"""Estimators that need the abilities of at least two endpoints."""
