"""What tables and figures both need of the results: sweeps, profiles, changes by metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from sigmerge.analysis.results import NotInStore, Results
from sigmerge.method.conflict import VIEWS


@dataclass(frozen=True)
class Skipped:
    label: str
    reason: str


def words(setting: str) -> str:
    """The name of a setting as people read it."""
    return setting.replace("_", " ")


SWEPT = {"c_min": "C_min", "c_max": "C_max", "scale": "λ"}


@dataclass(frozen=True)
class Sweep:
    """One constant on one pool: scores by value, the default among them."""

    pool: str
    anchors: str
    constant: str
    default: float
    values: Sequence[float]
    scores: Mapping[str, Sequence[float]]  # macro name or domain -> score at each value


def sweeps(results: Results) -> list[Sweep]:
    """The sweeps of the store. A run belongs to the constant in which it differs from default."""
    constants = {run["key"]: run["constants"] for run in results.signals("sweep", "default")}
    macro = results.variants("sweep").with_columns(domain=pl.lit(results.macro_name))
    points = pl.concat([macro, results.variants("sweep", by_domain=True).select(macro.columns)])
    normal = {
        (r["pool"], r["anchor"], r["anchor_seed"]): constants[r["run"]]
        for r in results.built_on_anchors("default").to_dicts()
    }
    found: dict[tuple[str, str], dict[float, dict[str, list[float]]]] = {}
    defaults: dict[tuple[str, str], float] = {}
    names: dict[str, list[str]] = {}
    for row in points.to_dicts():
        usual, used = normal[row["pool"], row["anchor"], row["anchor_seed"]], constants[row["run"]]
        changed = [c for c in SWEPT if c in used and used[c] != usual.get(c)]
        if len(changed) != 1 or changed[0] not in usual:
            continue
        place = (row["pool"], changed[0])
        defaults[place] = usual[changed[0]]
        names.setdefault(row["pool"], []).append(row["anchor"])
        by_value = found.setdefault(place, {})
        by_value.setdefault(used[changed[0]], {}).setdefault(row["domain"], []).append(row["after"])
        by_value.setdefault(usual[changed[0]], {}).setdefault(row["domain"], []).append(
            row["default"]
        )
    if not found:
        raise NotInStore("no run differs from the default in exactly one constant")
    return [
        _sweep(results, place, by_value, defaults[place], list(dict.fromkeys(names[place[0]])))
        for place, by_value in found.items()
    ]


def _sweep(
    results: Results,
    place: tuple[str, str],
    by_value: Mapping[float, Mapping[str, Sequence[float]]],
    default: float,
    anchors: Sequence[str],
) -> Sweep:
    values = sorted(by_value)
    scores = {
        name: [float(np.mean(by_value[value][name])) for value in values]
        for name in [results.macro_name, *results.domains]
        if all(name in by_value[value] for value in values)
    }
    label = anchors[0] if len(anchors) == 1 else f"{len(anchors)} anchors"
    return Sweep(place[0], label, place[1], default, values, scores)


def profiles(results: Results) -> dict[str, dict[str, Any]]:
    """The conflict profile of each pool: of its first default repair that has one."""
    found: dict[str, dict[str, Any]] = {}
    for run in results.signals("default"):
        if run["views"] and run["capacity"]:
            found.setdefault(run["pool"], run)
    if not found:
        raise NotInStore("no default repair has conflict views and a capacity profile")
    for run in found.values():
        run["views"] = {name: run["views"][name] for name in VIEWS if name in run["views"]}
    return {pool: found[pool] for pool in results.pools if pool in found}


def metric_changes(results: Results) -> pl.DataFrame:
    """Every metric of every main pair: before, after and gain."""
    name = pl.format("{} {}", "benchmark", "metric").alias("name")
    place = ["pool", "anchor", "anchor_seed", "domain", "benchmark", "metric"]
    runs = results.main["run"].to_list()
    after = results.metrics.filter(pl.col("run").is_in(runs)).select(*place, name, after="value")
    before = results.metrics.filter(pl.col("kind") == "anchor").select(*place, before="value")
    rows = after.join(before, on=place, how="inner", maintain_order="left")
    return rows.with_columns(gain=pl.col("after") - pl.col("before"))
