"""The command line, with a signal to itself while it works.

    python -m tests.faults.stopped STAGE SIGNAL ARGUMENTS...

The signal is sent at the first report of progress whose stage begins with STAGE.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import sigmerge.progress
from sigmerge.cli import main

stage_wanted, name, *arguments = sys.argv[1:]
waiting = [signal.Signals[name]]


@contextmanager
def stopping(given: object = None) -> Iterator[sigmerge.progress.Progress]:
    def tick(stage: str, done: int, total: int) -> None:
        if stage.startswith(stage_wanted) and waiting:
            os.kill(os.getpid(), waiting.pop())

    yield tick


sigmerge.progress.shown = stopping
sys.argv = ["sigmerge", *arguments]
main()
