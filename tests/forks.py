"""Work in a fork of this process, which has everything loaded: no new process imports for seconds.

For tests of what a command leaves when it is killed, and of how it ends. How one begins is tested
with processes of its own.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import IO, NoReturn

import pymoo.algorithms.soo.nonconvex.ga  # noqa: F401  (what commands import when they need it)
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

from sigmerge import cli
from sigmerge.files.scratch import remove_stale
from tests.command_line import Ran


class Fork:
    """A fork at work. It heads a session of its own, as a job of a terminal does."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._said = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            _work(work, self._said)

    def ended(self) -> Ran:
        """Wait for its end; the code of one that was killed is negative."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = []
        for file in self._said:
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        return Ran(code, *texts)

    def at_work(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def killed(self) -> None:
        """Kill it, and what it has started, unless it has just ended."""
        os.killpg(self.pid, signal.SIGKILL)
        self.ended()


def forked(work: Callable[[], object]) -> Ran:
    """How work in a fork ended, and what it printed."""
    return Fork(work).ended()


def command(*words: object) -> None:
    """The command line, from its beginning to its exit."""
    sys.argv = ["sigmerge", *map(str, words)]
    cli.main()


def _work(work: Callable[[], object], said: Sequence[IO[bytes]]) -> NoReturn:
    code = 1
    try:
        # What the parent leaves to the collector is the parent's: destroyed here, a client of Ray's
        # waits for threads that only the parent has, and crashes.
        gc.freeze()
        os.setsid()
        for number, (name, file) in enumerate(zip(("stdout", "stderr"), said, strict=True), 1):
            os.dup2(file.fileno(), number)
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        torch.set_num_threads(1)  # the threads of a library are not in a fork
        remove_stale.cache_clear()  # a new process looks anew
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
