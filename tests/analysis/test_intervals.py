"""Paired intervals: against the stored scores, a plain loop, and the normal approximation."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest

from sigmerge.analysis.intervals import (
    Comparison,
    Gain,
    gains,
    item_scores,
    paired_intervals,
    variant_intervals,
)
from sigmerge.analysis.results import NotInStore, Results
from tests.analysis.experiment import ANCHORS, DOMAINS, POOLS


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
    [[macro, *by_domain]] = gains(results, [pair])
    after, before = (_domain_scores(results, run) for run in (*pair.after, pair.before))
    expected = [after[d] - before[d] for d in DOMAINS]
    assert [gain.difference for gain in by_domain] == pytest.approx(expected, abs=1e-6)
    assert macro.difference == pytest.approx(np.mean(expected), abs=1e-6)


def test_an_interval_is_as_wide_as_the_paired_error_says(results: Results) -> None:
    """The mean of many independent differences is nearly normal: ± 1.96 standard errors."""
    pair = _pair(results)
    [[macro, *by_domain]] = gains(results, [pair])
    after, before = (item_scores(results, run) for run in (*pair.after, pair.before))
    errors = []
    for domain in DOMAINS:
        spread = [
            np.var(a - b) / a.size for a, b in zip(after[domain], before[domain], strict=True)
        ]
        errors.append(math.sqrt(sum(spread)) / len(spread))
    whole = math.sqrt(sum(error**2 for error in errors)) / len(errors)
    for gain, error in zip([macro, *by_domain], [whole, *errors], strict=True):
        assert gain.high - gain.difference == pytest.approx(1.96 * error, rel=0.12)
        assert gain.difference - gain.low == pytest.approx(1.96 * error, rel=0.12)


def test_equal_items_leave_no_room(results: Results) -> None:
    run = _pair(results).before
    [found] = gains(results, [Comparison(("a",), (run, run), run)])
    assert found == [Gain(0.0, 0.0, 0.0)] * (1 + len(DOMAINS))


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
    [variants] = variant_intervals(results)
    summary = results.summary("control").filter(
        (pl.col("setting") == "random_mask") & (pl.col("pool") == POOLS[0])
    )
    [row] = summary.to_dicts()
    [shown] = [
        str(cells[3])
        for cells in variants.rows
        if cells[0] == POOLS[0] and cells[2] == "random mask"
    ]
    mean = 100 * (row["after"] - row["default"])
    assert shown.startswith(f"{mean:+.2f}".replace("-", "−") + " [")


def test_a_store_without_scores_of_items_has_no_intervals(results: Results) -> None:
    bare = Results(
        results.pools_frame,
        results.runs,
        results.scores.with_columns(item_scores=pl.lit(b"")),
    )
    with pytest.raises(NotInStore, match="single items"):
        paired_intervals(bare)
