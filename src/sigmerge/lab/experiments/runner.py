"""`sigmerge suite`: every run of a suite, each scored and stored before its weights are deleted.

    OUT/results.sqlite   the store; `sigmerge analyze` reads it
    OUT/suite.yaml       the suite as it is run; a folder holds one suite
    OUT/overview.json    what runs now, what is done, how long the rest may take
    OUT/analysis/        tables and figures, where `sigmerge analyze` wrote them
    OUT/work/            checkpoints that are not scored yet; gone when the suite is done

Interrupted, the same command goes on with the runs that are missing and ends in the same store.
With several jobs, processes make groups of runs side by side; the store is the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sigmerge.engine.machine import Meter
from sigmerge.errors import OutputError, RecipeError, ScoreError
from sigmerge.files.documents import whole, write_json
from sigmerge.files.safe_open import remove
from sigmerge.files.yaml_documents import as_yaml
from sigmerge.jobs.options import Options
from sigmerge.jobs.repair import check_repair, check_settings
from sigmerge.jobs.scores import scorer_of
from sigmerge.jobs.steps import Description
from sigmerge.jobs.work_folder import WorkFolder
from sigmerge.lab.experiments.group import GROUP_NAME, UNSCORED, Maker
from sigmerge.lab.experiments.plan import Group, PoolPlan, plans
from sigmerge.lab.experiments.scoring import check_benchmarks, check_probes
from sigmerge.lab.experiments.side_by_side import Team
from sigmerge.lab.experiments.store import (
    ANALYSIS,
    STORE,
    RunStore,
    create,
    is_begun,
    open_read_only,
)
from sigmerge.lab.experiments.suite import ExperimentSuite
from sigmerge.merge3.evolve import require_search
from sigmerge.progress import silent
from sigmerge.records import Part

DEFINITION, OVERVIEW = "suite.yaml", "overview.json"
SUITE_FOLDER = WorkFolder(
    "suite",
    (STORE, f"{STORE}-journal", DEFINITION, OVERVIEW),
    (),
    last=DEFINITION,
    work=(UNSCORED, GROUP_NAME),
    beside=(ANALYSIS,),
)


class SuiteResult(Part):
    """Number of runs in the store, and of those made now."""

    out: str
    store: str
    runs: int
    made: int
    wall_seconds: float


@dataclass(frozen=True)
class SuiteJob:
    """A suite into a folder of its own; `jobs` processes make its runs."""

    suite: ExperimentSuite
    out: Path
    options: Options
    jobs: int = 1

    def check(self) -> list[PoolPlan]:
        """Find every problem that headers and texts show. Reads no tensor."""
        found = plans(self.suite, self.options)
        inputs = []
        for plan in found:
            for method in (*self.suite.anchors, *self.suite.baselines):
                recipe = plan.recipe(method, 0, self.suite.default, 0)
                inputs += recipe.inputs
                if recipe.search is not None:
                    require_search()
            check_benchmarks(plan.place, self.suite, self.options)
            check_probes(plan.place, self.suite)
            check_repair(plan.plain, self.options)
            for setting in self.suite.variants():
                recipe = plan.recipe(self.suite.anchors[0], 0, setting, 0)
                check_settings(recipe, self.options)
            if scorer_of(plan.plain, self.options, "evaluation") is None:
                raise ScoreError(
                    "command: must say {split}: a suite scores the calibration and the "
                    "evaluation items apart."
                )
        _check_distinct(found, [str(_folders(plan)) for plan in found])
        SUITE_FOLDER.check(self.out, True, inputs)
        self._check_store()
        return found

    def _check_store(self) -> None:
        """A folder holds the runs of one suite; suite.yaml only shows it to people."""
        if is_begun(self.out / STORE):
            with open_read_only(self.out / STORE) as store:
                if not store.suites() <= {self.suite.key}:
                    raise OutputError(
                        f"{self.out}: holds the results of another suite (see {DEFINITION} there); "
                        "choose a new folder."
                    )

    def _write_definition(self) -> None:
        text = as_yaml(self._definition())
        file = self.out / DEFINITION
        if not file.exists() or file.read_bytes() != text.encode():
            with whole(file) as partial:
                partial.write_bytes(text.encode())

    def _definition(self) -> dict[str, Any]:
        """What is run on each pool. Pools may be added later."""
        return self.suite.section.model_dump(mode="json", exclude={"pools"})

    def describe(self) -> Description:
        from sigmerge.lab.experiments.description import describe_pool

        found = self.check()
        steps = tuple(describe_pool(plan, self.options) for plan in found)
        return Description(steps, self.options.threads)

    def run(self) -> SuiteResult:
        found, meter = self.check(), Meter()
        _check_distinct(found, [plan.row.key for plan in found])
        with SUITE_FOLDER.writing(self.out):
            self._check_store()
            self._write_definition()
            with create(self.out / STORE) as store:
                before = len(store.keys())
                _Running(self.out, store, self.options, found, self.jobs).run()
                runs = len(store.keys())
            remove(self.out / UNSCORED, if_possible=True)
        return SuiteResult(
            out=str(self.out.absolute()),
            store=str((self.out / STORE).absolute()),
            runs=runs,
            made=runs - before,
            wall_seconds=meter.wall_seconds,
        )


def _folders(plan: PoolPlan) -> list[Path]:
    return [path.resolve() for path in plan.plain.inputs]


def _check_distinct(found: list[PoolPlan], keys: list[str]) -> None:
    """Refuse two pools with one key: their folders, or what they hold."""
    known: dict[str, str] = {}
    for plan, key in zip(found, keys, strict=True):
        if key in known:
            raise RecipeError(f"{known[key]} and {plan.name} are the same pool; name it once.")
        known[key] = plan.name


@dataclass
class _Running:
    """The runs that are missing in a store: what a pool shares first, then groups of runs."""

    out: Path
    store: RunStore
    options: Options
    pools: list[PoolPlan]
    jobs: int
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        groups = [(plan, list(plan.groups())) for plan in self.pools]
        rows = {
            plan.name: [*plan.experts(), *(run.record for g in each for run in g.runs)]
            for plan, each in groups
        }
        self.rows = {name: [row.key for row in each] for name, each in rows.items()}
        self.first = done = self.store.keys()
        self.store.add_pools([plan.row for plan in self.pools])
        missing = [
            (plan, number, group)
            for plan, each in groups
            for number, group in enumerate(each)
            if not {run.record.key for run in group.runs} <= done
        ]
        if self.jobs > 1 or self.options.engine != "local":
            self._side_by_side(missing)
        else:
            self._one_by_one(missing)
        self._overview("nothing")

    def _one_by_one(self, missing: list[tuple[PoolPlan, int, Group]]) -> None:
        quiet = replace(self.options, progress=silent)
        makers = {plan.name: Maker(self.store, plan, quiet) for plan in self.pools}
        for maker in makers.values():
            for label in maker.experts():
                self._overview(label)
        # Searches take longest; what the tables need most comes before them.
        for plan, _, group in sorted(missing, key=lambda each: each[2].searched):
            for label in makers[plan.name].group(group, self.out):
                self._overview(label)

    def _side_by_side(self, missing: list[tuple[PoolPlan, int, Group]]) -> None:
        quiet, cluster = self.options.in_a_task, self.options.cluster

        def shared_by(processes: int) -> Options:
            if cluster is not None:
                return quiet
            return replace(quiet, threads=max(1, quiet.threads // min(processes, self.jobs)))

        with Team(self.jobs, self.out, cluster) as team:
            how, first = shared_by(len(self.pools)), {}
            for plan in self.pools:
                numbers = [number for other, number, _ in missing if other is plan]
                first[plan.name] = team.prepare(plan, numbers, how)
            for now in team.wait(first):
                self._overview(now)
            shared = {name: future.result() for name, future in first.items()}
            # The longest first: what is short fills the gaps at the end.
            order = sorted(missing, key=lambda each: (not each[2].searched, -len(each[2].runs)))
            how = shared_by(len(missing) or 1)
            groups = {
                f"{plan.name}: {group.label}": team.make(plan, number, shared[plan.name], how)
                for plan, number, group in order
            }
            for now in team.wait(groups):
                self._overview(now)

    def _overview(self, running: str) -> None:
        """A progress bar for each pool, and overview.json for other programs."""
        done = self.store.keys()
        counts = {n: (len(done.intersection(k)), len(k)) for n, k in self.rows.items()}
        for name, (now, total) in counts.items():
            self.options.progress(name, now, total)
        left, made = sum(t - d for d, t in counts.values()), len(done) - len(self.first)
        each = (time.monotonic() - self.began) / made if made else None
        content = {
            "running": running,
            "pools": {n: {"done": d, "runs": t} for n, (d, t) in counts.items()},
            "seconds_left": round(each * left) if each is not None else None,
        }
        write_json(self.out / OVERVIEW, content, durable=False)
