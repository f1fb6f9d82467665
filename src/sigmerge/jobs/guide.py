"""The guide: section of a recipe: the deficits of a few evaluation calls steer the weights.

    OUT/sigmerge/recipe.yaml    the recipe with the weights that were found; it makes OUT again
    OUT/sigmerge/guided.yaml    the recipe as it was given
    OUT/sigmerge/guide.jsonl    every call with its answers
    OUT/sigmerge/plan.json      every call with its weights and scores

The score of every call is kept (`sigmerge.kept`): the same command goes on where an interrupted one
stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.publishing import only_target, publish, real_target
from sigmerge.engine.machine import LIBRARIES, Meter
from sigmerge.errors import ScoreError
from sigmerge.files.safe_open import remove
from sigmerge.jobs.calls import Calls, experts_of, target_of
from sigmerge.jobs.candidates import KeptMeasure, measure_of, same_files
from sigmerge.jobs.dense import plan_dense, run_dense
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_repair_pool, require_whole
from sigmerge.jobs.scores import MeasuredScores, ScoreFunction, check_domains
from sigmerge.jobs.steps import GuideStep
from sigmerge.jobs.strategies import Setup, guide
from sigmerge.jobs.work_folder import WINNER, hidden, list_records
from sigmerge.method.deficit import Reference
from sigmerge.method.guidance import check_weights
from sigmerge.method.tuning import Proposal
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.anchors import AnchorRecipe, anchors_of
from sigmerge.recipe.scored import GuideSection, RepairSection
from sigmerge.records import PLAN, read_plan
from sigmerge.results import Merged

GUIDE_LOG, GUIDE_ORIGIN = "guide.jsonl", "guided.yaml"


@dataclass(frozen=True)
class GuideJob:
    """The guided merge of a recipe. `score` replaces the recipe's own source of scores."""

    recipe: Recipe
    options: Options
    score: ScoreFunction | None = None

    @cached_property
    def section(self) -> GuideSection:
        assert self.recipe.guide is not None
        return self.recipe.guide

    @cached_property
    def anchor(self) -> AnchorRecipe:
        return anchors_of(self.recipe, [self.recipe.method])[self.recipe.method]

    @cached_property
    def pool(self) -> PoolMembers:
        return open_repair_pool(self.recipe, self.options)

    @property
    def reference(self) -> Reference:
        return self.recipe.repair.reference if self.recipe.repair else "strongest"

    def measure(self, work: Path) -> KeptMeasure:
        """The measure of candidates, which are stored in `work` if it needs folders."""
        own = {"command": self.section.command, "evaluate": self.section.evaluate}
        given = {key: value for key, value in own.items() if value is not None}
        recipe = self.recipe
        if given:
            recipe = replace(recipe, repair=RepairSection.model_validate(given))
        found = measure_of(recipe, self.pool, work, self.options, score=self.score)
        if found is None:
            raise ScoreError(
                "guide: scores merges that do not exist yet: give command: or evaluate: in it, or "
                "in the repair: section; a file of scores cannot."
            )
        return found

    def check(self) -> None:
        """Find every problem of the recipe and the scores. Reads no tensor."""
        self._check_weights()
        measure = self.measure(Path("unused"))
        if measure.items:
            check_domains(measure.items, self.recipe.experts, "The scores")

    def _check_weights(self) -> None:
        """Find every problem of the recipe that is guided."""
        require_whole(self.recipe, self.pool)
        check_weights(self.anchor.weights)
        plan_dense(
            load_recipe(self.anchor.recipe(tuple(self.anchor.weights.values()))), self.options
        )

    def describe(self) -> GuideStep:
        """Guiding as a step of a dry run."""
        self._check_weights()
        measure = self.measure(Path("unused"))
        parameters = sum(tensor.size for tensor in self.pool.layout.tensors.values())
        return GuideStep(
            operator=self.recipe.method,
            experts=tuple(self.recipe.experts),
            objective=self.section.objective,
            floors=dict(self.section.floors),
            expert_runs=len(self.recipe.experts),
            items_per_call=measure.items,
            bytes_to_read=self.section.calls * sum(m.nbytes for m in self.pool.members.values()),
            bytes_to_write=self.pool.layout.nbytes,
            peak_memory_bytes=LIBRARIES + 16 * parameters,
            evaluation_calls=self.section.calls,
        )

    def run(self, out: Path) -> Merged:
        """Guide the weights, then merge with them; the plan holds every call."""
        target = real_target(out)
        with only_target(target, self.options.overwrite):
            return self._run(target)

    def _run(self, out: Path) -> Merged:
        meter, work = Meter(), hidden(out, "guide")
        self._check_weights()
        remove(work)  # what a killed run was making
        work.mkdir(parents=True)
        same = same_files(self.recipe, self.pool)
        calls, experts, chosen = self._guided(self.measure(work))
        same.check_same()
        made = work / WINNER
        remove(made)
        options = replace(self.options, overwrite=True, progress=silent)
        merged = run_dense(plan_dense(load_recipe(calls.recipe(chosen)), options), made, options)
        plan = merged.plan.model_copy(update={"guided": tuple(calls.made)})
        plan.write(made / RECORDS_FOLDER / PLAN)
        about = {"settings": self.section.model_dump(), "scores": calls.measure.name}
        calls.write(made / RECORDS_FOLDER / GUIDE_LOG, about, experts)
        (made / RECORDS_FOLDER / GUIDE_ORIGIN).write_text(self.recipe.text, encoding="utf-8")
        added = (PLAN, GUIDE_LOG, GUIDE_ORIGIN)
        provenance = list_records(made, added, self.options.threads)
        publish(made, out, overwrite=self.options.overwrite, durable=self.options.durable)
        remove(work, if_possible=True)
        spent = {"wall_seconds": meter.wall_seconds, "peak_memory_bytes": meter.peak_memory_bytes}
        return Merged(
            out=str(out),
            plan=read_plan(out / RECORDS_FOLDER / PLAN),
            provenance=provenance.model_copy(update=spent),
        )

    def _guided(self, measure: KeptMeasure) -> tuple[Calls, dict[str, MeasuredScores], int]:
        """The calls, the experts' scores, and which of the calls to take."""
        folders, options = self.recipe.experts, self.options
        experts = experts_of(folders, measure, self.reference, options)
        table = {name: found.scores for name, found in experts.items()}
        target = target_of(table, list(folders), self.reference)
        calls = Calls(
            measure, target, self.section.aim, self.section.calls, self._candidate, options,
            "guiding",
        )  # fmt: skip
        anchors = {self.recipe.method: self.anchor}
        ended = guide(Setup(anchors, target, self.section.calls, self.section.aim), calls.ask)
        assert ended.chosen is not None
        return calls, experts, ended.chosen

    def _candidate(self, proposal: Proposal) -> dict[str, Any]:
        return self.anchor.recipe(proposal.weights)
