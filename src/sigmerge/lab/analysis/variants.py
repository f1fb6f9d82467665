"""The tables of the repair's variants: ablations, controls, views, claim orders, sweeps, and ours.

A builder per table, as in tables.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from sigmerge.lab.analysis import statistics
from sigmerge.lab.analysis.derived import SWEPT, sweeps, words
from sigmerge.lab.analysis.results import NotInStore, Results
from sigmerge.pages.table import Cell, Column, Table


def _variant_table(results: Results, label: str, caption: str, kinds: Sequence[str]) -> Table:
    """Settings beside the default of the same pool and anchors, in total and by domain."""
    macro, parts = results.summary(*kinds), results.summary(*kinds, by_domain=True)
    rows: list[list[Cell]] = []
    for (pool, anchors), group in macro.group_by("pool", "anchors", maintain_order=True):
        here = parts.filter(pl.col("pool") == pool, pl.col("anchors") == anchors)
        first = group["setting"][0]
        default = {
            r["domain"]: r["default"] for r in here.filter(pl.col("setting") == first).to_dicts()
        }
        rows.append(
            [
                pool,
                anchors,
                "default",
                group["default"][0],
                0.0,
                None,
                *(default.get(d) for d in results.domains),
            ]
        )
        for row in group.to_dicts():
            scores = here.filter(pl.col("setting") == row["setting"])
            by = dict(zip(scores["domain"], scores["after"], strict=True))
            sd = statistics.seed_summary(row["values"]).std if row["seeds"] > 1 else None
            rows.append(
                [
                    pool,
                    anchors,
                    words(row["setting"]),
                    row["after"],
                    row["after"] - row["default"],
                    sd,
                    *(by.get(d) for d in results.domains),
                ]
            )
    columns = [
        Column("pool"),
        Column("anchor"),
        Column("variant"),
        Column(results.macro_name, "percent"),
        Column("Δ", "points"),
        Column("sd", "percent"),
        *(Column(d, "percent") for d in results.domains),
    ]
    return Table(columns, rows, caption, label)


def ablation(results: Results) -> list[Table]:
    full = _variant_table(results, "ablation_full", "Component ablations by domain", ["ablation"])
    short = Table(
        full.columns[:5], [row[:5] for row in full.rows], "Component ablations", "ablation"
    )
    return [short, full]


def ours(results: Results) -> list[Table]:
    return [_variant_table(results, "ours", "Settings beyond the paper", ["ours"])]


def directional(results: Results) -> list[Table]:
    rows: list[list[Cell]] = []
    for row in results.summary("control").to_dicts():
        part = [
            statistics.retained_fraction(v, row["before"], row["default"]) for v in row["values"]
        ]
        sd = statistics.seed_summary(row["values"]).std if row["seeds"] > 1 else None
        rows.append(
            [
                row["pool"],
                row["anchors"],
                words(row["setting"]),
                row["after"],
                sd,
                row["after"] - row["default"],
                statistics.retained_fraction(row["after"], row["before"], row["default"]),
                *statistics.t_interval(part),
                row["seeds"],
            ]
        )
    columns = (
        Column("pool"),
        Column("anchor"),
        Column("control"),
        Column(results.macro_name, "percent"),
        Column("sd", "percent"),
        Column("Δ", "points"),
        Column("retained %", "share"),
        Column("95 % from", "share"),
        Column("to", "share"),
        Column("seeds", "count"),
    )
    return [
        Table(
            columns,
            rows,
            "Directional controls: what each retains of the paired gain",
            "directional_full",
        )
    ]


def single_view(results: Results) -> list[Table]:
    views = results.summary("view").to_dicts()
    uniform = {(r["pool"], r["anchors"]): r["after"] for r in _uniform(results)}
    rows: list[list[Cell]] = []
    for place in dict.fromkeys((r["pool"], r["anchors"]) for r in views):
        here = [r for r in views if (r["pool"], r["anchors"]) == place]
        floor, whole = uniform.get(place), here[0]["default"]

        def part(score: float, floor: float | None = floor, whole: float = whole) -> float | None:
            return None if floor is None else statistics.retained_fraction(score, floor, whole)

        rows.append([*place, "all views", whole, 0.0, part(whole)])
        rows += [
            [*place, words(r["setting"]), r["after"], r["after"] - whole, part(r["after"])]
            for r in here
        ]
        if floor is not None:
            rows.append([*place, "uniform capacity", floor, floor - whole, part(floor)])
    columns = (
        Column("pool"),
        Column("anchor"),
        Column("capacity from"),
        Column(results.macro_name, "percent"),
        Column("Δ", "points"),
        Column("recovered %", "share"),
    )
    return [Table(columns, rows, "Capacity from a single view", "single_view")]


def _uniform(results: Results) -> list[dict[str, Any]]:
    """The uniform-capacity ablation: what a capacity profile is measured against."""
    try:
        rows = results.summary("ablation")
    except NotInStore:
        return []
    return rows.filter(pl.col("setting") == "uniform_capacity").to_dicts()


def order(results: Results) -> list[Table]:
    rows: list[list[Cell]] = []
    for row in results.summary("order").to_dicts():
        kept = statistics.retained_fraction(row["after"], row["before"], row["default"])
        span = float(np.ptp(row["values"])) if row["seeds"] > 1 else None
        rows.append(
            [
                row["pool"],
                row["anchors"],
                words(row["setting"]),
                row["default"],
                row["after"],
                1 - kept,
                span,
            ]
        )
    columns = (
        Column("pool"),
        Column("anchor"),
        Column("claim order"),
        Column("default", "percent"),
        Column(results.macro_name, "percent"),
        Column("cost in % of the gain", "share"),
        Column("spread over seeds", "percent"),
    )
    return [Table(columns, rows, "Claim order", "order")]


def sensitivity(results: Results) -> list[Table]:
    tables = []
    found = sweeps(results)
    for k, pool in enumerate(results.pools):
        here = [sweep for sweep in found if sweep.pool == pool]
        rows: list[list[Cell]] = []
        for sweep in here:
            macro = sweep.scores[results.macro_name]
            usual = macro[sweep.values.index(sweep.default)]
            for i, value in enumerate(sweep.values):
                star = " (default)" if value == sweep.default else ""
                rows.append(
                    [
                        f"{SWEPT[sweep.constant]} = {value:g}{star}",
                        macro[i],
                        macro[i] - usual,
                        *(
                            sweep.scores[d][i] if d in sweep.scores else None
                            for d in results.domains
                        ),
                    ]
                )
        if rows:
            columns = [
                Column("constant"),
                Column(results.macro_name, "percent"),
                Column("Δ", "points"),
                *(Column(d, "percent") for d in results.domains),
            ]
            caption = f"Sensitivity to the constants: {pool}, {here[0].anchors}"
            tables.append(Table(columns, rows, caption, f"sens_p{k}"))
    return tables
