"""A team of threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar, cast

from threadpoolctl import threadpool_limits

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Stopped(Exception):
    """Work was given up because other work failed."""


class _Turn(Generic[_Item, _Result]):
    """The items of one `map`. Threads take the next item themselves: no one hands it to them.

    An item is not begun before all but the last `ahead` of those before it were collected.
    """

    def __init__(
        self, function: Callable[[_Item], _Result], items: list[_Item], ahead: int
    ) -> None:
        self.function, self.items, self.ahead = function, items, ahead
        self._results: dict[int, tuple[_Result | None, BaseException | None]] = {}
        self._begun, self._collected, self._over = 0, 0, False
        self._changed = threading.Condition(threading.Lock())

    def work(self) -> None:
        """Do one item after another until none is left."""
        while (index := self._next()) is not None:
            try:
                done: tuple[_Result | None, BaseException | None]
                done = self.function(self.items[index]), None
            except BaseException as error:
                done = None, error
            with self._changed:
                self._results[index] = done
                if index == self._collected:
                    self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            while not self._over and self._begun < len(self.items):
                if self._begun - self._collected <= self.ahead:
                    self._begun += 1
                    return self._begun - 1
                self._changed.wait()
        return None

    def result(self, index: int) -> _Result:
        """The result of the next item in order."""
        with self._changed:
            while index not in self._results:
                self._changed.wait()
            result, error = self._results.pop(index)
            if self._begun - self._collected > self.ahead:
                self._changed.notify_all()
            self._collected += 1
        if error is not None:
            raise error
        return cast(_Result, result)

    def end(self) -> None:
        """Nothing more is begun."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Workers:
    """A pool of threads whose `map` keeps order and holds few items in flight.

    Meanwhile linear algebra stays in the thread that calls it: threads are here already, and a
    sum that a library splits over threads depends on their number.
    """

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        self._stopped = False

    def __enter__(self) -> Workers:
        self._limits = threadpool_limits(1, "blas")
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._limits.restore_original_limits()

    def map(
        self, function: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        if self._pool is None:
            yield from map(function, items)
            return
        turn = _Turn(function, list(items), 2 * self.threads)
        for _ in range(min(self.threads, len(turn.items))):
            self._pool.submit(turn.work)
        try:
            for index in range(len(turn.items)):
                if self._stopped:
                    raise Stopped
                yield turn.result(index)
        finally:
            turn.end()

    def overlap(
        self, function: Callable[[_Item], _Result], items: Iterable[_Item], *, most: int = 2
    ) -> Iterator[_Result]:
        """The results in order; up to `most` items at a time, which share the threads by `map`."""
        if self._pool is None or most < 2:
            yield from map(function, items)
            return
        waiting: deque[Future[_Result]] = deque()
        with ThreadPoolExecutor(most) as drivers:
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
