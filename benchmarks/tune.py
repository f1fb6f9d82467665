"""`sigmerge tune` beside what it is compared with: Macro-5 on evaluation items against calls.

    python -m benchmarks.tune WORK POOL... [--rows tune-24,random-24,...] [--jobs 16] [--minutes 8]
    python -m benchmarks.tune results.json --show

POOL is a folder that `sigmerge pool nano` made. Prints a table in Markdown, pools in columns. Each
row is one run on each pool: `tune-N` (N calls), `random-N` and `merge3-N` (the same calls; with
`-boxB` weights up to B times the anchor's mean weight, with `-popP` P candidates a generation, as
`box:` and `population:` of a tune: section), `items-M` (tune at 24 calls with M calibration items a
domain), `adamerging`, `plain-A`, `paper-A` and `alone-A` (the anchor A: as it is, with the paper's
repair, and tuned at 24 calls without any other anchor; of the paper's seven anchors the shipped
recipe, of others with the settings of `tune`). `merge3-240-box4-pop24:iso_c+tsv@1` names the
anchors and the seed; without names they are the defaults of the commit. `gains` are the means over
the seven anchors of what the paper's repair and what tuning adds to the plain anchor. `commit` is
where a row was measured. `--rows fair` are those of the comparison at equal anchors, box and items,
with three seeds of every search; the longest come first.

Rows are made side by side, `--jobs` processes with a thread each. Answers of models that were asked
before are kept in WORK, so an interrupted benchmark goes on where it stopped, and rows that try the
same candidate ask it once. After `--minutes` no row is begun, and those under way are given up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import commit
from sigmerge.evaluation.how import How
from sigmerge.evaluation.suite import nano_suite
from sigmerge.files.documents import write_json
from sigmerge.jobs.candidates import MemoryMeasure
from sigmerge.jobs.demo import DEMO_ANCHORS
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_repair_pool
from sigmerge.jobs.profile import ProfileJob
from sigmerge.jobs.tune import TuneJob, pool_recipe
from sigmerge.merge3.candidate import Weights
from sigmerge.merge3.extract import Question
from sigmerge.merge3.scoring import SuiteScorer
from sigmerge.method.deficit import residual_gap, shares, strongest
from sigmerge.method.guidance import CEILING
from sigmerge.nano.files import RECIPES
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.anchors import anchors_of
from sigmerge.recipe.scored import TuneSection

IN_BOX = f"-box{CEILING:g}"  # the box in which `tune` itself moves
ROWS = (
    "merge3-240", f"merge3-240{IN_BOX}", f"random-24{IN_BOX}",
    *(f"tune-{calls}" for calls in (8, 16, 24, 32, 64)),
    *(f"random-{calls}" for calls in (8, 16, 24, 32, 64)),
    *(f"merge3-{calls}" for calls in (16, 24, 32, 64)),
    "items-25", "items-10", "adamerging",
    *(f"{kind}-{anchor}" for kind in ("alone", "paper", "plain") for anchor in DEMO_ANCHORS),
)  # fmt: skip

WITHOUT_DATA = "iso_c+tsv+task_arithmetic"
BEFORE = "task_arithmetic+linear+ties+dare_ties"  # the usual anchors of earlier commits
SEEDS = ("", "@1", "@2")
FAIR = (
    *(f"merge3-240{IN_BOX}:{anchor}{seed}" for anchor in ("iso_c", "tsv") for seed in SEEDS),
    *(f"merge3-240{IN_BOX}-pop24:iso_c{seed}" for seed in SEEDS),
    *(f"merge3-240{IN_BOX}:{anchor}" for anchor in ("regmean", "blend", "task_arithmetic")),
    *(f"random-24{IN_BOX}:{WITHOUT_DATA}{seed}" for seed in SEEDS),
    f"tune-8:{WITHOUT_DATA}", f"tune-24:{WITHOUT_DATA}",
    f"tune-24:{WITHOUT_DATA}+regmean+blend",
    "tune-8:iso_c", "tune-24:iso_c",
    f"tune-8:{BEFORE}", f"tune-24:{BEFORE}+regmean",
    *(f"{kind}-{anchor}" for kind in ("paper", "plain")
      for anchor in ("iso_c", "tsv", "blend", "regmean", "task_arithmetic")),
)  # fmt: skip


class Kept:
    """A scorer that keeps every answer in a folder, by the content of the weights."""

    def __init__(self, scorer: SuiteScorer, folder: Path, limit: int | None = None) -> None:
        self.scorer, self.folder, self.limit = scorer, folder, limit
        self.name = f"{scorer.name} {limit}"

    def questions(self) -> list[Question]:
        chosen: dict[str, list[Question]] = {}
        for question in self.scorer.questions():
            each = chosen.setdefault(question.benchmark, [])
            if self.limit is None or len(each) < self.limit:
                each.append(question)
        return [question for each in chosen.values() for question in each]

    def __call__(self, weights: Weights, questions: Sequence[Question]) -> list[float]:
        digest = hashlib.sha256(self.scorer.name.encode())
        for name in sorted(weights):
            digest.update(np.ascontiguousarray(weights[name]).tobytes())
        file = self.folder / f"{digest.hexdigest()[:32]}.json"
        known: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
        missing = [q for q in questions if q.id not in known]
        if missing:
            answers = self.scorer(weights, missing)
            known |= {q.id: a for q, a in zip(missing, answers, strict=True)}
            write_json(file, known, indent=None)
        return [known[q.id] for q in questions]


class Bench:
    """One pool: its tunings, and scores on its evaluation items."""

    def __init__(self, pool: Path, work: Path) -> None:
        self.pool, self.work = pool.absolute(), work / pool.name
        (self.work / "answers").mkdir(parents=True, exist_ok=True)
        self.options = Options(threads=1, overwrite=True)
        suite, model = nano_suite(self.pool), pool / "reference"
        self.calibration = SuiteScorer(model, suite, How())
        self.evaluation = SuiteScorer(model, suite, How(), "evaluation")

    def row(self, name: str) -> dict[str, float]:
        """Macro-5 on the evaluation items, and the calls that it took."""
        kind, _, rest = name.partition("-")
        if kind in ("plain", "paper"):
            return self._anchor(rest, kind == "paper")
        if kind == "alone":
            return self._tuned(name, self._shipped(rest), settings_of(name))
        limit = int(rest.partition(":")[0]) if kind == "items" else None
        _, _, seed = name.partition("@")
        recipe = pool_recipe(self.pool, int(seed) if seed else None)
        return self._tuned(name, recipe, settings_of(name), limit)

    def _shipped(self, anchor: str) -> Recipe:
        """A shipped recipe on this pool; of an anchor that has none, the pool's."""
        if anchor not in DEMO_ANCHORS:
            return pool_recipe(self.pool)
        text = (RECIPES / f"{anchor}.yaml").read_text(encoding="utf-8")
        return load_recipe(yaml.safe_load(text.replace("../pool/", f"{self.pool}/")))

    def _tuned(
        self, name: str, recipe: Recipe, settings: TuneSection, limit: int | None = None
    ) -> dict[str, float]:
        scorer = Kept(self.calibration, self.work / "answers", limit)
        folder = self.work / re.sub("[^A-Za-z0-9_-]", ".", name)
        record = TuneJob(recipe, folder, self.options, settings, scorer=scorer).run()
        scores = self._measure(recipe, self.evaluation).folder(Path(record.winner)).scores
        return {
            "macro": fmean(scores.values()),
            "calibration": fmean(record.best.scores.values()),
            "calls": len(record.calls),
            "answers": len(record.calls) * sum(record.items_per_call.values()),
        }

    def _anchor(self, method: str, repaired: bool) -> dict[str, float]:
        recipe = self._shipped(method)
        anchor = anchors_of(recipe, [method])[method]
        weights, domains, repair = tuple(anchor.weights.values()), list(recipe.experts), None
        if repaired:
            asked = self._measure(recipe, self.calibration)
            plain = asked.recipe(anchor.recipe(weights)).scores
            table = {name: asked.folder(path).scores for name, path in recipe.experts.items()}
            gaps = residual_gap(strongest(table, domains), np.array([plain[d] for d in domains]))
            repair = {
                "shares": dict(zip(domains, shares(gaps).tolist(), strict=True)),
                "capacity": list(ProfileJob(recipe, self.options).run().capacity),
                "scale": 0.6,
                "guard": "off",
            }
        made = anchor.recipe(weights, repair)
        scores = self._measure(recipe, self.evaluation).recipe(made).scores
        return {"macro": fmean(scores.values()), "calls": len(domains) + 1 if repaired else 0}

    def _measure(self, recipe: Recipe, scorer: SuiteScorer) -> MemoryMeasure:
        kept = Kept(scorer, self.work / "answers")
        pool = open_repair_pool(recipe, self.options)
        return MemoryMeasure(kept, pool, self.work / f".{scorer.split}.{os.getpid()}", self.options)


def settings_of(name: str) -> TuneSection:
    """The tune: section that a row stands for; ValueError for a name that is no row."""
    kind, _, rest = name.partition("@")[0].partition("-")
    told, _, anchors = rest.partition(":")
    told, _, population = told.partition("-pop")
    number, _, box = told.partition("-box")
    if kind == "alone":
        return TuneSection(calls=24, anchors=[rest])
    if kind not in ("tune", "random", "merge3", "items", "adamerging"):
        raise ValueError(f"{name} is no row of a tuning; rows are {', '.join(ROWS)}")
    calls = 24 if kind in ("items", "adamerging") else int(number)
    method = kind if kind in ("random", "merge3", "adamerging") else "guided"
    return TuneSection().changed(
        calls=calls,
        method=method,
        box=float(box) if box else None,
        population=int(population) if population else None,
        anchors=anchors.split("+") if anchors else None,
    )


def made(task: tuple[str, Path, Path]) -> tuple[str, str, dict[str, Any]]:
    """One row of one pool, in a process of its own."""
    name, pool, work = task
    began = time.perf_counter()
    found = Bench(pool, work).row(name)
    seconds = round(time.perf_counter() - began, 1)
    return name, pool.name, {**found, "seconds": seconds, "commit": commit()}


Results = dict[str, dict[str, dict[str, Any]]]


def rows_of(given: argparse.Namespace) -> Results:
    """The rows that were finished in time; kept in a file as they come."""
    file, asked = given.work / "results.json", given.rows.split(",")
    names = [row for name in asked for row in (FAIR if name == "fair" else (name,))]
    given.work.mkdir(parents=True, exist_ok=True)
    known: Results = json.loads(file.read_text()) if file.exists() else {}
    tasks = [
        (name, pool, given.work)
        for name in names
        for pool in given.pools
        if pool.name not in known.get(name, {})
    ]
    deadline = time.monotonic() + 60 * given.minutes
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=8) as team:
        coming = team.imap_unordered(made, tasks)
        for _ in tasks:
            try:
                name, pool, found = coming.next(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                print("the time is over", file=sys.stderr)
                break
            known.setdefault(name, {})[pool] = found
            write_json(file, known)
            print(name, pool, found, file=sys.stderr, flush=True)
    return known


def table(results: Results) -> str:
    """Rows by name, pools in columns, then mean ± sd and the calls."""
    present = {pool for row in results.values() for pool in row}
    pools = sorted(present, key=lambda pool: (pool.rpartition("-")[2], pool))
    lines = [
        f"| row | calls | {' | '.join(pools)} | mean ± sd | commit |",
        "|---|--:|" + "--:|" * (len(pools) + 1) + "---|",
    ]
    for name in sorted(results, key=lambda name: ROWS.index(name) if name in ROWS else len(ROWS)):
        row = results[name]
        cells = [f"{100 * row[p]['macro']:.2f}" if p in row else "" for p in pools]
        spent = sorted({int(found["calls"]) for found in row.values()})
        calls = str(spent[0]) if len(spent) == 1 else f"{spent[0]} to {spent[-1]}"
        values = [100 * found["macro"] for found in row.values()]
        commits = ", ".join(sorted({found["commit"] for found in row.values()}))
        lines.append(f"| {name} | {calls} | {' | '.join(cells)} | {spread(values)} | {commits} |")
    for kind in ("paper", "alone"):
        gains = [gain(results, kind, pool) for pool in pools]
        known = [value for value in gains if value is not None]
        if known:
            cells = ["" if value is None else f"{value:+.2f}" for value in gains]
            lines.append(f"| gains of {kind} | | {' | '.join(cells)} | {spread(known)} | |")
    return "\n".join(lines)


def gain(results: Results, kind: str, pool: str) -> float | None:
    """The mean over the anchors of what a kind of row adds to the plain anchor, in points."""
    pairs = [(results.get(f"{kind}-{a}", {}), results.get(f"plain-{a}", {})) for a in DEMO_ANCHORS]
    if not all(pool in row and pool in plain for row, plain in pairs):
        return None
    return fmean(100 * (row[pool]["macro"] - plain[pool]["macro"]) for row, plain in pairs)


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.tune")
    parser.add_argument("work", type=Path)
    parser.add_argument("pools", type=Path, nargs="*")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--show", action="store_true", help="WORK is a results.json: print it.")
    given = parser.parse_args(arguments)
    given.work = given.work.absolute()
    print(table(json.loads(given.work.read_text()) if given.show else rows_of(given)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
