"""docs/methods.md names every operator, once."""

from __future__ import annotations

import re
from pathlib import Path

from sigmerge.experiments.suite import load_suite
from sigmerge.operators.table import OPERATORS

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/methods.md"


def test_every_operator_has_its_line() -> None:
    page, whose = PAGE.read_text().split("## Whose formula")
    listed = page + whose.partition("\n## ")[2]
    rows = [row for row in listed.splitlines() if row.startswith("| `")][1:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(OPERATORS)


def test_every_operator_of_the_paper_says_whose_formula_it_is() -> None:
    """One line for each anchor and baseline of the paper's suite, whose tests exist."""
    section = PAGE.read_text().partition("## Whose formula")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ") and "`" in row]
    suite = load_suite("paper")
    used = {str(m.merge_method) for m in (*suite.anchors, *suite.baselines)}
    assert {re.findall(r"`(\w+)", row.split("|")[1])[0] for row in rows} == {*used, "search"}
    assert all(len(row.split("|")) == 7 for row in rows)
    for row in rows:
        named = re.findall(r"`(?:(merge3)/)?(test_\w+\.py)(?:::(\w+))?`", row)
        assert named, row
        for folder, file, test in named:
            text = (TESTS / (folder or "operators") / file).read_text()
            assert f"def {test}(" in text if test else text
