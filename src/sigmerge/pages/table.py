"""The one kind of table: its columns say how numbers are printed.

Pages and notebooks take `head` and `printed`, a terminal `lines`; `markdown`, `csv_text` and
`latex` write files.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Form = Literal["text", "percent", "points", "share", "number", "count", "p"]
"""How a column is printed: text; a fraction in percent; a signed difference in points; a fraction
of a gain in percent with one decimal; three decimals; a whole number; a probability."""


@dataclass(frozen=True)
class As:
    """A number printed in another form than its column's."""

    value: float | None
    form: Form


@dataclass(frozen=True)
class Changed:
    """A score with its change in parentheses."""

    score: float
    change: float


Cell = str | float | int | bool | None | As | Changed


@dataclass(frozen=True)
class Column:
    title: str
    form: Form = "text"


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    label: str = ""

    @property
    def head(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.columns)

    @property
    def wordy(self) -> bool:
        """Whether all cells are words."""
        return all(column.form == "text" for column in self.columns)

    def printed(self) -> list[list[str]]:
        """Every cell as text."""
        return [
            [printed(value, column.form) for value, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def lines(self) -> list[str]:
        """For a terminal: the head, a rule, and a line for each row; numbers stand to the right."""
        lines = [list(self.head), *self.printed()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        head, *rows = [
            "  ".join(
                cell.ljust(width) if column.form == "text" else cell.rjust(width)
                for cell, width, column in zip(line, widths, self.columns, strict=True)
            )
            for line in lines
        ]
        return [head, "─" * len(head), *rows]


def text_columns(*titles: str) -> tuple[Column, ...]:
    return tuple(map(Column, titles))


def number_columns(first: str, *titles: str) -> tuple[Column, ...]:
    """The first column names the row, the others are numbers, or text that is printed already."""
    return (Column(first), *(Column(title, "number") for title in titles))


def percent(fraction: float | None) -> str:
    """0.4217 as 42.17; a dash where nothing was measured."""
    return printed(fraction, "percent")


def points(difference: float | None) -> str:
    """A difference of two scores in percent points, signed."""
    return printed(difference, "points")


def printed(value: Cell, form: Form) -> str:
    """One cell as text; a dash where nothing was measured."""
    if isinstance(value, As):
        return printed(value.value, value.form)
    if isinstance(value, Changed):
        return f"{printed(value.score, 'percent')} ({printed(value.change, 'points')})"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if form == "text":
        return f"{value:g}"
    if form == "p":
        return f"{value:.1e}" if 0 < value < 0.001 else f"{value:.3f}"
    scale, decimals = {
        "percent": (100, 2),
        "points": (100, 2),
        "share": (100, 1),
        "number": (1, 3),
        "count": (1, 0),
    }[form]
    sign = "+" if form == "points" else ""
    # Halves are made equal first: 21.025 is printed alike however it was summed. Adding zero turns
    # −0.0 into 0.0.
    shown = round(round(scale * value, 9), decimals) + 0.0
    return f"{shown:{sign}.{decimals}f}".replace("-", "−")


def markdown(table: Table) -> str:
    """As a Markdown table with its caption above."""
    head = [column.title for column in table.columns]
    rule = ["---" if column.form == "text" else "--:" for column in table.columns]
    lines = [head, rule, *table.printed()]
    body = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
    return f"**{table.caption}** (`{table.label}`)\n\n{body}\n"


def csv_text(table: Table) -> str:
    """With every digit, for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.title for column in table.columns)
    writer.writerows([_exact(cell) for cell in row] for row in table.rows)
    return out.getvalue()


def _exact(cell: Cell) -> object:
    if isinstance(cell, As):
        return _exact(cell.value)
    if isinstance(cell, Changed):
        return f"{cell.score!r} ({cell.change!r})"
    return "" if cell is None or cell != cell else cell


_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "λ": r"$\lambda$",
    "ρ": r"$\rho$",
    "Δ": r"$\Delta$",
    "–": "--",
    "→": r"$\to$",
    "³": r"$^3$",
    "<": "$<$",
    ">": "$>$",
    "|": r"\textbar{}",
}


def latex(table: Table) -> str:
    """As a LaTeX table for `booktabs`."""

    def tex(text: str) -> str:
        return "".join(_TEX.get(character, character) for character in text)

    align = "".join("l" if column.form == "text" else "r" for column in table.columns)
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(tex(column.title) for column in table.columns) + r" \\",
        r"\midrule",
        *(" & ".join(map(tex, row)) + r" \\" for row in table.printed()),
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{tex(table.caption)}}}",
        rf"\label{{tab:{table.label}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"
