"""The paired table against numbers worked out by hand."""

from __future__ import annotations

import pytest

from sigmerge.errors import ScoreError
from sigmerge.pages import paired
from sigmerge.records import PairedScores

EXPERTS = {
    "math": {"math": 0.90, "coding": 0.40, "safety": 0.50},
    "coding": {"math": 0.50, "coding": 0.80, "safety": 0.75},
    "safety": {"math": 0.30, "coding": 0.30, "safety": 0.70},
}
ANCHOR = {"math": 0.60, "coding": 0.60, "safety": 0.75}
REPAIRED = {"math": 0.80, "coding": 0.70, "safety": 0.90}
SCORES = PairedScores(experts=EXPERTS, anchor=ANCHOR, repaired=REPAIRED)


def test_paired_row():
    row = paired.paired_row("TIES", SCORES)
    assert row.anchor == pytest.approx(0.65)
    assert row.repaired == pytest.approx(0.80)
    assert row.gain == pytest.approx(0.15)
    assert row.gap_before == pytest.approx((0.30 + 0.20 + 0.00) / 3)
    # A domain above its strongest expert has no gap, not a negative one.
    assert row.gap_after == pytest.approx((0.10 + 0.10 + 0.00) / 3)


def test_parts_may_be_missing():
    row = paired.paired_row("linear", PairedScores(anchor=ANCHOR))
    assert row.anchor == pytest.approx(0.65)
    assert (row.repaired, row.gain, row.gap_before, row.gap_after) == (None,) * 4
    assert paired.cells(row) == ("linear", "65.00", "–", "–", "–", "–")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "TIES has no scores"),
        ({"anchor": {"math": 0.5}, "repaired": {"coding": 0.5}}, "coding, math"),
        ({"experts": {"math": {"math": 0.9}}, "anchor": {"law": 0.5}}, "the domain law"),
    ],
)
def test_scores_that_do_not_fit(scores, message):
    with pytest.raises(ScoreError, match=message):
        paired.paired_row("TIES", PairedScores(**scores))


def test_mean_row_leaves_a_column_with_a_hole_open():
    full, bare = (
        paired.paired_row("a", SCORES),
        paired.paired_row("b", PairedScores(anchor=REPAIRED)),
    )
    mean = paired.mean_row([full, bare])
    assert mean.anchor == pytest.approx((0.65 + 0.80) / 2)
    assert mean.repaired is None and mean.gain is None


def test_terminal():
    hurt = PairedScores(experts=EXPERTS, anchor=REPAIRED, repaired=ANCHOR)
    rows = [paired.paired_row("TIES", SCORES), paired.paired_row("a|b", hurt)]
    assert paired.plain(rows) == [
        "anchor  Macro-3  + repair    gain  residual gap  after repair",
        "─────────────────────────────────────────────────────────────",
        "TIES      65.00     80.00  +15.00         16.67          6.67",
        "a|b       80.00     65.00  −15.00          6.67         16.67",
        "─────────────────────────────────────────────────────────────",
        "mean      72.50     72.50   +0.00         11.67         11.67",
    ]
    assert len(paired.plain(rows[:1])) == 3
