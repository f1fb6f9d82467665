"""What a checkpoint answers to the items of a nano pool, item by item."""

from __future__ import annotations

from pathlib import Path

from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import Evaluation
from sigmerge.evaluation.sources import Data
from sigmerge.evaluation.suite import nano_suite


def answers(
    folder: Path, split: str, pool: Path | None = None, limit: int | None = None
) -> dict[str, tuple[str, bool]]:
    """The output to every item of a split and whether it is right, by the item's own id."""
    suite = nano_suite(pool)
    run, found = Evaluation(folder, suite, How()), {}
    for name, mark in suite.benchmarks.items():
        every = mark.load(name, Data(), suite.folder)
        items = [item for item in every if item.split == split][:limit]
        scored, _ = run.scorer(name, items, folder).score(items)
        for item in items:
            result = scored[item.id]
            found[item.record["id"]] = (result.output, result.scores["correct"] == 1.0)
    return found
