"""Deficit to allocation: what the anchor lost on each domain, and each domain's share.

The paper's "Deficit to Allocation". Scores are fractions. `experts[e][d]` is Q_d(θ_e), the score
of the expert of domain e on domain d; `anchor[d]` is Q_d(θ_base). Vectors follow `domains`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from sigmerge.method.shapes import Float64, Int64

Reference = Literal["strongest", "own"]
DomainScores = Mapping[str, float]
"""One checkpoint's scores by domain, as fractions."""

TOLERANCE: Final = 1e-9
"""Ruling 21: a smaller gap is 0, and two gaps, shares or means this close are equal.

Scores are ratios of small integers and means of such ratios, so a smaller difference comes from
the order of a float64 sum and not from an item.
"""


def compare(after: DomainScores, before: DomainScores) -> Literal["better", "level", "worse"]:
    """Whether the mean score over the domains of `before` rose, stayed (ruling 21) or fell."""
    change = math.fsum(after[d] - before[d] for d in before) / len(before)
    if abs(change) <= TOLERANCE:
        return "level"
    return "better" if change > 0 else "worse"


def descending(values: Float64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    """Indices by decreasing value; values that are equal by ruling 21 keep their order.

    A run of equal values is measured from its largest: 0, 0.8e-9 and 1.6e-9 are not one run.
    """
    runs: list[list[int]] = []
    for index in np.argsort(-values, kind="stable").tolist():
        if runs and values[runs[-1][0]] - values[index] <= TOLERANCE:
            runs[-1].append(index)
        else:
            runs.append([index])
    return np.array([index for run in runs for index in sorted(run)], dtype=np.int64)


def strongest(
    experts: Mapping[str, Mapping[str, float]], domains: Sequence[str]
) -> Float64[np.ndarray, "domains"]:
    """The best score any expert of the pool reaches on each domain (the supplement's rule)."""
    return np.array([max(experts[e][d] for e in domains) for d in domains], dtype=np.float64)


def best_scores(experts: Mapping[str, DomainScores]) -> dict[str, float]:
    """`strongest` by name, where experts may have scores of different domains (ruling 11)."""
    best: dict[str, float] = {}
    for scores in experts.values():
        best |= {domain: max(score, best.get(domain, score)) for domain, score in scores.items()}
    return best


def own(
    experts: Mapping[str, Mapping[str, float]], domains: Sequence[str]
) -> Float64[np.ndarray, "domains"]:
    """Q_d(θ_d), the score of each domain's own expert."""
    return np.array([experts[d][d] for d in domains], dtype=np.float64)


def residual_gap(
    reference: Float64[np.ndarray, "domains"], anchor: Float64[np.ndarray, "domains"]
) -> Float64[np.ndarray, "domains"]:
    """Eq. gap, g_d = max(0, Q_d(reference) − Q_d(θ_base)); 0 below the tolerance (ruling 21)."""
    gap = reference - anchor
    return np.where(gap < TOLERANCE, 0.0, gap)


def residual_gaps(experts: Mapping[str, DomainScores], scores: DomainScores) -> dict[str, float]:
    """Eq. gap by name: what a checkpoint lacks on each domain to the strongest expert there.

    `experts` and `scores` may cover different domains; the result has those that both have.
    """
    best = best_scores(experts)
    common = [d for d in scores if d in best]
    gap = residual_gap(np.array([best[d] for d in common]), np.array([scores[d] for d in common]))
    return dict(zip(common, gap.tolist(), strict=True))


def deficits(
    experts: Mapping[str, Mapping[str, float]],
    anchor: Mapping[str, float],
    domains: Sequence[str],
    reference: Reference = "strongest",
) -> Float64[np.ndarray, "domains"]:
    """g_d of a checked score table."""
    best = strongest(experts, domains) if reference == "strongest" else own(experts, domains)
    return residual_gap(best, np.array([anchor[d] for d in domains], dtype=np.float64))


def most_deficient(
    deficit: Float64[np.ndarray, "domains"], count: int
) -> Float64[np.ndarray, "domains"]:
    """The deficits with all but the `count` largest set to 0; equal ones in domain order.

    Ours, beyond the paper, which leaves open whether a large pool is better served this way.
    """
    admitted = descending(deficit)[:count]
    kept = np.zeros_like(deficit)
    kept[admitted] = deficit[admitted]
    return kept


def shares(deficit: Float64[np.ndarray, "domains"]) -> Float64[np.ndarray, "domains"]:
    """Eq. share, ρ_d = g_d / Σ g_d'; ρ = 0 when no domain has a deficit."""
    total = deficit.sum()
    return deficit / total if total > 0 else np.zeros_like(deficit)


def check_scores(
    experts: Mapping[str, Mapping[str, object]],
    anchor: Mapping[str, object],
    domains: Sequence[str],
    reference: Reference = "strongest",
) -> list[str]:
    """What is wrong with a score table, one line each; empty when it can be used.

    `own` reads only each expert's score on its own domain, so only that must be there.
    """
    known = f"the pool has {', '.join(domains)}"
    problems = [f"experts.{e}: unknown expert, {known}" for e in experts if e not in domains]
    problems += [f"experts.{e}: missing" for e in domains if e not in experts]
    rows = {f"experts.{e}": experts[e] for e in domains if e in experts} | {"anchor": anchor}
    for place, row in rows.items():
        problems += [f"{place}.{d}: unknown domain, {known}" for d in row if d not in domains]
        everything = reference == "strongest" or place == "anchor"
        needed = domains if everything else [place.removeprefix("experts.")]
        problems += [f"{place}.{d}: missing" for d in needed if d not in row]
    return problems + _value_problems(
        {f"{place}.{d}": score for place, row in rows.items() for d, score in row.items()}
    )


def _value_problems(scores: Mapping[str, object]) -> list[str]:
    problems = []
    numbers: dict[str, float] = {}
    for place, score in scores.items():
        # The comparison is false for NaN, and JSON has integers that no float can hold.
        if isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < 1e300:
            numbers[place] = score
        else:
            problems.append(f"{place}: {repr(score)[:100]} is not a number")
    problems += [f"{place}: {x:g} is below 0" for place, x in numbers.items() if x < 0]
    percent = {place: x for place, x in numbers.items() if x > 1}
    beside = ", other scores are fractions" if any(0 < x <= 1 for x in numbers.values()) else ""
    return problems + [
        f"{place}: {x:g} looks like percent{beside}; give fractions ({x / 100:g})"
        for place, x in percent.items()
    ]
