"""Values that tables and figures share: sweeps, profiles, changes by metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from sigmerge.lab.analysis.results import PAIR, NotInStore, Results
from sigmerge.lab.analysis.statistics import DECIMALS, anchor_statistics, share_order, share_shift
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

    def best(self, name: str) -> float:
        """The value with the highest score; the default where no other is above it."""
        score = dict(zip(self.values, self.scores[name], strict=True))
        return max(self.values, key=lambda value: (score[value], value == self.default))


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
        name: [round(float(np.mean(by_value[value][name])), DECIMALS) for value in values]
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


def cells(results: Results) -> list[dict[str, float]]:
    """All methods within each pool-domain cell; ours is the pool's best repaired checkpoint."""
    best = results.main.sort("after", descending=True, maintain_order=True).group_by("pool").first()
    runs = {*best["run"], *results.baselines["run"]}
    chosen = results.by_domain.filter(pl.col("run").is_in(runs))
    found = [
        dict(zip(cell["method"], cell["score"], strict=True))
        for _, cell in chosen.group_by("pool", "domain", maintain_order=True)
    ]
    methods = set(chosen["method"])
    whole = [cell for cell in found if set(cell) == methods]
    if not whole:
        raise NotInStore("no pool-domain cell has scores of all methods")
    return whole


def known_before(results: Results) -> pl.DataFrame:
    """One row per main pair: the nine statistics of its anchor, and what the repair made of it."""
    known = results.main_by_domain.drop_nulls("gap_before")
    rows = []
    for (pool, anchor), cell in known.group_by("pool", "anchor", maintain_order=True):
        nine = anchor_statistics(cell["before"], cell["gap_before"])
        made = {
            "gain": cell["gain"].mean(),
            "score after": cell["after"].mean(),
            "gap after": cell["gap_after"].mean(),
        }
        rows.append({"pool": pool, "anchor": anchor, **nine, **made})
    if len(rows) < 3:
        raise NotInStore("fewer than three anchors have scores of experts beside them")
    return pl.DataFrame(rows)


@dataclass(frozen=True)
class MovedShares:
    """The shares of an anchor under another partition, against those of the primary one."""

    pool: str
    anchor: str
    anchor_seed: int
    partition: str
    move: float
    same_order: bool


def moved_shares(results: Results) -> list[MovedShares]:
    """Every anchor run under every other partition."""
    primary = {
        (run["pool"], run["anchor"], run["anchor_seed"]): run["share"]
        for run in results.signals("default")
    }
    found = []
    for run in results.signals("partition"):
        pool, anchor, seed, other = (run[key] for key in (*PAIR, "share"))
        share = primary.get((pool, anchor, seed))
        if share and other:
            same, move = share_order(share) == share_order(other), share_shift(share, other)
            found.append(MovedShares(pool, anchor, seed, run["setting"], move, same))
    if not found:
        raise NotInStore("the store holds no deficits under another partition")
    return found
