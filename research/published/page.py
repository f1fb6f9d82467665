"""The page `docs/results/published.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from research.published import fractions
from research.published.data import table
from research.published.ledger import MEANING, PrintedStatement
from research.published.statements import recompute


def markdown(statements: Sequence[PrintedStatement] | None = None) -> str:
    """Every statement with the printed and the computed value, section by section."""
    found = recompute() if statements is None else statements
    return "\n".join(_lines(found)).rstrip("\n") + "\n"


def _lines(statements: Sequence[PrintedStatement]) -> Iterator[str]:
    counts = Counter(statement.verdict for statement in statements)
    yield "# The paper's statements, computed again from its own tables"
    yield ""
    yield (
        "Made by `python -m research.published`. The tables are in `research/published/`, one "
        "file per table, as printed. Nothing here was measured: it says what the printed numbers "
        "support."
    )
    yield ""
    yield "| verdict | statements | meaning |"
    yield "|---|--:|---|"
    for verdict, meaning in MEANING.items():
        yield f"| {verdict} | {counts[verdict]} | {meaning} |"
    yield ""
    yield from fractions.lines()
    disagreeing = [s for s in statements if s.verdict == "disagree"]
    if disagreeing:
        yield "## Where the tables give another value"
        yield ""
        for s in disagreeing:
            note = f" {s.note}" if s.note else ""
            yield f"- **{s.text}** ({s.place}): printed {s.printed}, computed {s.computed}.{note}"
        yield ""
    yield from _references()
    for place, members in groupby(statements, key=lambda s: s.place):
        yield f"## {place}"
        yield ""
        yield "| statement | printed | computed | verdict | tables |"
        yield "|---|--:|--:|---|---|"
        for s in members:
            text = f"{s.text}. {s.note}" if s.note else s.text
            names = " ".join(f"`{name}`" for name in s.tables)
            yield f"| {text} | {s.printed} | {s.computed or '–'} | {s.verdict} | {names} |"
        yield ""


def _references() -> Iterator[str]:
    yield "## The reference scores"
    yield ""
    yield (
        "Residual gaps need the score of the strongest expert on each domain, and no table prints "
        "it. *Stated gap*: the text states one gap, which added to a printed score gives the "
        "reference. *Fitted*: a score with four decimals, found by a random search for a table "
        "with which every statement marked *consistent* holds. Those statements were therefore "
        "not tested one by one; what is shown is that they do not contradict each other. Other "
        "fitted values may do as well."
    )
    yield ""
    rows = table("references")
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    yield "| pool | " + " | ".join(domains) + " |"
    yield "|---|" + "--:|" * len(domains)
    for pool, members in groupby(rows, key=lambda row: row["pool"]):
        cells = [f"{row['score']} ({row['source']})" for row in members]
        yield f"| {pool} | {' | '.join(cells)} |"
    yield ""
