"""The repair: scores and profile become a plan, the plan a folder (Algorithm 1).

The anchor is a stored checkpoint, ours or another tool's. Everything decided before the first byte
is written stands in plan.json, from which the same repair can be made again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.pool import Pool
from sigmerge.checkpoints.writer import check_target
from sigmerge.engine.machine import Meter
from sigmerge.errors import PoolError, RecipeError, ScoreError
from sigmerge.files.digests import are_plain
from sigmerge.jobs.occupancy import (
    Guard,
    describe_occupancy,
    run_occupancy,
    write_candidate,
)
from sigmerge.jobs.options import Description, Options, Step
from sigmerge.jobs.pools import block_sites, member, open_anchor, open_repair_pool, weight_digests
from sigmerge.jobs.profile import MeasuredViews, describe_profile, measure_profile
from sigmerge.jobs.scores import (
    CheckpointScorer,
    DomainScores,
    ScoreFunction,
    describe_scoring,
    missing_notes,
    score_table,
    scorer_of,
)
from sigmerge.jobs.work_folder import hidden
from sigmerge.method import budget, deficit
from sigmerge.method.controls import VARIANTS, Allocation, allocate
from sigmerge.probing.exemplars import read_prompts
from sigmerge.recipe import Recipe, RepairSection, load_recipe
from sigmerge.records import (
    PLAN,
    RECORDS_FOLDER,
    GuardVerdict,
    Member,
    RepairPlan,
    Round,
    ScoreTable,
    TriedUpdate,
    read_plan,
    read_repair_plan,
)
from sigmerge.results import Deficits, Merged

CANDIDATES: Final[tuple[tuple[Literal["add", "replace"], float], ...]] = (
    ("add", 0.6), ("add", 0.8), ("add", 1.0), ("replace", 0.8), ("replace", 1.0),
)  # fmt: skip
"""Update forms and scales that `scale: calibrated` chooses from."""


@dataclass(frozen=True)
class RepairJob:
    """The repair of a stored anchor as the recipe's repair: section says, into a new folder.

    `score` is a Python callable that replaces the recipe's own source of scores. An anchor that is
    not `kept` has no path in the plan.
    """

    recipe: Recipe
    out: Path
    options: Options
    given_anchor: Path | None = None
    score: ScoreFunction | None = None
    kept: bool = True

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

    def check(self) -> None:
        """Find every problem of the output folder, the scores and the probe. Reads no tensor."""
        _ = self.section
        check_target(self.out, self.options.overwrite, [*self.recipe.inputs, self.anchor])
        check_repair(self.recipe, self.options, self.score)

    def describe(self) -> Description:
        self.check()
        pool = open_repair_pool(self.recipe, self.options)
        open_anchor(self.anchor, pool, self.options)
        return Description(repair_steps(self.recipe, pool, self.options), self.options.threads)

    def run(self) -> Merged:
        self.check()
        return self.repair()

    def repair(self) -> Merged:
        """The repair itself, without another look at the output folder."""
        meter = Meter()
        pool = open_repair_pool(self.recipe, self.options)
        stored = open_anchor(self.anchor, pool, self.options)
        if self.section.decided:
            plan = self._decided_plan(pool, stored)
            text, options = self.recipe.text, self.options
            return run_occupancy(plan, pool, stored, text, self.out, options, meter)
        table = score_table(self.recipe, self.anchor, self.scorer, self.options)
        measured = measure_profile(self.recipe, pool, self.options)
        plan = self._plan(pool, stored, table, measured)
        if self.scorer is not None and any(k for row in plan.quota for k in row):
            trial = _Trial(self, pool, stored, table, self.scorer)
            plan = _further_rounds(plan, trial, measured)
            if self.section.scale == "calibrated":
                plan = _calibrate(plan, trial)
        guard = _guard(self.section, self.scorer, table)
        return run_occupancy(
            plan, pool, stored, self.recipe.text, self.out, self.options, meter, guard
        )

    def _decided_plan(self, pool: Pool, stored: Checkpoint) -> RepairPlan:
        """The plan of a recipe that gives shares and capacity; nothing is measured."""
        recipe, options, section = self.recipe, self.options, self.section
        decided = decide(section, pool)
        anchor = member(stored, options)
        assert not isinstance(section.scale, str)
        return RepairPlan(
            operator=recipe.method,
            preset=recipe.preset,
            reference=member(pool.layout, options),
            experts={name: member(expert, options) for name, expert in pool.experts.items()},
            settings=_settings(stored.path),
            anchor=anchor if self.kept else Member(path=None, sha256=anchor.sha256),
            domains=tuple(pool.experts),
            seed=section.seed,
            capacity=decided.capacity,
            share=decided.turn.share,
            order=decided.turn.order,
            coordinates=decided.coordinates,
            quota=decided.turn.quota,
            selection="magnitude",
            update=section.update,
            scale=section.scale,
            drop=None,
            warnings=tuple(_notes(recipe, stored.path)),
        )

    def _plan(
        self, pool: Pool, stored: Checkpoint, table: ScoreTable, measured: MeasuredViews
    ) -> RepairPlan:
        recipe, options = self.recipe, self.options
        allocation = _allocate(self.section, recipe, measured, table)
        form, scale = _update(self.section, allocation)
        anchor = member(stored, options)
        notes = [*_notes(recipe, stored.path), *missing_notes(table.missing)]
        return RepairPlan(
            operator=recipe.method,
            preset=recipe.preset,
            reference=member(pool.layout, options),
            experts={name: member(expert, options) for name, expert in pool.experts.items()},
            settings=_settings(stored.path),
            anchor=anchor if self.kept else Member(path=None, sha256=anchor.sha256),
            scores=table,
            domains=allocation.domains,
            variant=allocation.variant,
            seed=allocation.seed,
            c_min=allocation.c_min,
            c_max=allocation.c_max,
            views={name: tuple(view.tolist()) for name, view in allocation.views.items()},
            conflict=tuple(allocation.conflict.tolist()),
            capacity=tuple(allocation.capacity.tolist()),
            deficit=dict(zip(allocation.domains, allocation.deficit.tolist(), strict=True)),
            share=dict(zip(allocation.domains, allocation.share.tolist(), strict=True)),
            order=allocation.order,
            coordinates=tuple(allocation.coordinates.tolist()),
            quota=_rows(allocation),
            selection=allocation.selection,
            update=form,
            scale=scale,
            drop=self.section.drop if form == "sparse" else None,
            warnings=(*notes, *allocation.warnings),
        )


@dataclass(frozen=True)
class Decided:
    """What a recipe's own shares and capacity claim."""

    turn: Round
    capacity: tuple[float, ...]
    coordinates: tuple[int, ...]


def decide(section: RepairSection, pool: Pool) -> Decided:
    """The quotas of a repair: section that gives shares and capacity; RecipeError if too many."""
    assert section.shares is not None and section.capacity is not None
    domains = tuple(pool.experts)
    coordinates = np.array([sum(site.size for site in block) for block in block_sites(pool)])
    given = section.capacity
    capacity = np.array(given if isinstance(given, list) else [given] * coordinates.size)
    if capacity.size != coordinates.size:
        raise RecipeError(
            f"repair.capacity: has {capacity.size} numbers for {coordinates.size} layers."
        )
    share = np.array([section.shares.get(domain, 0.0) for domain in domains])
    quota = budget.quotas(capacity, share, coordinates)
    if problems := budget.infeasible(quota, coordinates):
        raise RecipeError("The quotas do not fit; lower repair.capacity.", problems)
    turn = Round(
        order=tuple(domains[d] for d in budget.claim_order(share)),
        quota=tuple(map(tuple, quota.tolist())),
        share=dict(zip(domains, share.tolist(), strict=True)),
    )
    return Decided(turn, tuple(capacity.tolist()), tuple(coordinates.tolist()))


def repair_steps(recipe: Recipe, pool: Pool, options: Options) -> tuple[Step, ...]:
    """The steps of a repair whose checks have passed: scoring, profile, claims, scoring again."""
    section = recipe.repair
    assert section is not None
    if section.decided:
        decide(section, pool)
        return (describe_occupancy(pool),)
    scorer = scorer_of(recipe, options)
    tries = section.rounds - 1 + (len(CANDIDATES) if section.scale == "calibrated" else 0)
    after = tries + (section.guard != "off")
    steps = [
        describe_scoring(recipe, scorer, len(recipe.experts) + 1, "calibration"),
        describe_profile(recipe, pool, options),
        describe_occupancy(pool),
    ]
    if scorer is not None and after:
        steps.append(describe_scoring(recipe, scorer, after, "calibration"))
    return tuple(steps)


def check_repair(recipe: Recipe, options: Options, score: ScoreFunction | None = None) -> None:
    """Find problems of the scores and the probe before a merge is made."""
    section = recipe.repair
    assert section is not None
    if section.decided:
        decide(section, open_repair_pool(recipe, options))
        return
    scorer = scorer_of(recipe, options, score=score)
    needs = [f"rounds: {section.rounds}"] if section.rounds > 1 else []
    needs += ["scale: calibrated"] if section.scale == "calibrated" else []
    needs += ["guard: keep_anchor"] if section.guard == "keep_anchor" else []
    if needs and scorer is None:
        raise ScoreError(
            f"{', '.join(needs)} must score checkpoints that do not exist yet; a file of scores "
            "cannot. Give command: or evaluate: instead of scores:."
        )
    if section.probe is None and VARIANTS[section.variant].views == ("representation",):
        raise RecipeError(f"variant: {section.variant} needs the representation view; give probe:.")
    if section.probe is not None:
        read_prompts(recipe.folder / section.probe)
    if scorer is None:
        score_table(recipe, None, None, options)


def _stored_plan(anchor: Path) -> Path | None:
    """The plan of an anchor that sigmerge made."""
    file = anchor / RECORDS_FOLDER / PLAN
    return file if file.exists() else None


def _notes(recipe: Recipe, anchor: Path) -> list[str]:
    """Warnings of the recipe, and of the merge that made the anchor."""
    file = _stored_plan(anchor)
    warned = read_plan(file).warnings if file else ()
    return list(dict.fromkeys([*recipe.notes, *warned]))


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


def _rows(allocation: Allocation) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(k) for k in row) for row in allocation.quota)


def _update(
    section: RepairSection, allocation: Allocation
) -> tuple[Literal["add", "sparse", "replace"], float]:
    """Form and scale of the update. A replacement whose scale is not given replaces wholly."""
    if section.scale == "calibrated":
        return CANDIDATES[0]
    form = "sparse" if allocation.update == "sparse" else section.update
    default = "scale" not in section.model_fields_set
    return form, 1.0 if form == "replace" and default else float(section.scale)


@dataclass(frozen=True)
class _Trial:
    """Scores repairs that are written only to be measured."""

    job: RepairJob
    pool: Pool
    anchor: Checkpoint
    table: ScoreTable
    scorer: CheckpointScorer

    def __call__(self, plan: RepairPlan) -> DomainScores:
        folder = hidden(self.job.out, "candidate")
        options = replace(self.job.options, overwrite=True)
        write_candidate(plan, self.pool, self.anchor, folder, options)
        try:
            return _measured(self.scorer, folder, self.table)
        finally:
            shutil.rmtree(folder)


def _further_rounds(plan: RepairPlan, trial: _Trial, measured: MeasuredViews) -> RepairPlan:
    """Ours: repair, measure again, and claim from what is left. Rounds are disjoint, so the last
    result is the anchor with all rounds' claims."""
    section = trial.job.section
    for _ in range(section.rounds - 1):
        table = trial.table.model_copy(update={"anchor": trial(plan)})
        allocation = _allocate(section, trial.job.recipe, measured, table)
        following = Round(
            order=allocation.order,
            quota=_rows(allocation),
            deficit=dict(zip(allocation.domains, allocation.deficit.tolist(), strict=True)),
            share=dict(zip(allocation.domains, allocation.share.tolist(), strict=True)),
        )
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


def _calibrate(plan: RepairPlan, trial: _Trial) -> RepairPlan:
    """Ours: the update form and scale with the best mean calibration score."""
    tried = []
    for form, scale in CANDIDATES:
        scores = trial(plan.model_copy(update={"update": form, "scale": scale}))
        mean = float(np.mean(list(scores.values())))
        tried.append(TriedUpdate(update=form, scale=scale, scores=scores, mean=mean))
    best = max(tried, key=lambda candidate: candidate.mean)  # the first among equals
    return plan.model_copy(
        update={"update": best.update, "scale": best.scale, "candidates": tuple(tried)}
    )


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
class ReplayJob:
    """The repair of a plan.json again, byte for byte. It needs no scores and no probe."""

    plan_file: Path
    out: Path
    options: Options
    given_anchor: Path | None = None

    def describe(self) -> Description:
        _, pool, _, _ = self._planned()
        return Description((describe_occupancy(pool),), self.options.threads)

    def run(self) -> Merged:
        meter = Meter()
        plan, pool, stored, text = self._planned()
        verdict = plan.guard
        kept = verdict is not None and verdict.kept == "anchor"
        guard: Guard | None = (lambda folder: verdict) if verdict is not None and kept else None
        return run_occupancy(plan, pool, stored, text, self.out, self.options, meter, guard)

    def _planned(self) -> tuple[RepairPlan, Pool, Checkpoint, str]:
        """The plan, its pool, its anchor, and a recipe that says where it came from."""
        plan = read_repair_plan(self.plan_file)
        recipe = load_recipe({
            "merge_method": "task_arithmetic",
            "base_model": plan.reference.path if plan.reference else None,
            "models": [{"model": e.path, "name": name} for name, e in plan.experts.items()],
        })  # fmt: skip
        pool = open_repair_pool(recipe, self.options)
        path = self.given_anchor or plan.anchor.path
        if path is None:
            raise RecipeError(
                f"{self.plan_file}: the anchor it repaired was not kept; make it again with "
                "`sigmerge merge` (the recipe without repair:) and pass --anchor FOLDER."
            )
        check_target(self.out, self.options.overwrite, [*recipe.inputs, Path(path)])
        stored = open_anchor(Path(path), pool, self.options)
        _check_plan(self.plan_file, plan, pool)
        _check_digests(plan, {**pool.members, "anchor": stored}, self.options)
        return plan, pool, stored, f"# replayed from a plan\n{recipe.text}"


def _check_plan(file: Path, plan: RepairPlan, pool: Pool) -> None:
    """Whether a plan's claims fit the pool."""
    experts, depth = sorted(pool.experts), pool.stack.depth
    sizes = [sum(site.size for site in block) for block in block_sites(pool)]
    claims = np.zeros(depth)
    for turn in plan.rounds:
        if sorted(turn.order) != experts:
            raise RecipeError(f"{file}: order must name each of {', '.join(experts)} once.")
        if len(turn.quota) != depth or any(len(row) != len(experts) for row in turn.quota):
            raise RecipeError(f"{file}: quota must have {depth} rows of {len(experts)} numbers.")
        claims += np.sum(turn.quota, axis=1)
    for layer, (wanted, size) in enumerate(zip(claims, sizes, strict=True)):
        if wanted > size:
            raise RecipeError(f"{file}: layer {layer}: {wanted:g} of {size} coordinates claimed.")


def _check_digests(plan: RepairPlan, members: Mapping[str, Checkpoint], options: Options) -> None:
    promised = {"reference": plan.reference, "anchor": plan.anchor, **plan.experts}
    changed = [
        name
        for name, checkpoint in members.items()
        if (expected := promised[name]) is None
        or sorted(weight_digests(checkpoint, options, plain=are_plain(expected.sha256)))
        != sorted(expected.sha256)
    ]
    if changed:
        raise PoolError(f"The plan was made with other weights of: {', '.join(changed)}.")


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
        step = describe_scoring(recipe, scorer, len(recipe.experts) + 1, "calibration")
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
        return self.recipe
