"""Paired bootstrap intervals of gains, from the scores of single items.

The items of every benchmark are drawn again with replacement, the same ones for both runs of a pair
and for all pairs of a pool. An interval says what other items of the same benchmarks might have
shown; it says nothing about another training of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sigmerge.lab.analysis.derived import words
from sigmerge.lab.analysis.results import PAIR, NotInStore, Results
from sigmerge.pages.table import Cell, Column, Table, printed

DRAWS = 2_000
LEVEL = 0.95
COMPARED = ("ablation", "control", "view", "order", "ours")

ItemScores = dict[str, dict[str, NDArray[np.float64]]]
"""By domain and benchmark, the items' scores."""


class Gain(NamedTuple):
    """A difference of two scores, and the interval that resampling gives it."""

    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        middle, low, high = (printed(value, "points") for value in self)
        return f"{middle} [{low}, {high}]"


class Comparison(NamedTuple):
    """A comparison: the mean over `after` (seeds of one setting) against one run."""

    names: tuple[str, ...]
    after: tuple[str, ...]
    before: str


def gains(results: Results, pairs: Sequence[Comparison]) -> list[tuple[Gain, dict[str, Gain]]]:
    """Of every pair of one pool: the gain of the macro score, and those of its domains."""
    items = {run: item_scores(results, run) for pair in pairs for run in (*pair.after, pair.before)}
    domains = items[pairs[0].before]
    sizes = [scores.size for benchmarks in domains.values() for scores in benchmarks.values()]
    draws = iter(_draws(tuple(sizes)))
    found, drawn = [], []
    for domain, benchmarks in domains.items():
        mean, means = 0.0, 0.0
        for name, scores in benchmarks.items():
            differences = np.stack(
                [
                    np.mean([items[run][domain][name] for run in pair.after], axis=0)
                    - items[pair.before][domain][name]
                    for pair in pairs
                ],
                axis=1,
            )
            mean = mean + differences.mean(axis=0) / len(benchmarks)
            means = means + next(draws) @ differences / scores.size / len(benchmarks)
        found.append(mean)
        drawn.append(means)
    middle = np.stack([np.mean(found, axis=0), *found])
    every = np.stack([np.mean(drawn, axis=0), *drawn])
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(every, [tail, 100 - tail], axis=1)
    of_pairs = np.stack([middle, low, high], axis=2).swapaxes(0, 1)
    return [
        (macro, dict(zip(domains, by_domain, strict=True)))
        for macro, *by_domain in ([Gain(*row) for row in each] for each in of_pairs.tolist())
    ]


@lru_cache(maxsize=2)
def _draws(sizes: tuple[int, ...]) -> list[NDArray[np.uint32]]:
    """By benchmark, how often each of its items is drawn: the same for all tables and pools."""
    generator = np.random.default_rng(0)
    return [
        generator.multinomial(size, np.full(size, 1 / size), DRAWS).astype(np.uint32)
        for size in sizes
    ]


def item_scores(results: Results, run: str) -> ItemScores:
    """The scores of a run's items on the split."""
    rows = results.scores.filter(
        (pl.col("run") == run) & (pl.col("split") == results.split) & pl.col("headline")
    )
    found: ItemScores = {}
    for domain, name, stored in rows.select("domain", "benchmark", "item_scores").iter_rows():
        if not stored:
            raise NotInStore("the store holds no scores of single items")
        found.setdefault(domain, {})[name] = np.frombuffer(stored, "<f4").astype(np.float64)
    return found


def paired_intervals(results: Results) -> list[Table]:
    """Every default repair against its anchor."""
    anchors = results.checkpoints.filter(pl.col("kind") == "anchor").select(*PAIR, before="run")
    joined = results.main.join(anchors, on=PAIR, how="inner", maintain_order="left")
    pairs = [
        Comparison((row["pool"], row["anchor"]), (row["run"],), row["before_right"])
        for row in joined.to_dicts()
    ]
    caption = f"Gain of the repair over its anchor, with {_interval()}"
    return [_table("paired_intervals", caption, results, ("pool", "anchor"), pairs)]


def variant_intervals(results: Results) -> list[Table]:
    """Every variant of the repair against the default one; seeds of a control are averaged."""
    default = results.pairs.select(*PAIR, default_run="run")
    rows = results.variants(*COMPARED).join(default, on=PAIR, maintain_order="left")
    named = rows.group_by("pool", "anchor", "setting", "default_run", maintain_order=True)
    pairs = [
        Comparison((pool, anchor, words(setting)), tuple(runs), before)
        for pool, anchor, setting, before, runs in named.agg("run").iter_rows()
    ]
    caption = f"Variants of the repair against the default one, with {_interval()}"
    return [_table("variant_intervals", caption, results, ("pool", "anchor", "variant"), pairs)]


def _interval() -> str:
    return f"{LEVEL:.0%} intervals of a paired bootstrap over items ({DRAWS:,} resamples)"


def _table(
    label: str, caption: str, results: Results, names: Sequence[str], pairs: Sequence[Comparison]
) -> Table:
    rows: list[list[Cell]] = []
    for pool in results.pools:
        here = [pair for pair in pairs if pair.names[0] == pool]
        if here:
            for pair, (macro, by_domain) in zip(here, gains(results, here), strict=True):
                each = [str(by_domain[d]) if d in by_domain else None for d in results.domains]
                rows.append([*pair.names, str(macro), *each])
    columns = [Column(name) for name in (*names, results.macro_name, *results.domains)]
    return Table(columns, rows, caption, label)
