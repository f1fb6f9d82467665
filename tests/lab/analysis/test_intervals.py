"""Paired intervals: against the stored scores, a plain loop, and the normal approximation."""

from __future__ import annotations

import json
import math

import numpy as np
import polars as pl
import pytest

from sigmerge.lab.analysis.derived import words
from sigmerge.lab.analysis.intervals import (
    Comparison,
    Gain,
    gains,
    item_scores,
    paired_intervals,
    variant_intervals,
)
from sigmerge.lab.analysis.results import NotInStore, Results
from tests.lab.analysis.experiment import ANCHORS, DOMAINS, POOLS


def _domain_scores(results: Results, run: str) -> dict[str, float]:
    rows = results.by_domain.filter(pl.col("run") == run)
    return dict(zip(rows["domain"], rows["score"], strict=True))


def _pair(results: Results) -> Comparison:
    row = results.main.filter(pl.col("anchor") == "TIES").to_dicts()[0]
    anchors = results.checkpoints.filter(
        (pl.col("kind") == "anchor") & (pl.col("pool") == row["pool"])
    )
    [before] = anchors.filter(pl.col("anchor") == "TIES")["run"].to_list()
    return Comparison((row["pool"], "TIES"), (row["run"],), before)


def test_differences_are_those_of_the_stored_scores(results: Results) -> None:
    pair = _pair(results)
    [(macro, by_domain)] = gains(results, [pair])
    after, before = (_domain_scores(results, run) for run in (*pair.after, pair.before))
    expected = {d: after[d] - before[d] for d in DOMAINS}
    found = {d: gain.difference for d, gain in by_domain.items()}
    assert found == pytest.approx(expected, abs=1e-6)
    assert macro.difference == pytest.approx(np.mean(list(expected.values())), abs=1e-6)


def test_pairs_of_a_table_have_their_own_anchors(results: Results) -> None:
    """Every row against the scores in the store, of the first seed where an anchor has several."""
    [table] = paired_intervals(results)
    scores = results.by_domain.filter(pl.col("anchor_seed") == 0)
    for pool, anchor, macro, *by_domain in table.rows:
        here = scores.filter((pl.col("pool") == pool) & (pl.col("anchor") == anchor))
        gained = []
        for domain, cell in zip(DOMAINS, by_domain, strict=True):
            [before], [after] = (
                here.filter((pl.col("domain") == domain) & (pl.col("kind") == kind))["score"]
                for kind in ("anchor", "default")
            )
            gained.append(after - before)
            assert _middle(cell) == pytest.approx(100 * gained[-1], abs=0.006)
        assert _middle(macro) == pytest.approx(100 * np.mean(gained), abs=0.006)


def _middle(cell: object) -> float:
    return float(str(cell).split(" [")[0].replace("−", "-"))


def test_columns_have_the_names_of_their_domains(results: Results) -> None:
    """Pools may name domains in another order than their benchmarks, and may lack some."""
    [known] = paired_intervals(results)
    [first, second, *_] = POOLS
    orders = {first: list(reversed(DOMAINS)), second: ["safety", "math"]}
    pools = results.pools_frame.filter(pl.col("name").is_in(orders)).with_columns(
        domains=pl.col("name").replace_strict({p: json.dumps(d) for p, d in orders.items()})
    )
    fewer = results.runs.filter(pl.col("pool") == second)["key"]
    kept = ~pl.col("run").is_in(fewer.to_list()) | pl.col("domain").is_in(orders[second])
    [table] = paired_intervals(Results(pools, results.runs, results.scores.filter(kept)))
    names = [column.title for column in table.columns]
    assert names[3:] == orders[first]
    plain = [column.title for column in known.columns]
    for old, new in zip(known.rows, table.rows, strict=True):
        was, now = dict(zip(plain, old, strict=True)), dict(zip(names, new, strict=True))
        for domain in DOMAINS:
            if domain in orders[str(old[0])]:
                assert _middle(now[domain]) == _middle(was[domain])
            else:
                assert now[domain] is None


def test_an_interval_is_as_wide_as_the_paired_error_says(results: Results) -> None:
    """The mean of many independent differences is nearly normal: ± 1.96 standard errors."""
    pair = _pair(results)
    [(macro, by_domain)] = gains(results, [pair])
    after, before = (item_scores(results, run) for run in (*pair.after, pair.before))
    errors = []
    for domain in DOMAINS:
        spread = [np.var(a - before[domain][b]) / a.size for b, a in after[domain].items()]
        errors.append(math.sqrt(sum(spread)) / len(spread))
    whole = math.sqrt(sum(error**2 for error in errors)) / len(errors)
    each = [macro, *(by_domain[domain] for domain in DOMAINS)]
    for gain, error in zip(each, [whole, *errors], strict=True):
        assert gain.high - gain.difference == pytest.approx(1.96 * error, rel=0.12)
        assert gain.difference - gain.low == pytest.approx(1.96 * error, rel=0.12)


def test_equal_items_leave_no_room(results: Results) -> None:
    run = _pair(results).before
    [found] = gains(results, [Comparison(("a",), (run, run), run)])
    none = Gain(0.0, 0.0, 0.0)
    assert found == (none, dict.fromkeys(DOMAINS, none))


def test_the_tables_have_every_pair_and_every_variant(results: Results) -> None:
    [pairs] = paired_intervals(results)
    assert [tuple(row[:2]) for row in pairs.rows] == [(p, a) for p in POOLS[:2] for a in ANCHORS]
    gain = results.main["gain"][0]
    assert str(pairs.rows[0][2]).startswith(f"{100 * gain:+.2f}".replace("-", "−") + " [")
    [variants] = variant_intervals(results)
    settings = {str(row[2]) for row in variants.rows}
    assert {"uniform capacity", "random mask", "order reverse"} <= settings
    named = [tuple(row[:3]) for row in variants.rows]
    assert len(named) == len(set(named)), "seeds of a setting are one row"


def test_seeds_of_a_control_are_averaged(results: Results) -> None:
    """Every setting of several seeds, where the first seed alone would show another number."""
    [variants] = variant_intervals(results)
    shown = {(row[0], row[2]): _middle(row[3]) for row in variants.rows}
    summary = results.summary("control", "ablation", "order").filter(pl.col("seeds") > 1)
    alone = 0
    for row in summary.to_dicts():
        mean, first = (100 * (x - row["default"]) for x in (row["after"], row["values"][0]))
        assert shown[row["pool"], words(row["setting"])] == pytest.approx(mean, abs=0.006)
        alone += abs(mean - first) > 0.02
    assert alone > 3


def test_a_store_without_scores_of_items_has_no_intervals(results: Results) -> None:
    bare = Results(
        results.pools_frame,
        results.runs,
        results.scores.with_columns(item_scores=pl.lit(b"")),
    )
    with pytest.raises(NotInStore, match="single items"):
        paired_intervals(bare)
