"""A progress bar with the amount done and the time left, on a terminal and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from markupsafe import escape

from sigmerge.messages import size

Progress = Callable[[str, int, int], None]
"""Called with (stage, amount done, amount in all)."""


def silent(stage: str, done: int, total: int) -> None:
    """A progress that nobody looks at."""


EVERY = 20.0
"""Seconds between two lines."""
LONG_STAGE = 5.0
"""Seconds from which on the end of a stage is a line of its own."""


@contextmanager
def shown(given: Progress | None = None) -> Iterator[Progress]:
    """The given callable; else a bar where it can be shown; else a line now and then."""
    if given is not None:
        yield given
    elif _in_notebook():
        yield _NotebookBar()
    elif sys.stderr is None:  # a program without streams
        yield silent
    elif sys.stderr.isatty():
        with _bar() as update:
            yield update
    else:
        yield _Lines()


class _Lines:
    """Where no bar can be shown, lines on the error stream: now and then, and when a long stage
    ends."""

    def __init__(self) -> None:
        self._last = monotonic()
        self._began: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = monotonic()
        began = self._began.setdefault(stage, now)
        ends = done >= total and now - began >= LONG_STAGE
        if ends or now - self._last >= EVERY:
            self._last = now
            print(f"{stage}: {_amount(done, total)}", file=sys.stderr, flush=True)
        if done >= total:
            del self._began[stage]


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
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            amount = _amount(done, total)
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, amount=amount)
            bars.update(tasks[stage], completed=done, total=total, amount=amount)

        yield update


def _amount(done: int, total: int) -> str:
    """Counts as counts, bytes as bytes; no stage counts a hundred thousand things."""
    return f"{done}/{total}" if total < 10**5 else f"{size(done)} of {size(total)}"


class _NotebookBar:
    """One output of a cell with a bar for each stage, redrawn ten times a second at most."""

    def __init__(self) -> None:
        self._stages: dict[str, tuple[int, int]] = {}
        self._handle: Any = None
        self._drawn = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._stages[stage] = done, total
        if done < total and monotonic() - self._drawn < 0.1:
            return
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(self._html()), display_id=True)
        else:
            self._handle.update(HTML(self._html()))
        self._drawn = monotonic()

    def _html(self) -> str:
        return "".join(
            f"<div><progress value='{done}' max='{max(total, 1)}' style='width: 16em'></progress> "
            f"{escape(stage)}: {_amount(done, total)}</div>"
            for stage, (done, total) in self._stages.items()
        )
