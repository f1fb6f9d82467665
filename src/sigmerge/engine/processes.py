"""Processes that work side by side and end with the one that started them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MASKS = hasattr(signal, "pthread_sigmask")
LOOK_SECONDS = 0.2
"""At most how long a process outlives its parent."""


class ProcessPool(ProcessPoolExecutor):
    """Open it with `with`. After an error its processes end what they do; a signal ends them."""

    def submit(
        self, function: Callable[_P, _T], /, *given: _P.args, **how: _P.kwargs
    ) -> Future[_T]:
        """A signal waits until the process that this may start is known; see _begin."""
        with _signals_wait():
            return super().submit(function, *given, **how)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            end_processes()
        self.shutdown(cancel_futures=True)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Until the block ends, where the system can have them wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if _MASKS else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def process_pool(processes: int) -> ProcessPool:
    """New processes, not forks: those of a process with threads, or with CUDA, may hang."""
    context = multiprocessing.get_context("spawn")
    return ProcessPool(processes, context, initializer=_begin)


def end_processes() -> None:
    """End the processes that this one started, at once."""
    for process in multiprocessing.active_children():
        with suppress(OSError):
            process.kill()


def end_before_leaving() -> None:
    """End them, and give back their semaphores: if this process is left without Python's own
    ending, multiprocessing would report them as lost."""
    end_processes()
    util: Any = multiprocessing.util
    util._run_finalizers(0)


def _begin() -> None:
    """Leave signals to the parent, and end with it.

    Ctrl-C reaches every process of a terminal; until now both signals were blocked. A parent that
    was killed cannot end its children: each looks whether it is still there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _MASKS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
