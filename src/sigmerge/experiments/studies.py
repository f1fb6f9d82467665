"""`sigmerge nano study` and `compare`: the paper's tables on pools of the embedded kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from sigmerge.errors import PoolError
from sigmerge.experiments.compare import Bench, Row
from sigmerge.experiments.compare import compare as compare_methods
from sigmerge.experiments.compare import markdown as method_tables
from sigmerge.experiments.grid import OURS, controls, run_grid
from sigmerge.experiments.summary import markdown
from sigmerge.jobs.demo import ANCHORS
from sigmerge.jobs.options import Options
from sigmerge.nano.facts import DOMAINS
from sigmerge.nano.files import MEMBERS, PROBE, RECIPES, load_items

BASELINES = ("cabs", "cat", "lines", "lot", "merge3")


def study(
    pools: Sequence[Path], anchors: Sequence[str], out: Path, seeds: int, options: Options
) -> dict[str, Any]:
    """Every anchor × every variant of the paper and of ours, on every pool; two tables."""
    for pool in pools:
        if missing := [name for name in MEMBERS if not (pool / name / "config.json").exists()]:
            raise PoolError(f"{pool}: no nano pool; {', '.join(missing)} missing.")
    settings = [*controls(seeds), *((setting, 0) for setting in OURS)]
    named = {pool.resolve().name: _recipes(pool.resolve()) for pool in pools}
    cells = run_grid(named, anchors, settings, out / "cells.jsonl", options)
    (out / "study.md").write_text(markdown(cells), encoding="utf-8")
    return {"cells": len(cells), "table": markdown(cells), "out": str(out / "study.md")}


def compare(pools: Sequence[Path], out: Path, options: Options) -> dict[str, Any]:
    """The seven anchors, each with the repair, and the five baselines; two tables of all pools."""
    each = [_compare(pool.resolve(), out / pool.resolve().name, options) for pool in pools]
    table = method_tables(each)
    (out / "methods.md").write_text(table, encoding="utf-8")
    return {"table": table, "out": str(out / "methods.md")}


def _compare(pool: Path, out: Path, options: Options) -> list[Row]:
    recipes = _recipes(pool)
    labelled = sum(len(load_items("calibration", domain, pool)) for domain in DOMAINS)
    probes = len((pool / PROBE).read_text(encoding="utf-8").splitlines())
    bench = Bench(out, labelled, probes, replace(options, overwrite=True))
    methods = {name: recipes(name) for name in (*ANCHORS, *BASELINES)}
    return compare_methods(bench, methods, ANCHORS)


def _recipes(pool: Path) -> Callable[[str], Mapping[str, Any]]:
    """The shipped recipes, with their paths moved to another pool."""

    def recipe(anchor: str) -> Mapping[str, Any]:
        text = (RECIPES / f"{anchor}.yaml").read_text(encoding="utf-8")
        shipped: dict[str, Any] = yaml.safe_load(text.replace("../pool/", f"{pool}/"))
        shipped["repair"]["evaluate"] = {"suite": "nano", "pool": str(pool)}
        return shipped

    return recipe
