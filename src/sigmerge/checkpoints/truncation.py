"""An input that becomes shorter while it is mapped: a line and an exit code, not a crash.

The system answers a read behind the end of a mapped file with the signal SIGBUS, in whichever
thread reads. Python cannot handle it: the handlers of its `signal` module run between two of its
own instructions, and the one that failed would be repeated before that for ever. So the handler is
one of the native core.
"""

from __future__ import annotations

import signal
import sys

from sigmerge._native import exit_on_sigbus
from sigmerge.errors import PoolError

_LINE = (
    b"error: an input file became shorter while it was read (SIGBUS). Nothing is published. Put "
    b"the whole file back, then run the same command again.\n"
)


def exit_on_truncation() -> None:
    """From now on SIGBUS ends this process with one line and the exit code of a wrong pool.

    It is for a command's own process; a program that imports the library decides for itself.
    """
    if not hasattr(signal, "SIGBUS") or sys.platform == "win32":
        return
    exit_on_sigbus(_LINE, PoolError.exit_code)
