"""Every anchor with every setting of the repair, on one or several pools.

Each cell is one repaired checkpoint and its score on the evaluation split. Results go into a JSON
lines file as they come; a grid that was interrupted leaves out what is already there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sigmerge.analysis.table import macro, residual_gap
from sigmerge.jobs.dense import plan_dense, run_dense
from sigmerge.jobs.options import Options
from sigmerge.jobs.repair import RepairJob
from sigmerge.jobs.scores import scorer_of
from sigmerge.method.controls import VARIANTS
from sigmerge.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class Setting:
    """A named change to the recipe's `repair:` section."""

    name: str
    repair: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One result, in fractions."""

    pool: str
    anchor: str
    setting: str
    seed: int
    anchor_macro: float
    macro: float
    gap_before: float
    gap_after: float
    scores: Mapping[str, float]

    @property
    def gain(self) -> float:
        return self.macro - self.anchor_macro

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.pool, self.anchor, self.setting, self.seed


def controls(seeds: int = 1) -> list[tuple[Setting, int]]:
    """Every variant of the paper with its seeds, at most `seeds` of them."""
    return [
        (Setting(name, {"variant": name}), seed)
        for name, variant in VARIANTS.items()
        for seed in variant.seeds[:seeds]
    ]


OURS = (
    Setting("scale 1.0", {"scale": 1.0}),
    Setting("replace", {"update": "replace"}),
    Setting("calibrated", {"scale": "calibrated"}),
)
"""Settings beyond the paper."""


def read_cells(store: Path) -> list[Cell]:
    if not store.exists():
        return []
    return [Cell(**json.loads(line)) for line in store.read_text().splitlines() if line.strip()]


def run_grid(
    pools: Mapping[str, Callable[[str], Mapping[str, Any]]],
    anchors: Sequence[str],
    settings: Sequence[tuple[Setting, int]],
    store: Path,
    options: Options,
) -> list[Cell]:
    """Fill the store. `pools` maps a pool's name to a function from an anchor to its recipe."""
    store.parent.mkdir(parents=True, exist_ok=True)
    known = {cell.key for cell in read_cells(store)}
    total = len(pools) * len(anchors) * len(settings)
    done = 0
    with store.open("a", encoding="utf-8") as stream:
        for pool, anchor in ((p, a) for p in pools for a in anchors):
            todo = [(s, seed) for s, seed in settings if (pool, anchor, s.name, seed) not in known]
            done += len(settings) - len(todo)
            for cell in _cells(pool, anchor, pools[pool](anchor), todo, store.parent, options):
                stream.write(json.dumps(asdict(cell)) + "\n")
                stream.flush()
                done += 1
                options.progress("grid", done, total)
    return read_cells(store)


def _cells(
    pool: str,
    anchor: str,
    recipe: Mapping[str, Any],
    todo: Iterable[tuple[Setting, int]],
    folder: Path,
    options: Options,
) -> Iterator[Cell]:
    """One anchor: made once, then repaired with every setting and scored."""
    work = folder / "work"
    merged: Path | None = None
    quiet = Options(threads=options.threads, overwrite=True)
    for setting, seed in todo:
        changed = _changed(recipe, setting, seed)
        if merged is None:
            merged = work / "anchor"
            run_dense(plan_dense(changed, quiet), merged, quiet)
        repaired = work / "repaired"
        RepairJob(changed, repaired, quiet, merged).repair()
        yield _cell(pool, anchor, setting, seed, changed, merged, repaired)
    shutil.rmtree(work, ignore_errors=True)


def _changed(recipe: Mapping[str, Any], setting: Setting, seed: int) -> Recipe:
    section = {**recipe["repair"], "guard": "off", **setting.repair, "seed": seed}
    return load_recipe({**recipe, "repair": section})


def _cell(
    pool: str, anchor: str, setting: Setting, seed: int, recipe: Recipe, merged: Path, out: Path
) -> Cell:
    assert recipe.repair is not None
    scorer = scorer_of(recipe, Options(), "evaluation")
    if scorer is None:
        raise ValueError("a grid needs a scorer that knows the evaluation split")
    experts = {name: scorer(path).scores for name, path in recipe.experts.items()}
    before, after = scorer(merged).scores, scorer(out).scores
    return Cell(
        pool, anchor, setting.name, seed, macro(before), macro(after),
        residual_gap(experts, before), residual_gap(experts, after), after,
    )  # fmt: skip
