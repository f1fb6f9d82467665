"""A tuning in a process of its own, that can be killed in one of its calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sigmerge.jobs.options import Options
from sigmerge.jobs.tune import TuneJob
from sigmerge.merge3.candidate import Weights
from sigmerge.merge3.extract import Question
from sigmerge.recipe import load_recipe
from sigmerge.recipe.scored import TuneSection
from tests.merge3.stub import EACH, TENSOR, StubScorer

SETTINGS = TuneSection(calls=16, anchors=["task_arithmetic", "linear", "dare_ties"])


class Contested(StubScorer):
    """The way to an expert counts less the farther the merge went to the others."""

    def __call__(self, weights: Weights, items: Sequence[Question]) -> list[int]:
        super().__call__(weights, items)
        moved = weights[TENSOR].ravel() - self.reference
        way = {d: min(1.0, float(moved @ t / (t @ t))) for d, t in self.towards.items()}
        total = sum(way.values())
        reached = {d: w - 0.2 * (total - w) for d, w in way.items()}
        return [int(reached[i.domain] > int(i.id.rpartition("-")[2]) / EACH) for i in items]


def main(recipe: str, out: str, die_at: str, *domains: str) -> None:
    scorer = Contested(Path(recipe).parent, domains, int(die_at))
    TuneJob(load_recipe(recipe), Path(out), Options(threads=1), SETTINGS, scorer=scorer).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
