"""Deficit to allocation: what the anchor lost on each domain, and each domain's share.

The paper's "Deficit to Allocation". Scores are fractions. `experts[e][d]` is Q_d(θ_e), the score
of the expert of domain e on domain d; `anchor[d]` is Q_d(θ_base). Vectors follow `domains`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64

Reference = Literal["strongest", "own"]


def strongest(
    experts: Mapping[str, Mapping[str, float]], domains: Sequence[str]
) -> Float64[np.ndarray, "domains"]:
    """The best score any expert of the pool reaches on each domain (the supplement's rule)."""
    return np.array([max(experts[e][d] for e in domains) for d in domains], dtype=np.float64)


def own(
    experts: Mapping[str, Mapping[str, float]], domains: Sequence[str]
) -> Float64[np.ndarray, "domains"]:
    """Q_d(θ_d), the score of each domain's own expert."""
    return np.array([experts[d][d] for d in domains], dtype=np.float64)


def residual_gap(
    reference: Float64[np.ndarray, "domains"], anchor: Float64[np.ndarray, "domains"]
) -> Float64[np.ndarray, "domains"]:
    """Eq. gap, g_d = max(0, Q_d(reference) − Q_d(θ_base))."""
    return np.maximum(0.0, reference - anchor)


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
    """The deficits with all but the `count` largest set to 0; ties in domain order.

    Ours, beyond the paper, which leaves open whether a large pool is better served this way.
    """
    admitted = np.argsort(-deficit, kind="stable")[:count]
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
        if isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score):
            numbers[place] = score
        else:
            problems.append(f"{place}: {score!r} is not a number")
    problems += [f"{place}: {x:g} is below 0" for place, x in numbers.items() if x < 0]
    percent = {place: x for place, x in numbers.items() if x > 1}
    beside = ", other scores are fractions" if any(0 < x <= 1 for x in numbers.values()) else ""
    return problems + [
        f"{place}: {x:g} looks like percent{beside}; give fractions ({x / 100:g})"
        for place, x in percent.items()
    ]
