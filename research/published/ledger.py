"""A list of statements, each with what the paper prints and what its tables give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["agree", "consistent", "disagree", "not supported"]

MEANING: dict[Verdict, str] = {
    "agree": "the paper's own tables give the printed value",
    "consistent": "it needs the scores of the experts, which no table prints; there are scores "
    "with which this and all other statements of this kind hold together",
    "disagree": "the tables give another value",
    "not supported": "no table holds the numbers that would be needed",
}


@dataclass(frozen=True)
class PrintedStatement:
    place: str  # section of the paper
    text: str  # what is stated
    printed: str  # the paper's value
    computed: str  # the value from the tables; empty if they do not hold it
    verdict: Verdict
    tables: tuple[str, ...]  # labels of the tables used
    note: str = ""


@dataclass
class Ledger:
    """Collects the statements of one place after another."""

    statements: list[PrintedStatement] = field(default_factory=list)
    place: str = ""

    def numbers(
        self,
        text: str,
        printed: Sequence[str],
        values: Iterable[Any],
        tables: str,
        *,
        slack: float = 0.0,
        inferred: bool = False,
        note: str = "",
    ) -> None:
        """Numbers agree if they round to the printed ones.

        `slack` is how far the rounding of the tables' own entries can move a value; a value
        outside the printed rounding but inside this slack agrees, and the note says so.
        """
        shown, worst = [], 0.0
        for want, value in zip(printed, values, strict=True):
            shown.append(_like(want, float(value)))
            worst = max(worst, abs(float(value) - _float(want)) - _half_unit(want))
        exact = worst <= 1e-9
        holds = worst <= slack + 1e-9
        if holds and not exact:
            note = f"{note} Within the rounding of the tables.".strip()
        self._add(text, ", ".join(printed), ", ".join(shown), holds, tables, inferred, note)

    def number(self, text: str, printed: str, value: Any, tables: str, **keys: Any) -> None:
        self.numbers(text, [printed], [value], tables, **keys)

    def fact(
        self,
        text: str,
        printed: object,
        computed: object,
        tables: str,
        *,
        inferred: bool = False,
        note: str = "",
    ) -> None:
        """A count, a name or a yes: equal or not."""
        same = printed == computed
        self._add(text, _said(printed), _said(computed), same, tables, inferred, note)

    def not_supported(self, text: str, printed: str, note: str) -> None:
        self.statements.append(
            PrintedStatement(self.place, text, printed, "", "not supported", (), note)
        )

    def _add(
        self,
        text: str,
        printed: str,
        computed: str,
        holds: bool,
        tables: str,
        inferred: bool,
        note: str,
    ) -> None:
        verdict: Verdict = "disagree"
        if holds:
            verdict = "consistent" if inferred else "agree"
        names = tuple(tables.split())
        self.statements.append(
            PrintedStatement(self.place, text, printed, computed, verdict, names, note)
        )


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _float(printed: str) -> float:
    return float(printed.replace("%", "").replace(",", ""))


def _half_unit(printed: str) -> float:
    """Half of the last printed decimal; of a number in scientific notation, of its mantissa."""
    mantissa, _, exponent = printed.replace("%", "").partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(0.5 * 10.0 ** (int(exponent or 0) - decimals))


def _like(printed: str, value: float) -> str:
    """A value written as the paper writes it."""
    sign = "+" if printed.startswith("+") else ""
    unit = "%" if printed.endswith("%") else ""
    mantissa, exponent, _ = printed.removesuffix("%").partition("e")
    decimals = len(mantissa.partition(".")[2])
    text = f"{value:{sign}.{decimals}{'e' if exponent else 'f'}}".replace("e-0", "e-")
    return text + unit
