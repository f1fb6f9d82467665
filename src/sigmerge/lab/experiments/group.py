"""The runs of a pool, made group by group: merged or repaired, scored, stored, deleted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sigmerge.engine.machine import Meter
from sigmerge.files.safe_open import remove
from sigmerge.files.scratch import scratch
from sigmerge.jobs.anchor import is_current, make_anchor
from sigmerge.jobs.capture import CaptureJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_repair_pool
from sigmerge.jobs.profile import measure_profile
from sigmerge.jobs.repair import DeficitsJob, RepairJob
from sigmerge.jobs.scores import CheckpointScorer, MeasuredScores, scorer_of
from sigmerge.lab.experiments.costs import Shared, merge_cost, repair_cost
from sigmerge.lab.experiments.plan import Group, PlannedRun, PoolPlan
from sigmerge.lab.experiments.scoring import benchmarks_of
from sigmerge.lab.experiments.store import RunStore, Signals, Split, StoredRun, StoredScore
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.records import RepairPlan
from sigmerge.results import Captures

UNSCORED, GROUP_NAME = "work", r"[0-9a-f]{24}"
"""The folder of checkpoints that are not scored yet, and how those of a group are named in it."""
BOTH: tuple[Split, ...] = ("calibration", "evaluation")


@dataclass
class Maker:
    """Makes the missing runs of one pool into a store; every step first says what it is."""

    store: RunStore
    plan: PoolPlan
    options: Options
    known: Shared | None = None

    def experts(self) -> Iterator[str]:
        """The scores of the experts."""
        recipe, done = self.plan.plain, self.store.keys()
        for row in self.plan.experts():
            if row.key not in done:
                yield f"{self.plan.name}: expert {row.method}"
                scores = self._scores(recipe, recipe.experts[row.method], BOTH)
                self._store(replace(row, scores=scores))

    def before(self, groups: Iterable[Group]) -> Shared | None:
        """Make what groups share, before they run concurrently."""
        repairs = False
        for group in groups:
            self._captured(group.recipe)
            repairs |= len(group.runs) > 1
        return self.shared if repairs else None

    @cached_property
    def shared(self) -> Shared:
        """Costs that all repairs share, measured from nothing once for each run of a suite."""
        if self.known is not None:
            return self.known
        recipe, meter = self.plan.plain, Meter()
        measure_profile(recipe, open_repair_pool(recipe, self.options), self.options, again=True)
        return Shared(meter.wall_seconds)

    def group(self, group: Group, out: Path) -> Iterator[str]:
        """The runs of a group that are missing; its merge is made once and deleted at the end."""
        done = self.store.keys()
        missing = [run for run in group.runs if run.record.key not in done]
        if not missing:
            return
        label, folder = (
            f"{self.plan.name}: {group.label}",
            out / UNSCORED / group.runs[0].record.key,
        )
        yield label
        captures = self._captured(group.recipe)
        merged = self._merged(group.recipe, folder / "merged")
        for run in missing:
            yield f"{label}: {run.record.setting}".rstrip(": ")
            if run.record.kind in ("anchor", "baseline"):
                scores = self._scores(run.recipe, merged, BOTH)
                cost = merge_cost(run.recipe, merged, captures)
                self._store(replace(run.record, scores=scores, cost=cost))
            elif run.record.kind == "partition":
                self._store(self._partition(run, merged))
            else:
                self._store(self._repaired(run, merged, folder / "repaired"))
        remove(folder)

    def _store(self, run: StoredRun) -> None:
        """Store a run under the key of its pool, which must be the same after all these hours."""
        self.plan.check_same()
        self.store.append(run)

    def _captured(self, recipe: Recipe) -> Captures:
        """Capture the statistics of a merge before it, to measure their time separately."""
        if recipe.operator is None or not recipe.operator.needs:
            return Captures()
        return CaptureJob(recipe, self.options).run()

    def _merged(self, recipe: Recipe, folder: Path) -> Path:
        """The dense merge: made now, or by a suite that was interrupted after it."""
        if folder.exists() and not is_current(recipe, folder, self.options):
            remove(folder)
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_anchor(recipe, folder, replace(self.options, overwrite=True))
        return folder

    def _repaired(self, run: PlannedRun, anchor: Path, folder: Path) -> StoredRun:
        shared, measured = self.shared, self._measured(run.recipe, anchor, "calibration")
        remove(folder)  # of a suite that was interrupted, perhaps while it removed this
        job = RepairJob(run.recipe, folder, self.options, anchor, kept=False)
        made = job.repair()
        scores = self._scores(run.recipe, folder, ("evaluation",))
        remove(folder)
        plan = made.repair
        assert plan.c_min is not None and plan.c_max is not None
        return replace(
            run.record,
            scores=scores,
            signals=_signals(plan),
            constants={"c_min": plan.c_min, "c_max": plan.c_max, "scale": plan.scale},
            cost=repair_cost(job, made, measured, shared),
        )

    def _partition(self, run: PlannedRun, anchor: Path) -> StoredRun:
        """Shares that other calibration items give; nothing is merged."""
        from sigmerge.evaluation import splits

        suite, how = benchmarks_of(self.plan.place, self.plan.suite, self.options)
        items, _ = splits.load_scored(suite, how)
        content = run.recipe.given
        with scratch() as folder:
            file = folder / "partition.json"
            splits.write(splits.build(suite, items, run.record.seed), file)
            content["repair"]["evaluate"]["splits"] = str(file)
            found = DeficitsJob(load_recipe(content), self.options, anchor).run()
        return replace(run.record, signals=Signals(deficit=found.deficit, share=found.share))

    def _scores(
        self, recipe: Recipe, folder: Path, on: tuple[Split, ...]
    ) -> tuple[StoredScore, ...]:
        found = ((split, self._measured(recipe, folder, split)) for split in on)
        return tuple(score for split, measured in found for score in _rows(measured, split))

    def _measured(self, recipe: Recipe, folder: Path, split: Split) -> MeasuredScores:
        scorer: CheckpointScorer | None = scorer_of(recipe, self.options, split)
        assert scorer is not None  # the suite was checked
        return scorer(folder)


def _rows(measured: MeasuredScores, split: Split) -> Iterator[StoredScore]:
    """Rows of the store; where only domain scores are known, a domain is its own benchmark."""
    for metric in measured.metrics:
        yield StoredScore(
            metric.domain, metric.benchmark, metric.metric, metric.value, metric.headline,
            metric.items, split, metric.item_scores,
        )  # fmt: skip
    if not measured.metrics:
        for domain, value in measured.scores.items():
            yield StoredScore(domain, domain, "score", value, True, 1, split)


def _signals(plan: RepairPlan) -> Signals:
    return Signals(
        views=plan.views,
        conflict=plan.conflict,
        capacity=plan.capacity,
        deficit=plan.deficit,
        share=plan.share,
        claim_order=plan.order,
    )
