"""The list of operators."""

from __future__ import annotations

from typing import Annotated

from sigmerge.cli import show
from sigmerge.cli.app import examples
from sigmerge.cli.declared import Argument
from sigmerge.cli.flags import Flags, command


@command(epilog=examples("sigmerge operators", "sigmerge operators ties"))
def operators(
    flags: Flags,
    name: Annotated[str | None, Argument(help="Show only this operator.")] = None,
) -> None:
    """List the merge operators, their parameters and papers."""
    from sigmerge.operators.table import names, operator

    rows = [show.operator_row(operator(key)) for key in ([name] if name else names())]
    flags.emit({"operators": rows}, show.operator_lines)
