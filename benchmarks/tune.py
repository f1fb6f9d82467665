"""`sigmerge tune` beside what it is compared with: Macro-5 on evaluation items against calls.

    python -m benchmarks.tune WORK POOL... [--rows tune-24,random-24,...]

POOL is a folder that `sigmerge nano train` made. Prints a table in Markdown, pools in columns. Each
row is one run on each pool: `tune-N` (N calls), `random-N` and `merge3-N` (the same space, the same
calls), `items-M` (tune at 24 calls with M calibration items a domain), `adamerging`, `plain-A` and
`paper-A` (the anchor A, and the repair with the paper's constants). Answers of models that were
asked before are kept in WORK, so an interrupted benchmark goes on where it stopped, and rows that
try the same candidate ask it once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from sigmerge.evaluation.how import How
from sigmerge.evaluation.suite import nano_suite
from sigmerge.files.documents import write_json
from sigmerge.jobs.candidates import MemoryMeasure
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_repair_pool
from sigmerge.jobs.profile import ProfileJob
from sigmerge.jobs.tune import TuneJob, pool_recipe
from sigmerge.merge3.candidate import Weights
from sigmerge.merge3.extract import Question
from sigmerge.merge3.scoring import SuiteScorer
from sigmerge.method.deficit import residual_gap, shares, strongest
from sigmerge.recipe import TuneSection
from sigmerge.recipe.anchors import anchors_of

ROWS = (
    "plain-task_arithmetic", "paper-task_arithmetic", "tune-8", "tune-16", "tune-24", "tune-32",
    "tune-64", "merge3-24", "random-24", "adamerging", "items-25", "items-10",
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

    def __call__(self, weights: Weights, questions: Sequence[Question]) -> list[int]:
        digest = hashlib.sha256(self.scorer.name.encode())
        for name in sorted(weights):
            digest.update(np.ascontiguousarray(weights[name]).tobytes())
        file = self.folder / f"{digest.hexdigest()[:32]}.json"
        known: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
        missing = [q for q in questions if q.id not in known]
        if missing:
            answers = self.scorer(weights, missing)
            known |= {q.id: a for q, a in zip(missing, answers, strict=True)}
            write_json(file, known, indent=None)
        return [known[q.id] for q in questions]


class Bench:
    """One pool: its tunings, and scores on its evaluation items."""

    def __init__(self, pool: Path, work: Path) -> None:
        self.name, self.work = pool.name, work / pool.name
        (self.work / "answers").mkdir(parents=True, exist_ok=True)
        self.recipe, self.options = pool_recipe(pool), Options(threads=1, overwrite=True)
        suite, model = nano_suite(pool.absolute()), pool / "reference"
        self.calibration = SuiteScorer(model, suite, How())
        self.evaluation = self._measure(SuiteScorer(model, suite, How(), "evaluation"))

    def row(self, name: str) -> dict[str, float]:
        """Macro-5 on the evaluation items, and the calls that it took."""
        kind, _, rest = name.partition("-")
        if kind in ("plain", "paper"):
            return self._anchor(rest, kind == "paper")
        limit = int(rest) if kind == "items" else None
        calls = 24 if kind in ("items", "adamerging") else int(rest)
        method = kind if kind in ("random", "merge3", "adamerging") else "guided"
        return self._tuned(name, calls, method, limit)

    def _tuned(self, name: str, calls: int, method: str, limit: int | None) -> dict[str, float]:
        settings = TuneSection().changed(calls=calls, method=method)
        scorer = Kept(self.calibration, self.work / "answers", limit)
        job = TuneJob(self.recipe, self.work / name, self.options, settings, scorer=scorer)
        record = job.run()
        scores, _ = self.evaluation.folder(Path(record.winner))
        return {
            "macro": fmean(scores.values()),
            "calibration": fmean(record.best.scores.values()),
            "calls": len(record.calls),
        }

    def _anchor(self, method: str, repaired: bool) -> dict[str, float]:
        anchor = anchors_of(self.recipe, [method])[method]
        weights = tuple(anchor.weights.values())
        chosen = self._measure(self.calibration)
        plain, _ = chosen.recipe(anchor.recipe(weights))
        repair = None
        if repaired:
            domains = list(self.recipe.experts)
            gaps = residual_gap(self._target, np.array([plain[d] for d in domains]))
            repair = {
                "shares": dict(zip(domains, shares(gaps).tolist(), strict=True)),
                "capacity": list(self._profile),
                "scale": 0.6,
                "guard": "off",
            }
        made = anchor.recipe(weights, repair)
        scores, _ = self.evaluation.recipe(made)
        calls = len(self.recipe.experts) + 1 if repaired else 0
        return {"macro": fmean(scores.values()), "calls": calls}

    @cached_property
    def _target(self) -> np.ndarray:
        measure = self._measure(self.calibration)
        table = {name: measure.folder(path)[0] for name, path in self.recipe.experts.items()}
        return strongest(table, list(self.recipe.experts))

    @cached_property
    def _profile(self) -> tuple[float, ...]:
        return ProfileJob(self.recipe, self.options).run().capacity

    def _measure(self, scorer: SuiteScorer) -> MemoryMeasure:
        kept = Kept(scorer, self.work / "answers")
        pool = open_repair_pool(self.recipe, self.options)
        return MemoryMeasure(kept, pool, self.work / f".{scorer.split}.anchor", self.options)


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Rows by name, pools in columns, then mean ± sd and the calls."""
    pools = list(dict.fromkeys(pool for row in results.values() for pool in row))
    lines = [
        f"| row | calls | {' | '.join(pools)} | mean ± sd |",
        "|---|--:|" + "--:|" * (len(pools) + 1),
    ]
    for name, row in results.items():
        cells = [f"{100 * row[p]['macro']:.2f}" if p in row else "" for p in pools]
        spent = sorted({int(found["calls"]) for found in row.values()})
        calls = str(spent[0]) if len(spent) == 1 else f"{spent[0]} to {spent[-1]}"
        values = [100 * found["macro"] for found in row.values()]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        lines.append(f"| {name} | {calls} | {' | '.join(cells)} | {fmean(values):.2f}{spread} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.tune")
    parser.add_argument("work", type=Path)
    parser.add_argument("pools", type=Path, nargs="+")
    parser.add_argument("--rows", default=",".join(ROWS))
    given = parser.parse_args(arguments)
    results: dict[str, dict[str, dict[str, float]]] = {}
    benches = [Bench(pool, given.work) for pool in given.pools]
    for name in given.rows.split(","):
        for bench in benches:
            results.setdefault(name, {})[bench.name] = bench.row(name)
            write_json(given.work / "results.json", results)
            print(name, bench.name, results[name][bench.name], file=sys.stderr, flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
