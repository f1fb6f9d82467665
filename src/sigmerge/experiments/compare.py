"""All methods on one pool, side by side: what they score, and what they cost to make."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sigmerge.analysis.table import macro, residual_gap
from sigmerge.jobs.anchor import make_anchor
from sigmerge.jobs.dense import plan_dense, run_dense
from sigmerge.jobs.options import Options
from sigmerge.jobs.repair import RepairJob
from sigmerge.jobs.scores import scorer_of
from sigmerge.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class Row:
    """One method. Calls and samples are what making it took, as the paper counts them."""

    method: str
    scores: Mapping[str, float]
    gap: float
    seconds: float
    forward: int = 0
    """Forward passes over exemplars or probe prompts, one per expert."""
    calls: int = 0
    """Evaluations of a checkpoint on labelled items."""
    labelled: int = 0
    unlabelled: int = 0

    @property
    def macro(self) -> float:
        return macro(self.scores)


@dataclass(frozen=True)
class Bench:
    """Where a comparison is made; `labelled` and `probes` are how many items the repair reads."""

    out: Path
    labelled: int
    probes: int
    options: Options


def compare(
    bench: Bench,
    recipes: Mapping[str, Mapping[str, Any]],
    repaired: Sequence[str],
) -> list[Row]:
    """Make every method of `recipes`, and the repair on top of some; score them all.

    Rows are kept in rows.jsonl; a method that is there is not made again.
    """
    tasks: dict[str, Callable[[], Row]] = {}
    for name, recipe in recipes.items():
        make = _searched if "search" in recipe else _merged
        tasks[name] = partial(make, bench, name, recipe)
        if name in repaired:
            tasks[f"{name} + repair"] = partial(_repaired, bench, name, recipe)
    bench.out.mkdir(parents=True, exist_ok=True)
    store = bench.out / "rows.jsonl"
    store.touch()
    rows = {row.method: row for row in map(_read, store.read_text().splitlines())}
    with store.open("a", encoding="utf-8") as stream:
        for done, (name, task) in enumerate(tasks.items()):
            bench.options.progress("methods", done, len(tasks))
            if name not in rows:
                rows[name] = task()
                stream.write(json.dumps(asdict(rows[name])) + "\n")
                stream.flush()
    return [rows[name] for name in tasks]


def _read(line: str) -> Row:
    return Row(**json.loads(line))


def _merged(bench: Bench, name: str, recipe: Mapping[str, Any]) -> Row:
    loaded = load_recipe(recipe)
    started = time.perf_counter()
    job = plan_dense(loaded, bench.options)
    run_dense(job, bench.out / name, bench.options)
    seconds = time.perf_counter() - started
    shown = sum(job.exemplars.values())
    folder = bench.out / name
    return _row(name, loaded, folder, seconds, forward=len(job.exemplars), unlabelled=shown)


def _repaired(bench: Bench, name: str, recipe: Mapping[str, Any]) -> Row:
    """The repair's own cost, on top of its anchor's: experts, anchor and result are scored."""
    loaded = load_recipe(recipe)
    started = time.perf_counter()
    folder = bench.out / f"{name}+repair"
    RepairJob(loaded, folder, bench.options, bench.out / name).repair()
    seconds = time.perf_counter() - started
    experts = len(loaded.experts)
    return _row(
        f"{name} + repair",
        loaded,
        folder,
        seconds,
        forward=experts,
        calls=experts + 2,
        labelled=bench.labelled,
        unlabelled=bench.probes,
    )


def _searched(bench: Bench, name: str, recipe: Mapping[str, Any]) -> Row:
    loaded, folder = load_recipe(recipe), bench.out / name
    started = time.perf_counter()
    make_anchor(loaded, folder, bench.options)
    seconds = time.perf_counter() - started
    found = json.loads((folder / "sigmerge/search.json").read_text(encoding="utf-8"))
    labelled = sum(found["labelled_items"].values())
    calls = found["evaluation_calls"]
    return _row(name, loaded, folder, seconds, calls=calls, labelled=labelled)


def _row(name: str, recipe: Recipe, folder: Path, seconds: float, **costs: int) -> Row:
    assert recipe.repair is not None
    scorer = scorer_of(recipe, Options(), "evaluation")
    if scorer is None:
        raise ValueError("a comparison needs a scorer that knows the evaluation split")
    experts = {expert: scorer(path).scores for expert, path in recipe.experts.items()}
    scores = scorer(folder).scores
    return Row(name, scores, residual_gap(experts, scores), seconds, **costs)


def markdown(pools: Sequence[Sequence[Row]]) -> str:
    """Scores and costs of the methods on one pool, or their means and spread over several."""
    methods = [tuple(rows) for rows in zip(*pools, strict=True)]
    return "\n".join([*_scores(methods), "", *_costs(methods), ""])


def _scores(methods: Sequence[Sequence[Row]]) -> Iterator[str]:
    domains = list(methods[0][0].scores)
    yield f"| method | Macro-{len(domains)} | {' | '.join(domains)} | residual gap |"
    yield f"|---|{'--:|' * (len(domains) + 2)}"
    for rows in sorted(methods, key=lambda rows: -fmean(row.macro for row in rows)):
        columns = zip(*([row.macro, *row.scores.values(), row.gap] for row in rows), strict=True)
        yield f"| {rows[0].method} | {' | '.join(map(_percent, columns))} |"


def _percent(values: Sequence[float]) -> str:
    """The mean in percent, with the standard deviation over pools where there are several."""
    mean = f"{100 * fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * stdev(values):.2f}"


def _costs(methods: Sequence[Sequence[Row]]) -> Iterator[str]:
    yield "| method | seconds | forward passes | evaluation calls | labelled | unlabelled |"
    yield "|---|--:|--:|--:|--:|--:|"
    for rows in methods:
        row, seconds = rows[0], fmean(row.seconds for row in rows)
        yield (f"| {row.method} | {seconds:.1f} | {row.forward} | {row.calls} | "
               f"{row.labelled} | {row.unlabelled} |")  # fmt: skip
