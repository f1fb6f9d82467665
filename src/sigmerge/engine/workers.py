"""A team of threads."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import TypeVar

from threadpoolctl import threadpool_limits

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


SWITCH = 0.0005
"""Seconds after which a thread that runs Python lets another one, while many threads are at work.
Most of them need Python for some microseconds between two calls of kernels; with Python's own 5 ms
they wait, one after another, for the thread that adds results up."""


class Stopped(Exception):
    """Work was given up because other work failed."""


def _enter(context: Context) -> None:
    """A thread works in the context of who started it: what a command's flags say holds there."""
    for variable, value in context.items():
        variable.set(value)


class Workers:
    """A pool of threads whose `map` keeps order and holds few items in flight.

    Meanwhile linear algebra stays in the thread that calls it: threads are here already, and a
    sum that a library splits over threads depends on their number. And Python changes threads more
    often.
    """

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._pool = (
            ThreadPoolExecutor(self.threads, initializer=_enter, initargs=(copy_context(),))
            if self.threads > 1
            else None
        )
        self._drivers: list[ThreadPoolExecutor] = []
        self._stopped = False

    def __enter__(self) -> Workers:
        self._limits, self._switch = threadpool_limits(1, "blas"), sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch, SWITCH))
        return self

    def __exit__(self, *_: object) -> None:
        """No thread is at work afterwards: what they read and write may be closed."""
        self._stopped = True
        for threads in [self._pool, *self._drivers] if self._pool else []:
            threads.shutdown(cancel_futures=True)
        sys.setswitchinterval(self._switch)
        self._limits.restore_original_limits()

    def map(
        self,
        function: Callable[[_Item], _Result],
        items: Iterable[_Item],
        *,
        most: int | None = None,
    ) -> Iterator[_Result]:
        """The results in order; at most `most` items are at work, where more would wait for one
        another.
        """
        in_flight = most or 2 * self.threads + 1
        if self._pool is None:
            yield from map(function, items)
            return
        waiting: deque[Future[_Result]] = deque()
        for item in items:
            if self._stopped:
                raise Stopped
            waiting.append(self._pool.submit(function, item))
            if len(waiting) >= in_flight:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def overlap(
        self, function: Callable[[_Item], _Result], items: Iterable[_Item], *, most: int = 2
    ) -> Iterator[_Result]:
        """The results in order; up to `most` items at a time, which share the threads by `map`."""
        if self._pool is None or most < 2:
            yield from map(function, items)
            return
        waiting: deque[Future[_Result]] = deque()
        drivers = ThreadPoolExecutor(most, initializer=_enter, initargs=(copy_context(),))
        self._drivers.append(drivers)  # of a loop that fails, this generator may not be told
        with drivers:
            try:
                for item in items:
                    waiting.append(drivers.submit(function, item))
                    if len(waiting) == most:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            except BaseException:
                self._stopped = True
                for future in waiting:
                    future.cancel()
                raise
