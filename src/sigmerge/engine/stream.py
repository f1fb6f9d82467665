"""Streaming: a model goes by block by block, a block chunk by chunk over worker threads.

Only a few chunks are in memory at any time, however large the model. Results are folded in the
order of the chunks, whatever thread finished first, so they do not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from sigmerge.kernels import TILE
from sigmerge.operators.base import Array, Pass, Passes, Site, Tile

CHUNK = 32 * TILE
"""Coordinates one worker takes at a time."""

SUM = 4 * TILE
"""Coordinates of a tile that is summed up as it is read, without rows for the experts."""

KEPT = 64 * TILE
"""Coordinates of scratch that a thread keeps for the next tile."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A pool of threads whose `map` keeps order and holds few items in flight.

    Meanwhile linear algebra stays in the thread that asks for it: threads are here already, and a
    sum that a library splits over threads depends on their number.
    """

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None

    def __enter__(self) -> Workers:
        self._limits = threadpool_limits(1, "blas")
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._limits.restore_original_limits()

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        if self._pool is None:
            yield from map(function, items)
            return
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(self._pool.submit(function, item))
            if len(waiting) > 2 * self.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Source(Protocol):
    """Where values come from. Members are the experts in order, and the reference."""

    def fill(self, member: str, tensor: str, start: int, out: Array) -> None:
        """Write float32 values of a tensor from `start` on into `out`."""

    def add(
        self,
        member: str,
        tensor: str,
        start: int,
        weight: float,
        out: Array,
        *,
        fresh: bool,
        less: str | None = None,
    ) -> None:
        """Add weight · values to `out`, or weight · (values − those of `less`).

        Unless `out` is fresh: then they are what it becomes. Every operation rounds to float32.
        """

    def done(self, tensor: str, start: int, stop: int) -> None:
        """These coordinates will not be needed again in this pass."""

    def prefetch(self, tensors: Iterable[str]) -> None:
        """These tensors come next."""


@dataclass
class StreamChunk:
    """Tiles of one tensor, read as they are asked for into the worker's own scratch."""

    site: Site
    start: int
    stop: int
    step: int
    source: Source
    state: Any = None
    statistics: Any = None
    notes: dict[str, Any] = field(default_factory=dict)

    def tiles(self, less: str | None = None) -> Iterator[Tile]:
        """Tiles with θ_d in the experts' rows, or θ_d − θ_ref with less = "reference"."""
        for start in range(self.start, self.stop, self.step):
            tile = Tile(start, *_rows(len(self.site.experts), min(self.step, self.stop - start)))
            for row, expert in zip(tile.experts, self.site.experts, strict=True):
                if less:
                    self._add(expert, start, 1.0, row, fresh=True, less=less)
                else:
                    self.source.fill(expert, self.site.tensor, start, row)
            yield tile
        self.source.done(self.site.tensor, self.start, self.stop)

    def sums(self, weights: Array, less: str | None = None) -> Iterator[Tile]:
        """Tiles with Σ_d w_d θ_d in `out`, or Σ_d w_d (θ_d − θ_ref) with less = "reference"."""
        for start in range(self.start, self.stop, SUM):
            out = _room(min(SUM, self.stop - start))
            for d, expert in enumerate(self.site.experts):
                self._add(expert, start, float(weights[d]), out, fresh=d == 0, less=less)
            yield Tile(start, _NO_ROWS, out)
        self.source.done(self.site.tensor, self.start, self.stop)

    def add_reference(self, tile: Tile, factor: float = 1.0) -> None:
        """θ = θ_ref + τ: from the merged task vector in `out` to the merge."""
        self._add("reference", tile.start, factor, tile.out, fresh=False)

    def _add(self, member: str, start: int, weight: float, out: Array, **how: Any) -> None:
        self.source.add(member, self.site.tensor, start, weight, out, **how)


_local = threading.local()
_NO_ROWS = np.empty((0, 0), np.float32)


def _rows(experts: int, size: int) -> tuple[Array, Array]:
    """Rows for the experts and the result, without gaps between them: kernels see one array."""
    rows = _room((experts + 1) * size).reshape(experts + 1, size)
    return rows[:-1], rows[-1]


def _room(size: int) -> Array:
    """The calling thread's own room; kept, unless it is for a tensor that is one large tile."""
    if size > KEPT:
        return np.empty(size, np.float32)
    if getattr(_local, "room", _NO_ROWS).size < size:
        _local.room = np.empty(size, np.float32)
    room: Array = _local.room
    return room[:size]


def chunks(
    site: Site, granule: int, source: Source, state: Any = None, statistics: Any = None
) -> list[StreamChunk]:
    """A tensor cut into chunks whose tiles start at multiples of the granule."""
    step = max(TILE // granule, 1) * granule
    length = max(CHUNK // step, 1) * step
    return [
        StreamChunk(site, start, min(site.size, start + length), step, source, state, statistics)
        for start in range(0, site.size, length)
    ]


def ahead(items: Iterable[Item], prefetch: Callable[[Item], None]) -> Iterator[Item]:
    """The items in turn, each next one being read ahead while one is at work."""
    upcoming = iter(items)
    waiting: deque[Item] = deque()
    while True:
        while len(waiting) < 2 and (item := next(upcoming, None)) is not None:
            prefetch(item)
            waiting.append(item)
        if not waiting:
            return
        yield waiting.popleft()


Granule = Callable[[Site], int]


@dataclass(frozen=True)
class Stream:
    """The sites of a model, block by block, and the machinery that passes over them."""

    blocks: Sequence[Sequence[Site]]
    source: Source
    workers: Workers
    granule: Granule
    progress: Callable[[int], None] = lambda coordinates: None
    statistics: Any = None

    def survey(self, passes: Passes) -> Any:
        """Drive a generator of passes over the whole model to its result."""

        def run(step: Pass) -> Any:
            total = None
            for block in self.ahead(self.blocks):
                states = self.prepare(block, step.prepare) if step.prepare else {}
                for part in self.workers.map(step.visit, self._chunks(block, states)):
                    total = step.fold(total, part)
            return total

        return _drive(passes, run)

    def prepare(self, block: Sequence[Site], passes: Callable[[Site], Passes]) -> dict[str, Any]:
        """Drive the passes of all tensors of a block side by side; their results by name."""
        running = {site.tensor: (site, passes(site)) for site in block}
        replies: dict[str, Any] = dict.fromkeys(running)
        states: dict[str, Any] = {}
        while running:
            steps: dict[str, Pass] = {}
            for name, (_, generator) in list(running.items()):
                try:
                    steps[name] = generator.send(replies[name])
                except StopIteration as stop:
                    states[name] = stop.value
                    del running[name]
            replies = self._round([site for site, _ in running.values()], steps)
        return states

    def visit(
        self, block: Sequence[Site], states: Mapping[str, Any], visit: Callable[[StreamChunk], int]
    ) -> None:
        """One pass whose results are not folded: the writing of the merge."""
        for coordinates in self.workers.map(visit, self._chunks(block, states)):
            self.progress(coordinates)

    def ahead(self, blocks: Iterable[Sequence[Site]]) -> Iterator[Sequence[Site]]:
        return ahead(blocks, lambda block: self.source.prefetch(site.tensor for site in block))

    def _chunks(self, block: Sequence[Site], states: Mapping[str, Any]) -> list[StreamChunk]:
        return [
            chunk
            for site in block
            for chunk in chunks(
                site, self.granule(site), self.source, states.get(site.tensor), self.statistics
            )
        ]

    def _round(self, sites: Sequence[Site], steps: Mapping[str, Pass]) -> dict[str, Any]:
        items = self._chunks(sites, {})
        results = self.workers.map(lambda chunk: steps[chunk.site.tensor].visit(chunk), items)
        totals: dict[str, Any] = dict.fromkeys(steps)
        for chunk, part in zip(items, results, strict=True):
            name = chunk.site.tensor
            totals[name] = steps[name].fold(totals[name], part)
        return totals


def _drive(passes: Generator[Pass, Any, Any], run: Callable[[Pass], Any]) -> Any:
    reply = None
    while True:
        try:
            step = passes.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = run(step)
