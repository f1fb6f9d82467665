"""Runs the command line in this process and keeps what it printed."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sigmerge import cli

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def sigmerge(*arguments: str | Path) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    code, handlers = 0, {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sigmerge", *map(str, arguments)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
    return Ran(code, out.getvalue(), err.getvalue())


def tree(root: Path) -> set[str]:
    """Everything below a folder, hidden files included."""
    return {str(entry.relative_to(root)) for entry in root.rglob("*")}


def refused(code: int, *arguments: str | Path, beside: Path) -> str:
    """Runs a command that must fail so, in words, leaving nothing behind. Returns the words."""
    before = tree(beside)
    ran = sigmerge(*arguments)
    assert ran.code == code, ran
    assert ran.out == ""
    assert ran.err.startswith("error: ") and "Traceback" not in ran.err
    assert tree(beside) == before
    return ran.err
