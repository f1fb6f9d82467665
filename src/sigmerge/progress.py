"""A progress bar with the amount done and the time left, on a terminal and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from threading import Lock
from time import monotonic
from typing import Any, TextIO, cast

from markupsafe import escape

from sigmerge.messages import duration, size

Progress = Callable[[str, int, int], None]
"""Called with (stage, amount done, amount in all)."""


def silent(stage: str, done: int, total: int) -> None:
    """A progress that nobody looks at."""


EVERY = 20.0
"""Seconds between two lines."""
LONG_STAGE = 5.0
"""Seconds from which on the end of a stage is a line of its own."""
BAR = 30
"""Columns of a bar."""


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
    """Bars while the block lasts; what is printed meanwhile stands above them."""
    streams = sys.stdout, sys.stderr
    bars = _Bars(sys.stderr)
    sys.stdout, sys.stderr = (cast(TextIO, _Above(each, bars)) for each in streams)
    try:
        yield bars
    finally:
        sys.stdout, sys.stderr = streams
        bars.draw()


class _Bars:
    """A line with a bar for each stage, at the end of a terminal; redrawn ten times a second."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stages: dict[str, tuple[int, int, float]] = {}
        self._shown, self._drawn, self._lock = 0, 0.0, Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            began = self._stages[stage][2] if stage in self._stages else monotonic()
            self._stages[stage] = done, total, began
            if done >= total or monotonic() - self._drawn >= 0.1:
                self._draw()

    def draw(self) -> None:
        with self._lock:
            self._draw()

    def clear(self) -> None:
        """Take the bars away; the next change draws them again."""
        with self._lock:
            if self._shown:
                self._stream.write(self._back() + "\x1b[J")
                self._shown = 0

    def _draw(self) -> None:
        columns = get_terminal_size().columns - 1
        width = max([0, *map(len, self._stages)])
        lines = [self._line(stage, width)[:columns] for stage in self._stages]
        self._stream.write(self._back() + "".join(f"{line}\x1b[K\n" for line in lines))
        self._stream.flush()
        self._shown, self._drawn = len(lines), monotonic()

    def _back(self) -> str:
        return f"\x1b[{self._shown}F" if self._shown else ""

    def _line(self, stage: str, width: int) -> str:
        done, total, began = self._stages[stage]
        filled = int(BAR * min(done / max(total, 1), 1))
        left = (monotonic() - began) * (total - done) / done if 0 < done < total else 0
        time = f", {duration(left)} left" if left >= 1 else ""
        bar = "━" * filled + "─" * (BAR - filled)
        return f"{stage:{width}} {bar} {_amount(done, total)}{time}"


class _Above:
    """A stream whose text stands above the bars."""

    def __init__(self, stream: TextIO, bars: _Bars) -> None:
        self._stream, self._bars = stream, bars

    def write(self, text: str) -> int:
        self._bars.clear()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
