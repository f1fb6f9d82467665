"""Extract: which labelled items the search may use, and the few that every candidate answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sigmerge.core import Array
from sigmerge.errors import ScoreError

if TYPE_CHECKING:
    from sigmerge.merge3.irt import Items

LABELS = 1500
"""Labelled items a search may use in all."""


@dataclass(frozen=True)
class Question:
    """A labelled item of a benchmark, as far as the search knows it."""

    id: str
    benchmark: str
    domain: str
    split: str


@dataclass(frozen=True)
class Subset:
    """Rows of a benchmark's items, in their order, and the weights w_i, which sum to 1."""

    rows: Array
    weights: Array


def generator(seed: int, *names: str) -> np.random.Generator:
    """Random numbers that a seed and names decide."""
    return np.random.default_rng([seed, *" ".join(names).encode()])


def labelled(
    questions: Iterable[Question], budget: int = LABELS, seed: int = 0
) -> dict[str, tuple[Question, ...]]:
    """The questions a search may use, by benchmark, within a budget of labels; all if they fit.

    A question of the evaluation split is refused: a winner picked by it could not be judged by it.
    """
    found: dict[str, dict[str, list[Question]]] = {}
    for question in questions:
        if question.split == "evaluation":
            raise ScoreError(
                f"item {question.id} is of the evaluation split; a search never sees it."
            )
        found.setdefault(question.domain, {}).setdefault(question.benchmark, []).append(question)
    if not found:
        raise ScoreError("The suite has no labelled items to search with.")
    counts = {domain: sum(map(len, marks.values())) for domain, marks in found.items()}
    chosen = {}
    for domain, allowed in allowances(counts, budget).items():
        rng = generator(seed, "labels", domain)
        for benchmark, count in benchmark_allowances(found[domain], allowed).items():
            each = found[domain][benchmark]
            chosen[benchmark] = tuple(each[row] for row in uniform(len(each), count, rng).rows)
    return chosen


def by_domain(questions: Mapping[str, Sequence[Question]]) -> dict[str, list[str]]:
    """The benchmarks of every domain, in their order."""
    domains: dict[str, list[str]] = {}
    for benchmark, each in questions.items():
        domains.setdefault(each[0].domain, []).append(benchmark)
    return domains


def allowances(counts: Mapping[str, int], budget: int) -> dict[str, int]:
    """How many items of each domain are used: equal shares; a small domain leaves the rest its own.

    263, 108, 107, 363 and 18 943 items under 1500 give all of the first four and 659 of the last.
    """
    if budget < len(counts):
        raise ScoreError(f"{budget} labelled items cannot cover {len(counts)} domains.")
    given: dict[str, int] = {}
    left = budget
    for place, (domain, count) in enumerate(sorted(counts.items(), key=lambda pair: pair[1])):
        given[domain] = min(count, left // (len(counts) - place))
        left -= given[domain]
    return {domain: given[domain] for domain in counts}


def benchmark_allowances(
    questions: Mapping[str, Sequence[Question]], budget: int
) -> dict[str, int]:
    """A domain's items divided between its benchmarks by the same rule; each has at least one."""
    counts = {benchmark: len(each) for benchmark, each in questions.items()}
    return allowances(counts, max(budget, len(counts)))


def uniform(count: int, wanted: int, rng: np.random.Generator) -> Subset:
    """Uniform without replacement, weights 1/n; all items if fewer are there."""
    size = min(count, wanted)
    rows = np.sort(rng.choice(count, size, replace=False))
    return Subset(rows, np.full(size, 1 / size))


def clustered(items: Items, wanted: int, rng: np.random.Generator) -> Subset:
    """The item nearest to each centre of a k-means on (α, β), weighted by its cluster's mass."""
    points = np.column_stack([items.discrimination, items.difficulty])
    size = min(len(items), wanted)
    labels, centres = _k_means(points, size, rng)
    distance = _squared(points, centres)
    rows = [
        members[np.argmin(distance[members, k])]
        for k, members in ((k, np.flatnonzero(labels == k)) for k in range(size))
    ]
    order = np.argsort(rows)
    mass = np.bincount(labels, minlength=size) / len(items)
    return Subset(np.array(rows)[order], mass[order])


def _k_means(points: Array, k: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Lloyd's iterations from k random points; no cluster is ever empty.

    Items with the same answers from all respondents coincide, so a cluster can lose all its points;
    it is given one of another cluster that is farthest from its own centre.
    """
    centres = points[rng.choice(len(points), k, replace=False)]
    labels = np.full(len(points), -1)
    for _ in range(100):
        distance = _squared(points, centres)
        nearest = distance.argmin(1)
        far = distance[np.arange(len(points)), nearest]
        for empty in np.setdiff1d(np.arange(k), nearest):
            shared = np.bincount(nearest, minlength=k)[nearest] > 1
            point = np.where(shared, far, -1.0).argmax()
            nearest[point], far[point] = empty, 0.0
        if (nearest == labels).all():
            break
        labels = nearest
        centres = np.stack([points[labels == each].mean(0) for each in range(k)])
    return labels, centres


def _squared(points: Array, centres: Array) -> Array:
    return np.asarray(((points[:, None] - centres[None]) ** 2).sum(-1))
