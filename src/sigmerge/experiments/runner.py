"""`sigmerge suite`: every run of a suite, each scored and stored before its weights are deleted.

    OUT/results.sqlite   the store; `sigmerge analyze` reads it
    OUT/suite.yaml       the suite as it is run; a folder holds one suite
    OUT/overview.json    what runs now, what is done, how long the rest may take

Interrupted, the same command goes on with the runs that are missing and ends in the same store.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from sigmerge.engine.machine import Meter
from sigmerge.errors import OutputError, RecipeError, ScoreError, SigmergeError
from sigmerge.experiments.plan import Group, PlannedRun, PoolPlan, plans
from sigmerge.experiments.store import (
    BuildCost,
    RunStore,
    Signals,
    Split,
    StoredRun,
    StoredScore,
    create,
    open_read_only,
)
from sigmerge.experiments.suite import ExperimentSuite
from sigmerge.files.documents import whole, write_json
from sigmerge.files.yaml_documents import read_yaml
from sigmerge.jobs.anchor import is_current, make_anchor
from sigmerge.jobs.options import Description, Options, silent
from sigmerge.jobs.repair import DeficitsJob, RepairJob, check_repair
from sigmerge.jobs.scores import CheckpointScorer, MeasuredScores, scorer_of
from sigmerge.jobs.work_folder import WorkFolder
from sigmerge.probing.exemplars import read_prompts
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.records import RECORDS_FOLDER as RECORDS
from sigmerge.records import Part, RepairPlan, SearchRecord, read
from sigmerge.results import Merged

STORE, DEFINITION, OVERVIEW = "results.sqlite", "suite.yaml", "overview.json"
PARTITION = "partition.json"
SUITE_FOLDER = WorkFolder(
    "suite",
    (STORE, f"{STORE}-journal", DEFINITION, OVERVIEW, PARTITION),
    ("anchor", "repaired", "baseline"),
    last=DEFINITION,
)


class SuiteResult(Part):
    """How many runs the store holds, and how many of them were made now."""

    out: str
    store: str
    runs: int
    made: int
    wall_seconds: float


@dataclass(frozen=True)
class SuiteJob:
    """A suite into a folder of its own."""

    suite: ExperimentSuite
    out: Path
    options: Options

    def check(self) -> list[PoolPlan]:
        """Find every problem that headers and texts show. Reads no tensor."""
        found = plans(self.suite, self.options)
        inputs = []
        for plan in found:
            for method in (*self.suite.anchors, *self.suite.baselines):
                recipe = plan.recipe(method, 0, self.suite.default, 0)
                inputs += recipe.inputs
            for setting in (self.suite.default, *self.suite.variants()):
                recipe = plan.recipe(self.suite.anchors[0], 0, setting, 0)
                check_repair(recipe, self.options)
            if scorer_of(recipe, self.options, "evaluation") is None:
                raise ScoreError(
                    "command: must say {split}: a suite scores the calibration and the "
                    "evaluation items apart."
                )
        _check_distinct(found)
        SUITE_FOLDER.check(self.out, True, inputs)
        self._is_defined(found)
        return found

    def _is_defined(self, found: list[PoolPlan]) -> bool:
        """Whether the folder says that it holds this suite; if it holds another, OutputError.

        Where its definition is damaged, the runs say it: each is keyed by all that decides it.
        """
        file = self.out / DEFINITION
        if not file.exists():
            return False
        try:
            said = read_yaml(file, "a suite")
        except SigmergeError:
            said = None
        readable = isinstance(said, dict)
        if not (said == self._definition() if readable else self._holds_no_other_run(found)):
            raise OutputError(
                f"{self.out}: holds the results of another suite ({file}); choose a new folder."
            )
        return readable

    def _holds_no_other_run(self, found: list[PoolPlan]) -> bool:
        if not (self.out / STORE).exists():
            return True
        groups = (group for plan in found for group in plan.groups())
        planned = {row.key for plan in found for row in plan.experts()}
        planned |= {run.record.key for group in groups for run in group.runs}
        with open_read_only(self.out / STORE) as store:
            return planned.issuperset(store.keys())

    def _definition(self) -> dict[str, Any]:
        """What is run on each pool. Pools may be added later."""
        return self.suite.section.model_dump(mode="json", exclude={"pools"})

    def describe(self) -> Description:
        from sigmerge.experiments.description import describe_pool

        found = self.check()
        steps = tuple(describe_pool(plan, self.options) for plan in found)
        return Description(steps, self.options.threads)

    def run(self) -> SuiteResult:
        found, meter = self.check(), Meter()
        with SUITE_FOLDER.writing(self.out):
            if not self._is_defined(found):
                text = yaml.safe_dump(self._definition(), sort_keys=False, allow_unicode=True)
                with whole(self.out / DEFINITION) as partial:
                    partial.write_text(text, encoding="utf-8")
            with create(self.out / STORE) as store:
                made = _Running(self.out, store, self.options, found).run()
                runs = len(store.keys())
            for name in SUITE_FOLDER.checkpoints:
                shutil.rmtree(self.out / name, ignore_errors=True)
            (self.out / PARTITION).unlink(missing_ok=True)
        return SuiteResult(
            out=str(self.out.absolute()),
            store=str((self.out / STORE).absolute()),
            runs=runs,
            made=made,
            wall_seconds=meter.wall_seconds,
        )


def _check_distinct(found: list[PoolPlan]) -> None:
    known: dict[str, str] = {}
    for plan in found:
        if plan.row.key in known:
            raise RecipeError(
                f"{known[plan.row.key]} and {plan.name} are the same pool; name it once."
            )
        known[plan.row.key] = plan.name


@dataclass
class _Running:
    """The runs that are missing in a store, made one after the other."""

    out: Path
    store: RunStore
    options: Options
    pools: list[PoolPlan]
    made: int = 0
    began: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        groups = [(plan, list(plan.groups())) for plan in self.pools]
        rows = {
            plan.name: [*plan.experts(), *(run.record for g in each for run in g.runs)]
            for plan, each in groups
        }
        self.rows = {name: [row.key for row in each] for name, each in rows.items()}
        self.done = set(self.store.keys())
        for plan, _ in groups:
            self._experts(plan)
        # Searches take longest; what the tables need most comes before them.
        for searched in (False, True):
            for plan, each in groups:
                for group in each:
                    if group.searched == searched:
                        self._group(plan, group)
        self._overview("nothing")
        return self.made

    def _experts(self, plan: PoolPlan) -> None:
        missing = [row for row in plan.experts() if row.key not in self.done]
        recipe = plan.recipe(plan.suite.anchors[0], 0, plan.suite.default, 0)
        for row in missing:
            self._overview(f"{plan.name}: expert {row.method}")
            scores = self._scores(recipe, recipe.experts[row.method], ("calibration", "evaluation"))
            self._append(replace(row, scores=scores))

    def _group(self, plan: PoolPlan, group: Group) -> None:
        missing = [run for run in group.runs if run.record.key not in self.done]
        if not missing:
            return
        label = f"{plan.name}: {group.label}"
        self._overview(label)
        kind = "baseline" if group.runs[0].record.kind == "baseline" else "anchor"
        merged = self._merged(group.recipe, self.out / kind)
        for run in missing:
            row = run.record
            self._overview(f"{label}: {row.setting}".rstrip(": "))
            if row.kind in ("anchor", "baseline"):
                splits: tuple[Split, ...] = ("calibration", "evaluation")
                scores = self._scores(run.recipe, merged, splits)
                self._append(replace(row, scores=scores, cost=_merge_cost(run.recipe, merged)))
            elif row.kind == "partition":
                self._append(self._partition(plan, run, merged))
            else:
                self._append(self._repaired(run, merged))
        shutil.rmtree(merged)

    def _merged(self, recipe: Recipe, folder: Path) -> Path:
        """The dense merge: made now, or by a suite that was interrupted after it."""
        if folder.exists() and not is_current(recipe, folder, self.options):
            shutil.rmtree(folder)
        if not folder.exists():
            make_anchor(recipe, folder, replace(self._quiet, overwrite=True))
        return folder

    def _repaired(self, run: PlannedRun, anchor: Path) -> StoredRun:
        folder = self.out / "repaired"
        options = replace(self._quiet, overwrite=True)
        made = RepairJob(run.recipe, folder, options, anchor, kept=False).repair()
        scores = self._scores(run.recipe, folder, ("evaluation",))
        shutil.rmtree(folder)
        plan = made.repair
        assert plan.c_min is not None and plan.c_max is not None
        return replace(
            run.record,
            scores=scores,
            signals=_signals(plan),
            constants={"c_min": plan.c_min, "c_max": plan.c_max, "scale": plan.scale},
            cost=self._repair_cost(run, made, anchor),
        )

    def _partition(self, plan: PoolPlan, run: PlannedRun, anchor: Path) -> StoredRun:
        """Shares that other calibration items give; nothing is merged."""
        from sigmerge.evaluation import splits

        file = self.out / PARTITION
        scored = plan.place.evaluation(plan.suite)["evaluate"]
        suite, data = _scored_suite(scored)
        items, _ = splits.load_available(suite, data)
        splits.write(splits.build(suite, items, run.record.seed), file)
        content = yaml.safe_load(run.recipe.text)
        content["repair"]["evaluate"]["splits"] = str(file.absolute())
        found = DeficitsJob(load_recipe(content), self._quiet, anchor).run()
        file.unlink()
        signals = Signals(deficit=found.deficit, share=found.share)
        return replace(run.record, signals=signals)

    def _scores(
        self, recipe: Recipe, folder: Path, on: tuple[Split, ...]
    ) -> tuple[StoredScore, ...]:
        return tuple(
            score
            for split in on
            for score in _rows(_scorer(recipe, self._quiet, split)(folder), split)
        )

    def _repair_cost(self, run: PlannedRun, made: Merged, anchor: Path) -> BuildCost:
        recipe, plan = run.recipe, made.repair
        experts, domains = len(recipe.experts), len(plan.domains)
        measured = _scorer(recipe, self._quiet, "calibration")(anchor)
        items = sum(metric.items for metric in measured.metrics if metric.headline)
        probe = recipe.repair.probe if recipe.repair else None
        looked = experts + 1 + len(plan.candidates) + len(plan.later_rounds)
        return BuildCost(
            wall_seconds=made.provenance.wall_seconds,
            forward_calls=experts if probe else 0,
            evaluation_calls=domains,
            labelled=items,
            unlabelled=len(read_prompts(Path(probe))) if probe else 0,
            spent_calls=looked * domains,
            spent_labelled=looked * items,
        )

    @property
    def _quiet(self) -> Options:
        return replace(self.options, progress=silent)

    def _append(self, record: StoredRun) -> None:
        self.store.append(record)
        self.done.add(record.key)
        self.made += 1

    def _overview(self, running: str) -> None:
        """One bar for each pool, and a file for whoever looks from outside."""
        counts = {n: (len(self.done.intersection(k)), len(k)) for n, k in self.rows.items()}
        for name, (done, total) in counts.items():
            self.options.progress(name, done, total)
        left = sum(total - done for done, total in counts.values())
        each = (time.monotonic() - self.began) / self.made if self.made else None
        content = {
            "running": running,
            "pools": {n: {"done": d, "runs": t} for n, (d, t) in counts.items()},
            "seconds_left": round(each * left) if each is not None else None,
        }
        write_json(self.out / OVERVIEW, content, durable=False)


def _scorer(recipe: Recipe, options: Options, split: str) -> CheckpointScorer:
    scorer = scorer_of(recipe, options, split)
    assert scorer is not None  # the suite was checked
    return scorer


def _rows(measured: MeasuredScores, split: Split) -> Iterator[StoredScore]:
    """Rows of the store; where only domain scores are known, a domain is its own benchmark."""
    for metric in measured.metrics:
        yield StoredScore(
            metric.domain, metric.benchmark, metric.metric, metric.value, metric.headline,
            metric.items, split,
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


def _merge_cost(recipe: Recipe, folder: Path) -> BuildCost:
    """What a merge or a search took, from its own records."""
    from sigmerge.records import PLAN, PROVENANCE, Provenance, read_plan

    records = folder / RECORDS
    seconds = read(Provenance, records / PROVENANCE).wall_seconds
    if recipe.search is not None:
        found = read(SearchRecord, records / "search.json")
        labelled = sum(found.labelled_items.values())
        each = sum(found.items_per_call.values())
        return BuildCost(
            wall_seconds=found.wall_seconds,
            evaluation_calls=found.evaluation_calls,
            labelled=labelled,
            iterations=len(found.best_by_generation),
            spent_calls=found.evaluation_calls + found.ability_runs,
            spent_labelled=found.evaluation_calls * each + found.ability_runs * labelled,
        )
    captured: Mapping[str, Any] = read_plan(records / PLAN).capture or {}
    shown = captured.get("exemplars", {})
    return BuildCost(wall_seconds=seconds, forward_calls=len(shown), unlabelled=sum(shown.values()))


def _scored_suite(evaluate: Mapping[str, Any]) -> tuple[Any, Any]:
    """The suite that scores, and where its data lie."""
    from sigmerge.evaluation.sources import Data
    from sigmerge.evaluation.suite import load_suite, nano_suite

    folder = Path(evaluate["data"]) if "data" in evaluate else None
    data = Data.default(folder, evaluate.get("hub", False))
    if evaluate["suite"] == "nano":
        return nano_suite(Path(evaluate["pool"]) if "pool" in evaluate else None), data
    return load_suite(evaluate["suite"]), data
