"""The paper's statements from the paper's tables."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from research.published.data import POOLS, PublishedTables, labels, table
from research.published.fractions import (
    fit,
    fraction_tests,
    fractions_of,
    together,
)
from research.published.ledger import Ledger
from research.published.page import markdown
from research.published.statements import PrintedStatement, recompute

from sigmerge.lab.analysis import statistics

PAGE = Path(__file__).parents[2] / "docs/results/published.md"


@pytest.fixture(scope="module")
def statements() -> list[PrintedStatement]:
    return recompute()


def one(statements: list[PrintedStatement], start: str) -> PrintedStatement:
    (found,) = [s for s in statements if s.text.startswith(start)]
    return found


@pytest.mark.parametrize(
    ("start", "computed"),
    [
        ("pairs that improve", "21 of 21"),
        ("mean paired gain", "+6.74"),
        ("mean relative gain", "15.0%"),
        ("relative gain per pool", "14.9%, 10.1%, 19.9%"),
        ("two-sided exact Wilcoxon", "9.5e-7"),
        ("average rank over the 15", "1.67"),
        ("first places in the 15 cells", "11 of 15"),
        ("checkpoint-baseline pairs won", "74 of 105"),
        ("within-pool anchor pairs", "56 of 63"),
        ("strongest anchor gives up on average", "0.32"),
        ("the gap over all pools", "12.13, 5.77, -6.36"),
    ],
)
def test_what_the_tables_give(
    statements: list[PrintedStatement], start: str, computed: str
) -> None:
    found = one(statements, start)
    assert (found.computed, found.verdict) == (computed, "agree")


def test_what_needs_the_experts_is_only_called_consistent(
    statements: list[PrintedStatement],
) -> None:
    found = one(statements, "Spearman of deficit and gain over the 105")
    assert (found.computed, found.verdict) == ("+0.759", "consistent")
    deficits = [s for s in statements if "deficit" in s.text and s.verdict == "agree"]
    assert all(set(s.tables).isdisjoint({"dom_p0", "dom_p1", "dom_p2"}) for s in deficits)


def _fits(printed: float, items: int) -> bool:
    """Whether some k of n rounds to a printed score, every k tried: |k/n - p| <= 1/20,000."""
    doubled = 2 * round(10_000 * printed) * items
    return any(abs(20_000 * k - doubled) <= items for k in range(items + 1))


@pytest.mark.parametrize(
    ("pool", "metric", "whole", "split"),
    [
        (2, "IFEval prompt strict", 541, 433),
        (2, "HE+ P@10", 164, 132),
        (2, "MBPP+ P@10", 378, 303),
        (1, "HarmBench", 320, 256),
        (2, "XSTest", 450, 360),
    ],
)
def test_the_items_of_a_printed_score(pool: int, metric: str, whole: int, split: int) -> None:
    [found] = [
        test for test in fraction_tests() if (test.pool, test.metric) == (POOLS[pool], metric)
    ]
    printed = PublishedTables().metrics[metric].repaired[pool]
    for side, items in zip(found.repaired, (whole, split), strict=True):
        assert side.fits == sum(_fits(score, items) for score in printed)
        every = sum(_fits(k / 10_000, items) for k in range(0, 10_001, 7)) / 1429
        assert side.each == pytest.approx(every, abs=0.01)
    assert (found.repaired[0].fits >= 5, found.repaired[1].fits) == (True, 0)


def test_chance_is_that_of_as_many_fits_or_more() -> None:
    """Three values of a hundred items: one in 99 fits; drawn values fit as often as said."""
    some = fit([5000, 3300, 1234], 100)
    assert (some.fits, some.of) == (2, 3) and some.each == pytest.approx(101 / 10_001)
    draws = np.random.default_rng(0).integers(0, 10_001, (200_000, 3))
    hits = np.isin(draws, [*fractions_of(100)]).sum(1)
    assert some.chance == pytest.approx((hits >= 2).mean(), abs=1e-4)
    assert not fit([5000, 5000, 5000], 100).beyond_chance  # one value, three times


def test_the_chance_of_several_pools_is_that_of_all_their_values() -> None:
    rows = [fit([5000, 3300, 1234], 100), fit([700, 1111], 100)]
    both = together(rows)
    assert (both.fits, both.of, both.each) == (3, 5, rows[0].each)
    assert both.chance == fit([5000, 3300, 700, 1234, 1111], 100).chance


def test_the_page_says_of_every_benchmark_what_its_scores_fit() -> None:
    """One statement each, with its chance; items so many that all fits are left out."""
    text = PAGE.read_text(encoding="utf-8").partition("By pool:")[0]
    said = {
        name: tuple(int(each) for each in numbers)
        for name, *numbers in re.findall(
            r"- \*\*(.*?)\*\*: (\d+) of 21 .* \(chance [\d.e-]+\), (\d+) the split", text
        )
    }
    tests = [test for test in fraction_tests() if test.says]
    assert len(said) == 11
    for metric, counts in said.items():
        rows = [test.repaired for test in tests if test.metric == metric]
        assert counts == tuple(sum(row[side].fits for row in rows) for side in (0, 1))
    assert "beyond chance (rarer than 0.001) on 9 of 11 metrics" in text


def test_what_does_not_hold_and_what_is_not_in_the_tables(
    statements: list[PrintedStatement],
) -> None:
    disagree = {s.text.partition(":")[0] for s in statements if s.verdict == "disagree"}
    assert disagree == {
        "reported scores come from the evaluation split",
        "collapsing either factor gives up the whole gain",
    }
    missing = [s for s in statements if s.verdict == "not supported"]
    assert {"12 of 15", "9 of 15", "0.13"} <= {s.printed for s in missing}
    assert all(s.note and not s.computed for s in missing)


def test_every_statement_names_tables_that_exist(statements: list[PrintedStatement]) -> None:
    used = {name for s in statements for name in s.tables}
    assert used <= set(labels())
    unused = set(labels()) - used
    assert unused == set(), f"tables that no statement reads: {unused}"


def test_the_page_in_the_docs_is_the_one_that_the_command_makes(
    statements: list[PrintedStatement],
) -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(statements)


def test_the_tables_are_complete() -> None:
    paper = PublishedTables()
    assert paper.before.shape == paper.after.shape == (3, 5, 7)
    assert paper.baseline.shape == (3, 5, 5)
    assert len(paper.metrics) == 17 + 3  # with the means of coding, multilingual and safety
    assert all(m.delta.shape == (3, 7) for m in paper.metrics.values())
    assert len(table("directional_full")) == 18
    # Cells looked up in the printed paper, one of each corner.
    assert paper.before[0, 0, 0] == 0.4147 and paper.after[2, 4, 6] == 0.8853
    assert paper.metrics["DoAnythingNow"].delta[2, 1] == 0.3055


@pytest.mark.parametrize(
    ("name", "mutant", "start"),
    [
        ("relative_gain", lambda b, a: float(sum(a) / sum(b) - 1), "mean relative gain"),
        ("wilcoxon", lambda b, a: 1 / 2**21, "two-sided exact Wilcoxon"),
        ("average_ranks", lambda cells: dict.fromkeys(cells[0], 1.0), "average rank"),
        ("rank_preservation", lambda b, a: statistics.Count(21, 21), "within-pool anchor pairs"),
        ("spearman", lambda x, y: 0.0, "Spearman of deficit and gain over"),
        ("recovered_fraction", lambda d, g: 0.5, "Gemma's math deficit"),
    ],
)
def test_a_wrong_statistic_disagrees_with_the_paper(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant, start: str
) -> None:
    monkeypatch.setattr(statistics, name, mutant)
    assert one(recompute(), start).verdict == "disagree"


def test_numbers_agree_as_far_as_they_are_printed() -> None:
    ledger = Ledger()
    ledger.numbers("t", ["5.77"], [5.7749], "main_gain")
    ledger.numbers("t", ["5.77"], [5.7751], "main_gain")
    ledger.numbers("t", ["5.77"], [5.7751], "main_gain", slack=0.001)
    ledger.numbers("t", ["9.5e-7"], [9.54e-7], "main_gain")
    ledger.numbers("t", ["9.5e-7"], [9.7e-7], "main_gain")
    verdicts = [s.verdict for s in ledger.statements]
    assert verdicts == ["agree", "disagree", "agree", "agree", "disagree"]
    assert "rounding" in ledger.statements[2].note
