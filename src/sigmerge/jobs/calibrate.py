"""`repair: calibrate:`: chooses the repair of an anchor by the scores of candidates.

Candidates are decided repairs of the stored anchor, or of the same merge at a lower level. They are
stored in a hidden folder beside the result where they must be. Their scores are kept
(`sigmerge.kept`): the same command goes on where an interrupted one stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from sigmerge.checkpoints.folder import RECORDS_FOLDER, Checkpoint
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.errors import RecipeError, ScoreError
from sigmerge.files.safe_open import remove
from sigmerge.jobs.calls import Calls, decided_section, target_of
from sigmerge.jobs.candidates import KeptMeasure, measure_of
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import MeasuredScores, ScoreFunction
from sigmerge.jobs.strategies import Setup, calibrate
from sigmerge.jobs.work_folder import hidden
from sigmerge.method.objective import Answer, Vector
from sigmerge.method.tuning import Proposal
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.anchors import AnchorRecipe, anchors_of
from sigmerge.recipe.scored import CalibrateSection, RepairSection
from sigmerge.recipe.template import base_key
from sigmerge.records import RECIPE, RepairPlan, ScoreTable, TriedUpdate


@dataclass(frozen=True)
class Calibrated:
    """Every repair that was tried, and the recipe of the one that is chosen.

    `repair` is its decided repair: section; None if the plain anchor is as good. `level` is the
    factor of the anchor's weights, `recipe` makes the result again without any evaluation. `looks`
    are those at the candidates, and at the anchor where its single answers were asked for.
    """

    tried: tuple[TriedUpdate, ...]
    repair: RepairSection | None
    level: float
    recipe: Mapping[str, Any]
    stopped: str
    looks: tuple[MeasuredScores, ...] = ()


@dataclass(frozen=True)
class CalibrateJob:
    """The calibration of a repair: of the stored anchor, planned with the paper's constants.

    The anchor's level can change where this recipe `made` the anchor, with a weight per expert.
    """

    recipe: Recipe
    out: Path
    options: Options
    pool: PoolMembers
    stored: Checkpoint
    plan: RepairPlan
    table: ScoreTable
    made: bool
    score: ScoreFunction | None = None

    @cached_property
    def section(self) -> CalibrateSection:
        found = self.recipe.repair.calibration if self.recipe.repair else None
        assert found is not None
        return found

    @cached_property
    def work(self) -> Path:
        """Where candidates are stored until the result is made."""
        return hidden(self.out, "calibrate")

    @cached_property
    def anchor(self) -> AnchorRecipe:
        """The anchor as a recipe; a folder, where no recipe with plain weights makes it."""
        if self.made and not self.recipe.slices:
            origin = self.recipe
            if origin.guide is not None or origin.search is not None:
                origin = load_recipe(self.stored.path / RECORDS_FOLDER / RECIPE)
            try:
                return anchors_of(origin, [origin.method])[origin.method]
            except RecipeError:  # weights that differ between layers
                pass
        return self._folder

    @cached_property
    def _folder(self) -> AnchorRecipe:
        models = {m.name: {"model": str(m.path), "name": m.name} for m in self.recipe.models}
        common = {
            "anchor": str(self.stored.path.absolute()),
            **base_key(self.recipe),
            "seed": self.recipe.seed,
        }
        weights = dict.fromkeys(models, 1.0)
        return AnchorRecipe(
            "checkpoint", models, {}, common, weights, level=False, scale=None, weighted=False
        )

    def run(self) -> Calibrated:
        assert self.recipe.repair is not None
        remove(self.work)  # what a killed run was making
        self.work.mkdir(parents=True)
        measure, reference = self._measure(), self.recipe.repair.reference
        target = target_of(self.table.experts, list(self.recipe.experts), reference)
        aim, budget = self.section.aim, self.section.calls
        plain = self._plain(measure)
        calls = Calls(measure, target, aim, budget, self._candidate, self.options, "calibrating")
        setup = Setup({self.recipe.method: self.anchor}, target, budget, aim, self.plan.capacity)
        ended = calibrate(setup, plain, calls.ask)
        found = self._chosen(calls, ended.chosen, ended.stopped)
        return replace(found, looks=tuple(measure.looks))

    def _chosen(self, calls: Calls, chosen: int | None, stopped: str) -> Calibrated:
        tried = tuple(
            TriedUpdate(
                **call.repair.as_json(),
                anchor=_level(proposal),
                scores=call.scores,
                mean=fmean(call.scores.values()),
                error=call.error,
            )
            for call, proposal in zip(calls.made, calls.proposals, strict=True)
            if call.repair is not None
        )
        weights = tuple(self.anchor.weights.values())
        if chosen is None:
            return Calibrated(tried, None, 1.0, self._again(weights, None), stopped)
        proposal = calls.proposals[chosen]
        decided = self._decided(proposal)
        again = self._again(proposal.weights, decided)
        return Calibrated(
            tried, RepairSection.model_validate(decided), _level(proposal), again, stopped
        )

    def _again(self, weights: Vector, repair: dict[str, Any] | None) -> dict[str, Any]:
        """The recipe that makes the result; what this recipe made, without a recipe of its own."""
        if not self.made or self.anchor is not self._folder:
            return self.anchor.recipe(weights, repair)
        given = {k: v for k, v in self.recipe.given.items() if k != "repair"}
        return given if repair is None else {**given, "repair": repair}

    def _measure(self) -> KeptMeasure:
        found = measure_of(self.recipe, self.pool, self.work, self.options, score=self.score)
        if found is None:
            raise ScoreError("calibrate: must score checkpoints that do not exist yet.")
        return found

    def _plain(self, measure: KeptMeasure) -> Answer:
        """What the stored anchor answers; its scores, where single answers are not known."""
        if not measure.items:
            return Answer({d: self.table.anchor[d] for d in self.recipe.experts})
        return measure.folder(self.stored.path).answer

    def _candidate(self, proposal: Proposal) -> dict[str, Any]:
        """The recipe of a candidate; the stored anchor is not made again."""
        assert proposal.repair is not None
        kept = _level(proposal) == 1
        anchor = self._folder if kept else self.anchor
        return anchor.recipe(proposal.weights, self._decided(proposal))

    def _decided(self, proposal: Proposal) -> dict[str, Any]:
        found = decided_section(proposal, list(self.recipe.experts), self.plan.seed)
        assert found is not None
        return found


def _level(proposal: Proposal) -> float:
    return 1.0 if proposal.repair is None else proposal.repair.anchor
