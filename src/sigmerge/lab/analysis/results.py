"""The results of an experiment as frames: what statistics, tables and figures are made from.

Made from the three frames of a store (`experiments/store.py`): `pools` (name, domains), `runs`
and `scores`. Domain scores are the unweighted mean of the headline metrics of the domain's
benchmarks; the macro score is the unweighted mean over domains; the gap is the paper's residual
expert gap to the strongest expert of the pool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.errors import MissingExtra, ScoreError
from sigmerge.lab.analysis.statistics import DECIMALS
from sigmerge.method.deficit import residual_gap

try:
    import polars as pl
except ImportError as missing:
    raise MissingExtra("The analysis of an experiment", ["polars"], ["lab"]) from missing

if TYPE_CHECKING:
    from polars import DataFrame

RUN_COLUMNS = ("pool", "kind", "method", "anchor", "anchor_seed", "setting", "seed")
"""Columns that name a run."""
PAIR = ("pool", "anchor", "anchor_seed")
"""Columns that name an anchor run."""


class NotInStore(Exception):
    """A table or a figure needs runs that the experiment did not make; the text says which."""


@dataclass(frozen=True)
class Results:
    pools_frame: DataFrame
    runs: DataFrame
    scores: DataFrame
    split: str = "evaluation"

    @cached_property
    def pools(self) -> list[str]:
        return self.pools_frame["name"].to_list()

    @cached_property
    def domains(self) -> list[str]:
        """Domains of all pools, in the order of the pools."""
        seen = (name for text in self.pools_frame["domains"] for name in json.loads(text))
        return list(dict.fromkeys(seen))

    @cached_property
    def macro_name(self) -> str:
        sizes = {len(json.loads(text)) for text in self.pools_frame["domains"]}
        return f"Macro-{sizes.pop()}" if len(sizes) == 1 else "Macro"

    def anchors(self, pool: str | None = None) -> list[str]:
        """Names of the anchors, in the order of the suite."""
        rows = self.runs.filter(pl.col("kind") == "anchor")
        if pool is not None:
            rows = rows.filter(pl.col("pool") == pool)
        return rows["anchor"].unique(maintain_order=True).to_list()

    @cached_property
    def metrics(self) -> DataFrame:
        """One row per run, benchmark and metric on the split, with the names of the run."""
        rows = self.scores.filter(pl.col("split") == self.split)
        return rows.join(self.runs.select("key", *RUN_COLUMNS), left_on="run", right_on="key")

    @cached_property
    def by_domain(self) -> DataFrame:
        """One row per run and domain: score, reference (strongest expert) and gap."""
        names = ["run", *RUN_COLUMNS]
        rows = (
            self.metrics.filter("headline")
            .group_by(*names, "domain", maintain_order=True)
            .agg(score=pl.col("value").mean())
        )
        best = (
            rows.filter(pl.col("kind") == "expert")
            .group_by("pool", "domain")
            .agg(reference=pl.col("score").max())
        )
        rows = rows.join(best, on=["pool", "domain"], how="left", maintain_order="left")
        gap = residual_gap(rows["reference"].to_numpy(), rows["score"].to_numpy())
        return rows.with_columns(gap=pl.Series(gap, dtype=pl.Float64).fill_nan(None))

    @cached_property
    def checkpoints(self) -> DataFrame:
        """One row per scored run: macro score and mean gap (null without experts)."""
        return self.by_domain.group_by("run", *RUN_COLUMNS, maintain_order=True).agg(
            macro=pl.col("score").mean().round(DECIMALS),
            gap=pl.when(pl.col("gap").null_count() == 0).then(pl.col("gap").mean()).first(),
        )

    def built_on_anchors(self, *kinds: str, by_domain: bool = False) -> DataFrame:
        """Runs of these kinds beside the anchor run each was built on.

        The anchor's columns are `before` and `gap_before`, the run's `after` and `gap_after`.
        """
        source = self.by_domain if by_domain else self.checkpoints
        score, extra = ("score", ["domain"]) if by_domain else ("macro", [])
        anchors = source.filter(pl.col("kind") == "anchor").select(
            *PAIR, *extra, before=score, gap_before="gap"
        )
        made = source.filter(pl.col("kind").is_in(kinds)).rename(
            {score: "after", "gap": "gap_after"}
        )
        joined = made.join(anchors, on=[*PAIR, *extra], how="inner", maintain_order="left")
        return joined.with_columns(gain=(pl.col("after") - pl.col("before")).round(DECIMALS))

    @cached_property
    def pairs(self) -> DataFrame:
        """Every default repair beside its anchor, all seeds of the anchors."""
        return self._needed(self.built_on_anchors("default"), "no anchor with its default repair")

    @cached_property
    def main(self) -> DataFrame:
        """The pairs of the main tables: the first seed of each anchor."""
        return _first_seed(self.pairs)

    @cached_property
    def main_by_domain(self) -> DataFrame:
        """The main pairs, one row per domain."""
        rows = _first_seed(self.built_on_anchors("default", by_domain=True))
        return self._needed(rows, "no anchor with its default repair")

    @cached_property
    def baselines(self) -> DataFrame:
        """Baselines, the first seed of each."""
        rows = self.checkpoints.filter(pl.col("kind") == "baseline")
        first = pl.col("seed") == pl.col("seed").min().over("pool", "method")
        return self._needed(rows.filter(first), "no baseline")

    def variants(self, *kinds: str, by_domain: bool = False) -> DataFrame:
        """Runs of these kinds with their anchor, each with the score of the default repair."""
        rows = self.built_on_anchors(*kinds, by_domain=by_domain)
        self._needed(rows, f"no run of kind {' or '.join(kinds)}")
        on = [*PAIR, "domain"] if by_domain else [*PAIR]
        default = self.built_on_anchors("default", by_domain=by_domain)
        default = default.select(*on, default="after")
        joined = rows.join(default, on=on, how="inner", maintain_order="left")
        return self._needed(joined, "no default repair beside the variants")

    def summary(self, *kinds: str, by_domain: bool = False) -> DataFrame:
        """Each setting of these kinds per pool, over the anchors it was run on and its seeds.

        Columns: pool, anchors (their name, or how many), setting, seeds, and the means of
        `before`, `after` and `default`; `values` lists `after` by seed.
        """
        rows = self.variants(*kinds, by_domain=by_domain)
        extra = ["domain"] if by_domain else []
        per_seed = rows.group_by("pool", "setting", "seed", *extra, maintain_order=True).agg(
            pl.col("before", "after", "default").mean(),
            names=pl.col("anchor").unique(maintain_order=True),
        )
        one, many = pl.col("names").list.first(), pl.col("names").list.len()
        label = pl.when(many == 1).then(one).otherwise(pl.format("{} anchors", many))
        return (
            per_seed.with_columns(anchors=label)
            .group_by("pool", "anchors", "setting", *extra, maintain_order=True)
            .agg(
                pl.col("before", "after", "default").mean().round(DECIMALS),
                seeds=pl.len(),
                values=pl.col("after"),
            )
        )

    def signals(self, *kinds: str) -> list[dict[str, Any]]:
        """Runs of these kinds as mappings, their JSON columns decoded."""
        rows = self.runs.filter(pl.col("kind").is_in(kinds)).to_dicts()
        columns = ("constants", "views", "conflict", "capacity", "deficit", "share", "claim_order")
        return [{**row, **{name: json.loads(row[name]) for name in columns}} for row in rows]

    @staticmethod
    def _needed(rows: DataFrame, otherwise: str) -> DataFrame:
        if rows.is_empty():
            raise NotInStore(f"the store holds {otherwise}")
        return rows


def results(
    pools: DataFrame, runs: DataFrame, scores: DataFrame, split: str = "evaluation"
) -> Results:
    """Check that the split was scored, and give access to everything derived from it."""
    known = scores["split"].unique().sort().to_list()
    if not known:
        raise ScoreError("The store holds no scored run yet.")
    if split not in known:
        raise ScoreError(
            f"No run was scored on the split {split!r}; there are: {', '.join(known)}."
        )
    return Results(pools, runs, scores, split)


def _first_seed(pairs: DataFrame) -> DataFrame:
    first = pl.col("anchor_seed") == pl.col("anchor_seed").min().over("pool", "anchor")
    return pairs.filter(first)


def matrix(
    frame: DataFrame, rows: str, columns: str, value: str, order: Mapping[str, list[str]]
) -> np.ndarray:
    """A value of a frame by two of its columns, NaN where there is none."""
    table = np.full((len(order[rows]), len(order[columns])), np.nan)
    for row, column, number in frame.select(rows, columns, value).iter_rows():
        if row in order[rows] and column in order[columns] and number is not None:
            table[order[rows].index(row), order[columns].index(column)] = number
    return table
