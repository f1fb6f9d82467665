"""The statistics of the paper, each one small function under the paper's name.

Scores are fractions. Every correlation is Spearman's: all correlations that the paper's tables let
one recompute are (`docs/results/published.md`). Numbers within 1e-12 are equal: they are sums of
the same fractions in another order, and no rank and no sign comes from rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

DECIMALS = 12
"""Decimals to which numbers are compared."""


def _stats() -> Any:
    """scipy.stats, imported late: it is slow to load and belongs to an extra."""
    from scipy import stats

    return stats


def _level(values: ArrayLike) -> NDArray[np.float64]:
    """The numbers with what rounding made equal made equal."""
    return np.round(np.asarray(values, dtype=float), DECIMALS)


@dataclass(frozen=True)
class SeedSummary:
    mean: float
    std: float  # of a sample (ddof 1); NaN for a single seed
    range: float


@dataclass(frozen=True)
class Count:
    """A count out of a total."""

    hits: int
    of: int

    def __str__(self) -> str:
        return f"{self.hits} of {self.of}"


@dataclass(frozen=True)
class Regret:
    """What each selection rule gives up against the anchor that is best after the repair."""

    strongest: float
    random: float
    weakest: float


def relative_gain(before: ArrayLike, after: ArrayLike) -> float:
    """Mean over pairs of each pair's own ratio (after − before) / before."""
    start = np.asarray(before, dtype=float)
    return float(np.mean((np.asarray(after, dtype=float) - start) / start))


def wilcoxon(before: ArrayLike, after: ArrayLike) -> float:
    """p of the two-sided exact signed-rank test; NaN when no pair differs.

    Pairs that do not differ are left out, as Wilcoxon and SciPy do. Equal sizes share their mean
    rank, and p is then the part of all 2^n sign patterns that are as extreme: SciPy's exact
    distribution knows no shared ranks, and its permutation test cannot list so many patterns.
    """
    difference = _level(np.asarray(after, dtype=float) - np.asarray(before, dtype=float))
    difference = difference[difference != 0]
    if not difference.size:
        return float("nan")
    sizes = np.abs(difference)
    if np.unique(sizes).size == sizes.size:
        return float(_stats().wilcoxon(difference, alternative="two-sided", method="exact").pvalue)
    doubled = np.round(2 * _stats().rankdata(sizes)).astype(int)  # shared ranks are halves
    patterns = np.ones(1)  # how many have each sum of ranks, as a part of all
    for rank in doubled:
        patterns = (np.pad(patterns, (0, rank)) + np.pad(patterns, (rank, 0))) / 2
    positive = int(doubled[difference > 0].sum())
    extreme = min(positive, int(doubled.sum()) - positive)
    return float(min(1.0, 2 * patterns[: extreme + 1].sum()))


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Rank correlation; NaN where one side is constant or fewer than three points are there."""
    a, b = _level(x), _level(y)
    if a.size < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(_stats().spearmanr(a, b).statistic)


def recovered_fraction(deficit: ArrayLike, gain: ArrayLike) -> float:
    """Mean gain as a fraction of the mean deficit; NaN without a deficit."""
    whole = float(np.mean(np.asarray(deficit, dtype=float)))
    return float(np.mean(np.asarray(gain, dtype=float))) / whole if whole > 0 else float("nan")


def retained_fraction(control: float, anchor: float, default: float) -> float:
    """(control − anchor) / (default − anchor); NaN where the default gains nothing or loses."""
    gain = default - anchor
    return (control - anchor) / gain if _level(gain) > 0 else float("nan")


def t_interval(values: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean; NaN for a single value."""
    sample = np.asarray(values, dtype=float)
    if sample.size < 2:
        return float("nan"), float("nan")
    error = _stats().sem(sample)
    if error == 0:
        return float(sample.mean()), float(sample.mean())
    low, high = _stats().t.interval(level, sample.size - 1, loc=sample.mean(), scale=error)
    return float(low), float(high)


def seed_summary(values: ArrayLike) -> SeedSummary:
    """Mean, sample standard deviation and range over seeds."""
    sample = np.asarray(values, dtype=float)
    std = float(sample.std(ddof=1)) if sample.size > 1 else float("nan")
    return SeedSummary(float(sample.mean()), std, float(np.ptp(sample)))


def cell_ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """Ranks of the methods within one pool-domain cell, 1 the best; ties share their mean rank."""
    ranks = _stats().rankdata(-_level(list(scores.values())), method="average")
    return dict(zip(scores, map(float, ranks), strict=True))


def average_ranks(cells: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over cells of each method's rank within the cell."""
    ranks = [cell_ranks(cell) for cell in cells]
    return {method: float(np.mean([cell[method] for cell in ranks])) for method in ranks[0]}


def first_places(cells: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """How many cells each method leads alone or with others."""
    level = [dict(zip(cell, _level(list(cell.values())), strict=True)) for cell in cells]
    return {m: sum(bool(c[m] == max(c.values())) for c in level) for m in cells[0]}


def wins(ours: ArrayLike, others: ArrayLike) -> Count:
    """Pairs (one of ours, one of the others) in which ours scores higher."""
    mine, theirs = _level(ours), _level(others)
    return Count(int((mine[:, None] > theirs[None, :]).sum()), mine.size * theirs.size)


def view_correlations(views: Mapping[str, Sequence[float]]) -> dict[tuple[str, str], float]:
    """Correlation over layers of each pair of conflict views."""
    return {(a, b): spearman(views[a], views[b]) for a, b in combinations(views, 2)}


def entropy(share: ArrayLike) -> float:
    """Of the shares (or of what they are the parts of), in nats; a share of zero adds nothing."""
    values = np.asarray(share, dtype=float)
    part = values[values > 0] / values.sum()
    return float(-np.sum(part * np.log(part)))


def gini(share: ArrayLike) -> float:
    """Gini coefficient: mean absolute difference over twice the mean; 0 when all are equal."""
    values = np.asarray(share, dtype=float)
    if not values.any():
        return 0.0
    return float(np.abs(values[:, None] - values[None, :]).mean() / (2 * values.mean()))


def anchor_statistics(scores: ArrayLike, gaps: ArrayLike) -> dict[str, float]:
    """The nine statistics of an anchor that are known before any repair (App. anchor selection).

    `scores` and `gaps` list its domains. Deviations are of a sample (ddof 1). Shares are gaps over
    their sum, which entropy and Gini coefficient do not depend on.
    """
    score, gap = np.asarray(scores, dtype=float), np.asarray(gaps, dtype=float)
    return {
        "macro": float(score.mean()),
        "gap mean": float(gap.mean()),
        "gap max": float(gap.max()),
        "gap min": float(gap.min()),
        "gap std": float(gap.std(ddof=1)) if gap.size > 1 else 0.0,
        "domains without gap": float((gap == 0).sum()),
        "share entropy": entropy(gap),
        "share gini": gini(gap),
        "score range": float(np.ptp(score)),
    }


def rank_preservation(before: ArrayLike, after: ArrayLike) -> Count:
    """Pairs of anchors that keep their order across the repair; a tie on one side is no order."""
    start, end = _level(before), _level(after)
    pairs = list(combinations(range(start.size), 2))
    kept = sum((start[i] - start[j]) * (end[i] - end[j]) > 0 for i, j in pairs)
    return Count(int(kept), len(pairs))


def regret(before: ArrayLike, after: ArrayLike) -> Regret:
    """The three selection rules of one pool: strongest, random and weakest anchor."""
    start, end = _level(before), _level(after)
    given_up = end.max() - end
    return Regret(
        strongest=float(given_up[start.argmax()]),
        random=float(given_up.mean()),
        weakest=float(given_up[start.argmin()]),
    )


def share_order(share: Mapping[str, float]) -> list[str]:
    """Domains in the order in which they claim: largest share first, ties as listed."""
    return sorted(share, key=lambda domain: -round(share[domain], DECIMALS))


def share_shift(primary: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The furthest any share moves under another partition."""
    return max(abs(other[domain] - share) for domain, share in primary.items())
