"""docs/methods.md names every operator, once."""

from __future__ import annotations

import re
from pathlib import Path

from sigmerge.operators.table import OPERATORS

PAGE = Path(__file__).parents[2] / "docs/methods.md"


def test_every_operator_has_its_line() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")][1:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(OPERATORS)
