"""docs/methods.md names every operator, once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sigmerge.lab.experiments.suite import load_suite
from sigmerge.operators.table import OPERATORS

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/methods.md"


WHOSE = ("method", "formula from", "beside the authors' code", "beside MergeBench", "evidence")


def rows(title: str) -> list[list[str]]:
    """The rows of a section's table, the row of its heads first."""
    section = re.split(rf"^#+ {re.escape(title)}\n", PAGE.read_text(), flags=re.M)[1]
    section = re.split(r"^#+ ", section, flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


PAPER, MERGEKIT, NEWER = (
    rows("The paper's anchors and baselines"),
    rows("mergekit's methods that the paper does not use"),
    rows("Newer methods, without data"),
)


def method(row: list[str]) -> str:
    return re.findall(r"`(\w+)", row[0])[0]


def test_the_first_table_has_every_operator_that_the_last_has_not() -> None:
    listed = [name for row in rows("Methods")[1:] for name in re.findall(r"`(\w+)`", row[0])]
    newer = [method(row) for row in NEWER[1:] if not row[0].startswith("RegMean")]
    assert sorted([*listed, *newer]) == sorted(OPERATORS)


def test_every_operator_says_whose_formula_it_is() -> None:
    """One line each, in the table it belongs to; `search` stands for MERGE³."""
    suite = load_suite("paper")
    used = {str(m.merge_method) for m in (*suite.anchors, *suite.baselines)}
    assert {method(row) for row in PAPER[1:]} == {*used, "search"}
    every = [method(row) for row in (*PAPER[1:], *MERGEKIT[1:], *NEWER[1:])]
    assert sorted(every) == sorted([*OPERATORS, "search", "regmean"])  # regmean has two forms
    for table in (PAPER, MERGEKIT, NEWER):
        heads = table[0]
        assert tuple(head for head in heads if head != "rule") == WHOSE
        assert [row for row in table if len(row) != len(heads) or not all(row)] == []


@pytest.mark.parametrize("row", [*PAPER[1:], *MERGEKIT[1:], *NEWER[1:]], ids=method)
def test_the_evidence_says_how_strong_it_is_and_names_tests_that_exist(row: list[str]) -> None:
    assert re.search("strong|weak|estimators", row[-1]), row
    named = re.findall(r"`(?:(merge3)/)?(test_\w+\.py)(?:::(\w+))?`", row[-1])
    assert named, row
    for folder, file, test in named:
        text = (TESTS / (folder or "operators") / file).read_text()
        assert f"def {test}(" in text if test else text
