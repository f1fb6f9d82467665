"""From per-item results to numbers: metrics, domain scores, the macro score, residual gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from sigmerge.evaluation.store import UNPARSED, Scored
from sigmerge.evaluation.suite import Benchmark, Suite
from sigmerge.method.deficit import residual_gaps as residual_gaps


def metric(mark: Benchmark, name: str, results: Sequence[Scored]) -> float:
    """The mean over items, or over everything in the items' lists; higher is always better."""
    chosen = mark.metrics[name]
    values: list[float] = []
    for result in results:
        value = result.scores[chosen.key]
        values += value if isinstance(value, list) else [value]
    mean = fmean(values)
    return 1.0 - mean if chosen.better == "lower" else mean


def summarise(suite: Suite, results: Mapping[str, Sequence[Scored]]) -> dict[str, Any]:
    """All numbers of a checkpoint from its results by benchmark.

    A domain's score is the unweighted mean of its benchmarks' scores; `missing` names benchmarks
    that have no result and therefore no part in it.
    """
    marks = suite.benchmarks
    benchmarks = {
        name: {metric_name: metric(marks[name], metric_name, rows)
               for metric_name in marks[name].metrics}
        for name, rows in results.items() if rows
    }  # fmt: skip
    domains = {}
    for domain, members in suite.domains.items():
        scores = [benchmarks[name][members[name].score] for name in members if name in benchmarks]
        if scores:
            domains[domain] = fmean(scores)
    judges = sorted({row.judge for rows in results.values() for row in rows if row.judge})
    return {
        "domains": domains,
        "macro": fmean(domains.values()),
        "benchmarks": benchmarks,
        "items": {name: len(rows) for name, rows in results.items()},
        "missing": [name for name in marks if name not in benchmarks],
        "judges": judges,
        "unparsed": {
            name: sum(row.scores[UNPARSED] == 1 for row in rows)
            for name, rows in results.items()
            if all(UNPARSED in row.scores for row in rows)
        },
    }
