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


def stop_at(wanted: str, name: str) -> None:
    """From now on a stage sends the signal to this process."""
    waiting = [signal.Signals[name]]

    @contextmanager
    def stopping(given: object = None) -> Iterator[sigmerge.progress.Progress]:
        def tick(stage: str, done: int, total: int) -> None:
            if stage.startswith(wanted) and waiting:
                os.kill(os.getpid(), waiting.pop())

        yield tick

    sigmerge.progress.shown = stopping


if __name__ == "__main__":
    stop_at(*sys.argv[1:3])
    sys.argv = ["sigmerge", *sys.argv[3:]]
    main()
