"""Overlaps two pieces of work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

from sigmerge.core import Array
from sigmerge.engine.workers import Stopped

_Result = TypeVar("_Result")
Advance = Callable[[int], None]
Write = Callable[[str, int, Array], None]
"""(tensor, first coordinate, stored values): where the values of a merge go."""


@contextmanager
def beside(function: Callable[[Advance], _Result]) -> Iterator[Callable[[], _Result]]:
    """Run function(step) in a thread of its own while the body runs; yields a wait for its result.

    The function calls step(count) now and then, from any thread; that raises once the body has
    ended, so that nothing waits for work that is not needed any more.
    """
    over = threading.Event()

    def step(count: int) -> None:
        if over.is_set():
            raise Stopped

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(copy_context().run, function, step)
        try:
            yield running.result
        finally:
            over.set()
