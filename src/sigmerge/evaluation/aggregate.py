"""From per-item results to numbers: metrics, domain scores, the macro score, residual gaps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from sigmerge.evaluation.answers import UNPARSED, Scored
from sigmerge.evaluation.benchmark import Benchmark
from sigmerge.evaluation.suite import BenchmarkSuite


def metric(mark: Benchmark, name: str, results: Sequence[Scored]) -> float:
    """The mean over items, or over everything in the items' lists; higher is always better."""
    chosen = mark.metrics[name]
    values: list[float] = []
    for result in results:
        value = result.scores[chosen.key]
        values += value if isinstance(value, list) else [value]
    mean = fmean(values)
    return 1.0 - mean if chosen.better == "lower" else mean


def item_scores(mark: Benchmark, results: Sequence[Scored]) -> list[float]:
    """One number for each item, whose mean is the benchmark's score and whose spread its noise.

    An item with a list of values counts in the score by the list's length, and so it does here.
    """
    chosen = mark.metrics[mark.score]
    lists = [v if isinstance(v, list) else [v] for v in (r.scores[chosen.key] for r in results)]
    count = sum(map(len, lists))
    mean = sum(map(sum, lists)) / count
    parts = [mean + (sum(v) - mean * len(v)) * len(lists) / count for v in lists]
    return [1.0 - part for part in parts] if chosen.better == "lower" else parts


def standard_error(benchmarks: Sequence[Sequence[float]]) -> float | None:
    """Standard error of a domain's score; None if a benchmark has less than two items.

    Items that all have the same score do not prove that the next one has it: the variance is at
    least that of one item which differs.
    """
    if any(len(items) < 2 for items in benchmarks):
        return None
    squares = [max(variance(items), 1 / len(items)) / len(items) for items in benchmarks]
    return math.sqrt(sum(squares)) / len(benchmarks)


@dataclass(frozen=True)
class Summary:
    """All numbers of a checkpoint. A domain's score is the unweighted mean of its benchmarks'.

    `missing` names, by domain, the benchmarks that have no result and so no part in its score.
    `item_scores` are those of every benchmark by domain, item by item.
    """

    domains: dict[str, float]
    macro: float
    benchmarks: dict[str, dict[str, float]]
    items: dict[str, int]
    missing: dict[str, list[str]]
    judges: list[str]
    unparsed: dict[str, int]
    item_scores: dict[str, list[list[float]]]


def summarise(suite: BenchmarkSuite, results: Mapping[str, Sequence[Scored]]) -> Summary:
    """The numbers of a checkpoint from its results by benchmark."""
    marks = suite.benchmarks
    benchmarks = {
        name: {metric_name: metric(marks[name], metric_name, rows)
               for metric_name in marks[name].metrics}
        for name, rows in results.items() if rows
    }  # fmt: skip
    domains, missing = {}, {}
    for domain, members in suite.domains.items():
        scores = [benchmarks[name][members[name].score] for name in members if name in benchmarks]
        if scores:
            domains[domain] = fmean(scores)
        if lacking := [name for name in members if name not in benchmarks]:
            missing[domain] = lacking
    return Summary(
        domains=domains,
        macro=fmean(domains.values()),
        benchmarks=benchmarks,
        items={name: len(rows) for name, rows in results.items()},
        missing=missing,
        judges=sorted({row.judge for rows in results.values() for row in rows if row.judge}),
        unparsed={
            name: sum(row.scores[UNPARSED] == 1 for row in rows)
            for name, rows in results.items()
            if all(UNPARSED in row.scores for row in rows)
        },
        item_scores={
            domain: [item_scores(members[n], results[n]) for n in members if n in benchmarks]
            for domain, members in suite.domains.items()
            if domain in domains
        },
    )
