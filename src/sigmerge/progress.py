"""A progress bar with the amount done and the time left, on a terminal and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sigmerge.words import size

Progress = Callable[[str, int, int], None]


@contextmanager
def shown(given: Progress | None = None) -> Iterator[Progress]:
    """The given callable; else a bar where it can be shown; else a callable that does nothing."""
    if given is not None:
        yield given
    elif sys.stderr.isatty() or _in_notebook():
        with _bar() as update:
            yield update
    else:
        yield lambda stage, done, total: None


def _in_notebook() -> bool:
    """Whether IPython runs with a kernel that shows rich output."""
    shell = sys.modules.get("IPython")
    instance = shell.get_ipython() if shell is not None else None
    return instance is not None and instance.__class__.__name__ == "ZMQInteractiveShell"


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    console = None if _in_notebook() else Console(stderr=True)
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            amount = f"{done}/{total}" if total < 10**5 else f"{size(done)} of {size(total)}"
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, amount=amount)
            bars.update(tasks[stage], completed=done, total=total, amount=amount)

        yield update
