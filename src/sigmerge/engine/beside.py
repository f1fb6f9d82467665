"""Work that runs beside other work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Protocol, TypeVar

from sigmerge.engine.workers import Stopped, Workers
from sigmerge.kernels import Array

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


class Rooms(Protocol):
    """Where a device puts results: a thread has several rooms, which it takes in turn."""

    def lent(self, values: Array) -> bool:
        """Whether values lie in the room that the calling thread got last."""

    def hold(self, done: Future[object]) -> None:
        """That room is free when this is done."""


class Behind:
    """Writes of what lies in a device's rooms, while its threads go on; others are at once."""

    def __init__(self, workers: Workers, rooms: Rooms | None) -> None:
        self._workers, self._rooms = workers, rooms
        self._begun: list[Future[object]] = []

    def __call__(self, write: Write, tensor: str, start: int, values: Array) -> None:
        if self._rooms is None or not self._rooms.lent(values):
            write(tensor, start, values)
            return
        done = self._workers.later(write, tensor, start, values)
        self._rooms.hold(done)
        self._begun.append(done)

    def wait(self) -> None:
        """All is written; raises what a write raised."""
        for done in self._begun:
            done.result()
