"""The repair (Algorithm 1): plans it from scores and profile, and writes the result.

The anchor is a stored checkpoint, ours or another tool's. Everything decided before the first byte
is written stands in plan.json, from which the same repair can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from sigmerge.checkpoints.blocks import other_stacks
from sigmerge.checkpoints.folder import RECORDS_FOLDER, Checkpoint, open_checkpoint
from sigmerge.checkpoints.inputs import stays
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.publishing import check_space, check_target
from sigmerge.engine.machine import Meter
from sigmerge.errors import PoolError, RecipeError, ScoreError
from sigmerge.files.safe_open import remove
from sigmerge.files.yaml_documents import as_yaml, read_yaml
from sigmerge.jobs.dense import plan_dense, run_dense
from sigmerge.jobs.fixed_repair import decide, decided_of, planned, round_of
from sigmerge.jobs.occupancy import (
    Guard,
    OccupancyJob,
    describe_occupancy,
    run_occupancy,
    write_candidate,
)
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import (
    member,
    open_anchor,
    open_repair_pool,
    planned_slices,
)
from sigmerge.jobs.profile import (
    MeasuredViews,
    check_probe,
    describe_profile,
    measure_profile,
)
from sigmerge.jobs.scores import (
    CheckpointScorer,
    DomainScores,
    ScoreFunction,
    describe_scoring,
    missing_notes,
    score_table,
    scorer_of,
)
from sigmerge.jobs.steps import Description, Step
from sigmerge.jobs.work_folder import alone, hidden
from sigmerge.method import deficit
from sigmerge.method.controls import VARIANTS, Allocation, allocate
from sigmerge.progress import silent
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.scored import RepairSection
from sigmerge.records import (
    PLAN,
    RECIPE,
    GuardVerdict,
    Member,
    RepairPlan,
    ScoreTable,
    read_plan,
)
from sigmerge.results import Deficits, Merged

if TYPE_CHECKING:
    from sigmerge.jobs.calibrate import Calibrated

PAPERS_SCALE: Final = 0.6
"""The paper's λ, from which a calibration starts."""


@dataclass(frozen=True)
class RepairJob:
    """The repair of a stored anchor as the recipe's repair: section says, into a new folder.

    `score` is a Python callable that replaces the recipe's own source of scores. An anchor that is
    not `kept` has no path in the plan. `made`: this recipe made the anchor.
    """

    recipe: Recipe
    out: Path
    options: Options
    given_anchor: Path | None = None
    score: ScoreFunction | None = None
    kept: bool = True
    made: bool = False

    @cached_property
    def section(self) -> RepairSection:
        if self.recipe.repair is None:
            raise RecipeError("The recipe has no repair: section.")
        return self.recipe.repair

    @property
    def anchor(self) -> Path:
        stored = self.given_anchor or self.recipe.anchor
        if stored is None:
            raise RecipeError(
                "Which anchor? Pass --anchor FOLDER, or merge_method: checkpoint with anchor: in "
                "the recipe; `sigmerge merge` makes and repairs one in a single command."
            )
        return stored

    @cached_property
    def scorer(self) -> CheckpointScorer | None:
        return scorer_of(self.recipe, self.options, score=self.score)

    def _open_anchor(self, pool: PoolMembers) -> Checkpoint:
        given = self.recipe.any_architecture
        return open_anchor(self.anchor, pool, self.options, any_architecture=given)

    def check(self) -> None:
        """Find every problem of the output folder, the scores and the probe. Reads no tensor."""
        _ = self.section
        check_target(self.out, self.options.overwrite, [*self.recipe.kept, self.anchor])
        check_repair(self.recipe, self.options, self.score)
        check_data(self.recipe, self.options, self.score)

    def describe(self) -> Description:
        self.check()
        pool = open_repair_pool(self.recipe, self.options)
        self._open_anchor(pool)
        steps = repair_steps(self.recipe, pool, self.options, self.score)
        check_space(self.out, sum(step.bytes_to_write for step in steps))
        return Description(steps, self.options.threads)

    def run(self) -> Merged:
        self.check()
        with alone(self.out, self.options.overwrite):
            return self.repair()

    def repair(self) -> Merged:
        """The repair itself, without another look at the output folder."""
        meter = Meter()
        pool = open_repair_pool(self.recipe, self.options)
        stored = self._open_anchor(pool)
        if self.section.decided:
            plan = self._decided_plan(pool, stored)
            text, options = self.recipe.text, self.options
            return run_occupancy(plan, pool, stored, text, self.out, options, meter)
        unchanged = stays([*pool.members.values(), stored])
        table = score_table(self.recipe, self.anchor, self.scorer, self.options)
        measured = measure_profile(self.recipe, pool, self.options)
        plan = self._plan(pool, stored, table, measured)
        guard = _guard(self.section, self.scorer, table)
        if self.section.calibration is not None:
            return self._calibrated(pool, stored, plan, table, guard, meter, unchanged)
        if self.scorer is not None and any(k for row in plan.quota for k in row):
            trial = _Trial(self, pool, stored, table, self.scorer)
            plan = _further_rounds(plan, trial, measured)
        text = self._text(plan, pool, stored)
        unchanged()
        return run_occupancy(plan, pool, stored, text, self.out, self.options, meter, guard)

    def _text(self, plan: RepairPlan, pool: PoolMembers, stored: Checkpoint) -> str:
        """The recipe for the record: after guide:, one that gives the result without scores."""
        if self.recipe.guide is None or not self.made:
            return self.recipe.text
        file = stored.path / RECORDS_FOLDER / RECIPE
        given = read_yaml(file, "the recipe of a merge", PoolError)
        section = decided_of(plan, pool)
        repair = self.recipe.given["repair"] if section is None else section
        return as_yaml({**given, "repair": repair})

    def _calibrated(
        self,
        pool: PoolMembers,
        stored: Checkpoint,
        plan: RepairPlan,
        table: ScoreTable,
        guard: Guard,
        meter: Meter,
        unchanged: Callable[[], None],
    ) -> Merged:
        """The repair that the calibration chooses, of the anchor at the level that it chooses."""
        from sigmerge.jobs.calibrate import CalibrateJob

        job = CalibrateJob(
            self.recipe, self.out, self.options, pool, stored, plan, table, self.made, self.score
        )
        found = job.run()
        unchanged()
        assert self.scorer is not None  # else nothing could have been calibrated
        self.scorer.looks.extend(found.looks)
        anchor, place = stored, hidden(self.out, "level")
        if found.level != 1:
            options = replace(self.options, overwrite=True, progress=silent)
            remove(place)
            lower = {key: value for key, value in found.recipe.items() if key != "repair"}
            run_dense(plan_dense(load_recipe(lower), options), place, options)
            anchor = open_checkpoint(place)
            sums = member(anchor, self.options).sha256
            plan = plan.model_copy(update={"anchor": Member(path=None, sha256=sums)})
        plan = _as_calibrated(plan, found, pool)
        text = as_yaml(dict(found.recipe))
        made = run_occupancy(plan, pool, anchor, text, self.out, self.options, meter, guard)
        for leftover in (place, job.work):
            remove(leftover, if_possible=True)
        return made

    def _named(self, pool: PoolMembers, stored: Checkpoint) -> dict[str, Any]:
        """What a plan says of the merge and of the checkpoints that are repaired."""
        recipe, options = self.recipe, self.options
        slices = planned_slices(recipe, pool)
        anchor, reference = member(stored, options), pool.reference or pool.layout
        return {
            "operator": recipe.method,
            "preset": recipe.preset,
            "reference": member(reference, options),
            "experts": {name: member(expert, options) for name, expert in pool.experts.items()},
            "settings": _settings(stored.path),
            "anchor": anchor if self.kept else Member(path=None, sha256=anchor.sha256),
            "slices": slices,
            "matched": pool.matched,
        }

    def _decided_plan(self, pool: PoolMembers, stored: Checkpoint) -> RepairPlan:
        """The plan of a recipe that gives shares and capacity; nothing is measured."""
        recipe, section = self.recipe, self.section
        assert not isinstance(section.scale, str)
        return RepairPlan(
            **self._named(pool, stored),
            domains=tuple(pool.experts),
            seed=section.seed,
            **planned(decide(section, pool)),
            selection="magnitude",
            update=section.update,
            scale=section.scale,
            drop=None,
            warnings=(*_notes(recipe, pool, stored), *_unrepaired(pool)),
        )

    def _plan(
        self, pool: PoolMembers, stored: Checkpoint, table: ScoreTable, measured: MeasuredViews
    ) -> RepairPlan:
        recipe = self.recipe
        allocation = _allocate(self.section, recipe, measured, table)
        form, scale = _update(self.section, allocation)
        notes = [
            *_notes(recipe, pool, stored),
            *_unrepaired(pool),
            *missing_notes(table.missing),
        ]
        return RepairPlan(
            **self._named(pool, stored),
            scores=table,
            domains=allocation.domains,
            variant=allocation.variant,
            seed=allocation.seed,
            c_min=allocation.c_min,
            c_max=allocation.c_max,
            views={name: tuple(view.tolist()) for name, view in allocation.views.items()},
            conflict=tuple(allocation.conflict.tolist()),
            **planned(allocation),
            selection=allocation.selection,
            update=form,
            scale=scale,
            drop=self.section.drop if form == "sparse" else None,
            warnings=(*notes, *allocation.warnings),
        )


def repair_steps(
    recipe: Recipe, pool: PoolMembers, options: Options, score: ScoreFunction | None = None
) -> tuple[Step, ...]:
    """The steps of a repair whose checks have passed: scoring, profile, claims, scoring again."""
    section = recipe.repair
    assert section is not None
    if section.decided:
        decide(section, pool)
        return (describe_occupancy(pool, options.threads),)
    scorer = scorer_of(recipe, options, score=score)
    tries = section.rounds - 1 + (section.calibration.calls if section.calibration else 0)
    after = tries + (section.guard != "off")
    once = describe_occupancy(pool, options.threads)
    steps = [
        describe_scoring(recipe, scorer, len(recipe.experts) + 1, "calibration", options),
        describe_profile(recipe, pool, options),
        replace(
            once,  # every try reads the pool; what a round leaves is stored for its scoring
            bytes_to_read=(1 + tries) * once.bytes_to_read,
            bytes_to_write=section.rounds * once.bytes_to_write,
        ),
    ]
    if scorer is not None and after:
        steps.append(describe_scoring(recipe, scorer, after, "calibration", options))
    return tuple(steps)


def check_repair(recipe: Recipe, options: Options, score: ScoreFunction | None = None) -> None:
    """Find problems of the scores and the probe before a merge is made."""
    check_settings(recipe, options, score)
    assert recipe.repair is not None
    if not recipe.repair.decided:
        check_probe(recipe, open_repair_pool(recipe, options), options)


def check_settings(recipe: Recipe, options: Options, score: ScoreFunction | None = None) -> None:
    """Find problems of what the repair: section says, which variants of one pool say apart."""
    section = recipe.repair
    assert section is not None
    if section.decided:
        decide(section, open_repair_pool(recipe, options))
        return
    scorer = scorer_of(recipe, options, score=score)
    needs = [f"rounds: {section.rounds}"] if section.rounds > 1 else []
    short = section.scale == "calibrated"
    needs += ["scale: calibrated" if short else "calibrate:"] if section.calibration else []
    needs += ["guard: keep_anchor"] if section.guard == "keep_anchor" else []
    if needs and scorer is None:
        raise ScoreError(
            f"{', '.join(needs)} must score checkpoints that do not exist yet; a file of scores "
            "cannot. Give command: or evaluate: instead of scores:."
        )
    if section.probe is None and VARIANTS[section.variant].views == ("representation",):
        raise RecipeError(f"variant: {section.variant} needs the representation view; give probe:.")
    if scorer is None:
        score_table(recipe, None, None, options)


def check_data(recipe: Recipe, options: Options, score: ScoreFunction | None = None) -> None:
    """ScoreError, before a merge is made, if the suite that scores it cannot be run here."""
    assert recipe.repair is not None
    scorer = None if recipe.repair.decided else scorer_of(recipe, options, score=score)
    if scorer is not None and scorer.check is not None:
        scorer.check(next(iter(recipe.experts.values())))


def _stored_plan(anchor: Path) -> Path | None:
    """The plan of an anchor that sigmerge made."""
    file = anchor / RECORDS_FOLDER / PLAN
    return file if file.exists() else None


def _notes(recipe: Recipe, pool: PoolMembers, anchor: Checkpoint) -> list[str]:
    """Warnings of the recipe, of its pool and of the anchor, and of the merge that made this."""
    file = _stored_plan(anchor.path)
    warned = read_plan(file).warnings if file else ()
    return list(dict.fromkeys([*recipe.notes, *pool.disagreements, *anchor.notes, *warned]))


def _unrepaired(pool: PoolMembers) -> list[str]:
    """That layers are repaired in one stack alone, where there are more (ruling 1)."""
    others = other_stacks(pool.layout.tensors, pool.stack)
    if not others:
        return []
    named = ", ".join(prefix.removesuffix(".") for prefix in others)
    return [f"Only layers of {pool.stack.prefix.removesuffix('.')} are repaired; {named} stays as "
            "the anchor has it."]  # fmt: skip


def _settings(anchor: Path) -> Mapping[str, object]:
    """Settings of the merge that made the anchor, as far as they are known."""
    file = _stored_plan(anchor)
    return read_plan(file).settings if file else {}


def _allocate(
    section: RepairSection, recipe: Recipe, measured: MeasuredViews, table: ScoreTable
) -> Allocation:
    domains = list(recipe.experts)
    return allocate(
        measured.views,
        deficit.deficits(table.experts, table.anchor, domains, section.reference),
        measured.coordinates,
        domains,
        c_min=section.c_min,
        c_max=section.c_max,
        variant=section.variant,
        seed=section.seed,
        admit=section.admit,
    )


def _update(
    section: RepairSection, allocation: Allocation
) -> tuple[Literal["add", "sparse", "replace"], float]:
    """Form and scale of the update. A replacement whose scale is not given replaces wholly."""
    if section.calibration is not None:
        return "add", PAPERS_SCALE
    form = "sparse" if allocation.update == "sparse" else section.update
    default = "scale" not in section.model_fields_set
    return form, 1.0 if form == "replace" and default else float(section.scale)


@dataclass(frozen=True)
class _Trial:
    """Scores repairs that are written only to be measured."""

    job: RepairJob
    pool: PoolMembers
    anchor: Checkpoint
    table: ScoreTable
    scorer: CheckpointScorer

    def __call__(self, plan: RepairPlan) -> DomainScores:
        folder = hidden(self.job.out, "candidate")
        options = replace(self.job.options, overwrite=True)
        remove(folder)
        write_candidate(OccupancyJob.of(plan, self.pool, self.anchor), folder, options)
        try:
            return _measured(self.scorer, folder, self.table)
        finally:
            remove(folder)


def _further_rounds(plan: RepairPlan, trial: _Trial, measured: MeasuredViews) -> RepairPlan:
    """Ours: repair, measure again, and claim from what is left. Rounds are disjoint, so the last
    result is the anchor with all rounds' claims."""
    section = trial.job.section
    for _ in range(section.rounds - 1):
        table = trial.table.model_copy(update={"anchor": trial(plan)})
        following = round_of(_allocate(section, trial.job.recipe, measured, table))
        plan = plan.model_copy(update={"later_rounds": (*plan.later_rounds, following)})
        if not any(k for row in following.quota for k in row):
            break
        _check_rounds(plan, measured)
    return plan


def _check_rounds(plan: RepairPlan, measured: MeasuredViews) -> None:
    total = np.sum([np.array(turn.quota) for turn in plan.rounds], axis=(0, 2))
    for layer, (wanted, size) in enumerate(zip(total, measured.coordinates, strict=True)):
        if wanted > size:
            raise RecipeError(
                f"layer {layer}: {len(plan.rounds)} rounds claim {wanted} of {size} coordinates; "
                "lower c_max or rounds."
            )


def _as_calibrated(plan: RepairPlan, found: Calibrated, pool: PoolMembers) -> RepairPlan:
    """The plan with the repair that was chosen; one that claims nothing, if none was."""
    changes: dict[str, Any] = {"candidates": found.tried}
    if found.repair is None:
        note = f"No repair beats the anchor by more than the noise of its scores; {found.stopped}."
        changes |= {
            "share": dict.fromkeys(plan.domains, 0.0),
            "order": plan.domains,
            "quota": tuple(tuple(0 for _ in row) for row in plan.quota),
            "warnings": (*plan.warnings, note),
        }
    else:
        claimed = {**planned(decide(found.repair, pool)), "deficit": plan.deficit}
        changes |= {**claimed, "update": found.repair.update, "scale": found.repair.scale}
    return plan.model_copy(update=changes)


def _measured(scorer: CheckpointScorer, folder: Path, table: ScoreTable) -> DomainScores:
    """Scores of a repaired folder, of the domains and on the scale of the anchor's."""
    scores = scorer(folder).scores
    if problems := deficit.check_scores(table.experts, scores, list(table.experts), "own"):
        after = [problem.replace("anchor.", "after the repair: ", 1) for problem in problems]
        raise ScoreError(f"The scores ({scorer.name}) cannot be used:", after)
    return scores


def _guard(section: RepairSection, scorer: CheckpointScorer | None, table: ScoreTable) -> Guard:
    """Measures the calibration scores once more after the repair, and warns if they fell."""

    def look(folder: Path) -> GuardVerdict:
        if section.guard == "off":
            return GuardVerdict(verdict="off")
        if scorer is None:
            return GuardVerdict(verdict="no scores to be had after the repair")
        scores = _measured(scorer, folder, table)
        before = float(np.mean(list(table.anchor.values())))
        after = float(np.mean([scores[domain] for domain in table.anchor]))
        verdict = deficit.compare(scores, table.anchor)
        keep = verdict == "worse" and section.guard == "keep_anchor"
        warning = None
        if verdict == "worse":
            fell = f"from {100 * before:.2f} to {100 * after:.2f}"
            warning = f"THE REPAIR HURT: the mean calibration score fell {fell}."
            warning += " The anchor is kept." if keep else ""
        return GuardVerdict(
            verdict=verdict,
            before=before,
            after=after,
            scores=scores,
            kept="anchor" if keep else "repair",
            warning=warning,
        )

    return look


@dataclass(frozen=True)
class DeficitsJob:
    """What a stored anchor lost on every domain, and the share of capacity that gives it."""

    recipe: Recipe
    options: Options
    given_anchor: Path | None = None
    score: ScoreFunction | None = None

    def describe(self) -> Description:
        recipe = self._checked()
        scorer = scorer_of(recipe, self.options, score=self.score)
        if scorer is None:
            score_table(recipe, None, None, self.options)
        step = describe_scoring(
            recipe, scorer, len(recipe.experts) + 1, "calibration", self.options
        )
        return Description((step,), self.options.threads)

    def run(self) -> Deficits:
        recipe = self._checked()
        assert recipe.repair is not None
        scorer = scorer_of(recipe, self.options, score=self.score)
        table = score_table(recipe, self.given_anchor or recipe.anchor, scorer, self.options)
        domains = list(recipe.experts)
        gaps = deficit.deficits(table.experts, table.anchor, domains, recipe.repair.reference)
        share = deficit.shares(gaps)
        return Deficits(
            domains=tuple(domains),
            experts=table.experts,
            anchor=table.anchor,
            deficit=dict(zip(domains, gaps.tolist(), strict=True)),
            share=dict(zip(domains, share.tolist(), strict=True)),
            missing=table.missing,
        )

    def _checked(self) -> Recipe:
        if self.recipe.repair is None or self.recipe.repair.decided:
            raise RecipeError("The recipe has no repair: section that says where scores come from.")
        stored = self.given_anchor or self.recipe.anchor
        if stored is not None:
            open_checkpoint(stored, allow_pickle=self.options.allow_pickle)
        check_data(self.recipe, self.options, self.score)
        return self.recipe
