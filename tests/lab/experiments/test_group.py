"""What a group of runs takes from a measurement into the store."""

from __future__ import annotations

from statistics import fmean

import pytest

from sigmerge.evaluation.aggregate import summarise
from sigmerge.evaluation.answers import Scored
from sigmerge.evaluation.suite import load_suite
from sigmerge.jobs.scores import MeasuredScores, _metrics
from sigmerge.lab.experiments.group import _rows

MEANS = {"second": 0.75, "third": 0.25, "alone": 0.5}
"""What benchmarks score; the first of the domain has no data."""


def test_every_headline_comes_with_the_items_of_its_own_benchmark() -> None:
    mark = {"harness": "likelihood", "files": "x.jsonl", "response": "r",
            "metrics": {"accuracy": "token_accuracy", "probability": "probability"}}  # fmt: skip
    suite = load_suite(
        {"name": "s", "domains": {"math": dict.fromkeys(("first", "second", "third"), mark),
                                  "safety": {"alone": mark}}}
    )  # fmt: skip
    keys = {name: metric.key for name, metric in suite.benchmarks["alone"].metrics.items()}
    scored = {
        name: [
            Scored({keys["accuracy"]: mean + shift, keys["probability"]: 0.125})
            for shift in (-0.25, 0.0, 0.25)
        ]
        for name, mean in MEANS.items()
    }
    # Results come in an order of their own.
    found = summarise(suite, dict(reversed(scored.items())))
    metrics = tuple(_metrics(suite, found))
    rows = list(_rows(MeasuredScores(found.domains, metrics=metrics), "calibration"))
    assert {row.benchmark: row.value for row in rows if row.headline} == MEANS
    for row in rows:
        assert (row.split, row.items) == ("calibration", 3)
        assert len(row.item_scores) == (3 if row.metric == "accuracy" else 0)
        if row.headline:
            assert fmean(row.item_scores) == pytest.approx(MEANS[row.benchmark])
