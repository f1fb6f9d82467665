"""A scorer and settings of tunings, whose process can be killed in one of its calls."""

from __future__ import annotations

from collections.abc import Sequence

from sigmerge.merge3.candidate import Weights
from sigmerge.merge3.extract import Question
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
