"""Streaming: a model is read block by block, a block chunk by chunk on worker threads.

A worker takes a chunk with one call of a compiled kernel, which needs no lock of Python's. Only a
few chunks are in memory at any time, however large the model. Results are folded in the order of
the chunks, whatever thread finished first, so they do not depend on the number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from sigmerge._native import WriteFailed
from sigmerge.core import STRIP, TILE, Array
from sigmerge.core import merge as loops
from sigmerge.core.buffers import room
from sigmerge.core.dtypes import (
    CODE,
    MEMORY,
    NARROW,
    STORAGE,
    FilePlace,
    Span,
    address_of,
    is_finite,
    load_rows,
    table,
)
from sigmerge.core.merge import Formula, add_scaled
from sigmerge.core.partial_sums import PartMarks, PartSums, part_marks
from sigmerge.core.select import MAGNITUDE
from sigmerge.engine.overlap import Write
from sigmerge.engine.workers import Workers
from sigmerge.errors import OutputError
from sigmerge.files.opened import named_reads
from sigmerge.gpu.staging import Drain, drain_from
from sigmerge.operators.base import Operator, Pass, Passes, Site, Tile

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra

_Made = TypeVar("_Made")
CHUNK = 32 * TILE
"""Coordinates one worker takes at a time. Fixed: sums of float64 over chunks have one order."""

LONG_CHUNK = 8 * CHUNK
"""Coordinates taken at a time where chunks may be longer: by a GPU, since Python needs as long for
a long launch as for a short one, and at most by a thread, since threads wait for one another
between two calls."""
TURNS = 8
"""How often every thread gets a long chunk at least."""


class StoredRows(NamedTuple):
    """The stored values of a chunk by member: of which tensor, and from which coordinate on."""

    tensor: str
    start: int
    members: Sequence[str]
    values: Sequence[Span]


class Accelerator(Protocol):
    """Processes chunks in place of the native loops, or declines to."""

    def merge(
        self, rows: StoredRows, formula: Formula, tile: int, step: int, kind: int, out: Array
    ) -> bool:
        """Fill `out` with stored values, or add NORM or LEAD to its first; whether it was done."""

    def write(
        self, rows: StoredRows, formula: Formula, tile: int, kind: int, target: Drain
    ) -> bool:
        """Write stored values into a file; whether it was done."""

    def read(self, kernel: Any, rows: StoredRows, *arguments: Any) -> bool:
        """The same as a kernel that reads a chunk; whether it was done.

        In place of arrays of sums it takes PartSums, and PartMarks in place of marks.
        """

    def select(self, rows: StoredRows, experts: Array, ranks: Array) -> Array | None:
        """What `Chunk.selected` returns; None if it is left to passes."""

    def room(self, size: int) -> Array:
        """The calling thread's own room for so many float32, to which the device copies best."""

    def solve(self, tensor: str, program: Callable[[Algebra], _Made]) -> _Made:
        """program(algebra) with the matrices of one tensor there."""


class Direct(Protocol):
    """A sink whose files the native loops may write directly."""

    def target(self, tensor: str) -> FilePlace | None:
        """Where a tensor begins in an open file; None if it is written otherwise."""

    def written(self, tensor: str, start: int, nbytes: int, found: int) -> None:
        """Values from `start` on, so many bytes with this checksum, were written there."""


class Source(Protocol):
    """Where values come from. Members are the experts in order, and the reference."""

    allow_nonfinite: bool

    @property
    def in_files(self) -> bool:
        """Whether all values lie in files; those of a chunk that do not are made all at once."""

    def raw(self, member: str, tensor: str) -> Span:
        """A whole tensor as it is stored, flat; bfloat16 as uint16 bit patterns."""

    def piece(self, member: str, tensor: str, start: int, stop: int) -> Span:
        """A run of a tensor as it is stored."""

    def not_finite(self, members: Sequence[str], tensor: str, start: int, stop: int) -> None:
        """Raise if a value of these members is NaN or infinite, and that is not allowed."""

    def done(self, tensor: str, start: int, stop: int, read: float = 1.0) -> None:
        """These coordinates, or that share of them, were read."""

    def prefetch(self, tensors: Iterable[str]) -> None:
        """These tensors come next."""


@dataclass
class StreamChunk:
    """A run of coordinates of one tensor, in tiles of `step`."""

    site: Site
    start: int
    stop: int
    step: int
    granule: int
    source: Source
    state: Any = None
    statistics: Any = None
    device: Accelerator | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def strip(self) -> int:
        """Coordinates that a kernel takes at a time, in whole granules."""
        return max(STRIP // self.granule, 1) * self.granule

    def sums(self, *shape: int) -> PartSums:
        """Zeros, to which a kernel adds float64 sums: for each part of the chunk its own."""
        length = _part(self.step)
        return PartSums(np.zeros((-(-self.size // length), *shape)), length)

    def marks(self, rows: int) -> PartMarks:
        """A bit for every entry of so many rows, if there is room: for each part its own."""
        tiles, strips = -(-self.size // self.step), -(-self.step // self.strip)
        length = _part(self.step) // self.step * strips
        return part_marks(tiles * strips, rows, -(-self.strip // 8), length)

    def read(
        self,
        kernel: Callable[..., bool],
        *arguments: Any,
        share: float = 1.0,
        reference: bool = True,
    ) -> bool:
        """One compiled pass over the members: kernel(members, start, size, *arguments).

        It returns whether all it read is finite; `share` is how much of the chunk it reads.
        Members are the experts, and the reference last unless it is left out. With PartSums there
        is a pass for each part, to which its own sums are given, and its own of PartMarks.
        Whether the kernel passed over it, rather than a device in its place.
        """
        rows = self._stored(reference=reference)
        if self.device and self.device.read(kernel, self._named(rows, reference), *arguments):
            self.source.done(self.site.tensor, self.start, self.stop, share)
            return False
        for part, given in self._by_part(arguments):
            first, last = part.start - self.start, part.stop - self.start
            own = [row.part(first, last) for row in rows]
            with named_reads():
                fine = kernel(table(own), part.start, part.size, *given)
            part._done(share)
            part._check(fine, reference=reference)
        return True

    def selected(self, experts: Array, ranks: Array) -> Array | None:
        """By expert the magnitude of Δ_d at a rank of this chunk, the entries of it within the
        rank, and all of it; None where they are many and no device finds them at once.
        """
        if self.device is not None:
            rows = self._named(self._stored(reference=True), True)
            if (found := self.device.select(rows, experts, ranks)) is not None:
                self.source.done(self.site.tensor, self.start, self.stop)
                return found
        return self._ordered(experts, ranks) if self.size <= self.step else None

    def _ordered(self, experts: Array, ranks: Array) -> Array:
        """The same by putting the entries in order, for few of which counters are too long."""
        (tile,) = self.tiles("reference")
        found = np.empty((len(experts), 3), np.int64)
        for row, expert, rank in zip(found, experts, ranks, strict=True):
            magnitudes = tile.experts[expert].view(np.uint32) & MAGNITUDE
            magnitudes.partition(self.size - rank)
            above, last = magnitudes[self.size - rank :], magnitudes[self.size - rank]
            level = np.count_nonzero(magnitudes == last)
            row[:] = last, np.count_nonzero(above == last), level
        return found

    def merged(self, formula: Formula, dtype: str) -> tuple[Array, bool]:
        """The chunk merged and rounded once, in the calling thread's room; whether it is finite."""
        kind = STORAGE[dtype]
        place = self.device.room if self.device else _room
        out = place(-(-self.size * kind.itemsize // 4)).view(kind)[: self.size]
        return out, self._run(formula, out, CODE[kind], self.step)

    def made(self, formula: Formula) -> Array:
        """What a formula gives on this chunk, in float32; valid until the thread merges again."""
        return self.merged(formula, "F32")[0]

    def wrote(self, formula: Formula, dtype: str, direct: Direct) -> bool:
        """Merge the chunk into its file; False if it must be merged otherwise, or once more."""
        kind, target = STORAGE[dtype], direct.target(self.site.tensor)
        strips = (self.strip * kind.itemsize, self.step * kind.itemsize)
        if target is None or any(s % 8 for s in strips):
            return False
        found = self._device_wrote(formula, kind, target) if self.device else None
        if self.device is None:
            place = (CODE[kind], target.descriptor, target.position + self.start * target.width)
            try:
                finite, found = self._loop(formula, place, self.step, np.zeros(1))
            except WriteFailed:  # who writes it otherwise meets the same, and names it
                return False
            found = found if finite else None
        if found is None:
            return False
        direct.written(self.site.tensor, self.start, self.size * kind.itemsize, found)
        return True

    def _device_wrote(self, formula: Formula, kind: Any, target: FilePlace) -> int | None:
        """The checksum of what was written; None if it was not."""
        assert self.device is not None
        drain = drain_from(target, self.start)
        rows = self._named(self._stored(reference=formula.reads_reference), formula.reads_reference)
        if not self.device.write(rows, formula, self.step, CODE[kind], drain):
            return None
        self.source.done(self.site.tensor, self.start, self.stop)
        return int(drain.checksum[0])

    def copied(self, formula: Formula, dtype: str) -> Array | None:
        """The expert's own stored values, where the merge is nothing else and they are finite."""
        if not formula.is_copy:
            return None
        (row,) = self._stored(reference=False)
        if row.dtype != STORAGE[dtype]:
            return None
        with named_reads():
            raw = row.array()
        return raw if is_finite(raw) else None

    def norm(self, formula: Formula, tile: int) -> float:
        """‖τ‖₁ of what a formula gives, added up tile by tile."""
        total = np.zeros(1)
        self._run(formula, total, loops.NORM, tile)
        return float(total[0])

    def lead_of_plus(self, formula: Formula) -> int:
        """How many more coordinates of this chunk elect + than −."""
        lead = np.zeros(1)
        self._run(formula, lead, loops.LEAD, self.step)
        return int(lead[0])

    def tiles(self, less: str | None = None, *, reference: bool = False) -> Iterator[Tile]:
        """Tiles with θ_d in the experts' rows, or θ_d − θ_ref with less = "reference".

        With `reference`, its values are one more row.
        """
        stored = self._stored(reference=bool(less) or reference)
        rows = len(self.site.experts) + reference
        for start in range(self.start, self.stop, self.step):
            tile = Tile(start, *_rows(rows, min(self.step, self.stop - start)))
            first = start - self.start
            here = table([row.part(first, first + tile.out.size) for row in stored])
            with named_reads():
                fine = load_rows(here[:rows], here[-1:] if less else here[:0], tile.experts)
            self._check(fine, reference=bool(less) or reference)
            yield tile
        self.source.done(self.site.tensor, self.start, self.stop)

    def solve(self, program: Callable[[Algebra], _Made]) -> _Made:
        """program(algebra), where the job solves."""
        if self.device is not None:
            return self.device.solve(self.site.tensor, program)
        from sigmerge.core.algebra import PROCESSOR  # LAPACK, which few methods need

        return program(PROCESSOR)

    def add_reference(self, tile: Tile, factor: float = 1.0) -> None:
        """θ = θ_ref + τ: from the merged task vector in `out` to the merge."""
        values = np.empty((1, tile.out.size), np.float32)
        stop = tile.start + tile.out.size
        raw = self.source.piece("reference", self.site.tensor, tile.start, stop)
        here = table([raw])
        with named_reads():
            fine = load_rows(here, here[:0], values)
        self._check(fine, reference=True)
        add_scaled(tile.out, values[0], factor)

    def _run(self, formula: Formula, out: Array, kind: int, tile: int) -> bool:
        """Merge into `out`, which is one float64 for NORM and LEAD; whether all of it is finite."""
        reference = formula.reads_reference
        rows = self._stored(reference=reference)
        if self.device and self.device.merge(
            self._named(rows, reference), formula, tile, self.step, kind, out
        ):
            self.source.done(self.site.tensor, self.start, self.stop)
            return True
        number = kind in (loops.NORM, loops.LEAD)
        place, total = (0, out) if number else (address_of(out), np.zeros(1))
        return self._loop(formula, (kind, MEMORY, place), tile, total)[0]

    def _loop(
        self, formula: Formula, target: tuple[int, int, int], tile: int, number: Array
    ) -> tuple[bool, int]:
        """Merge by a compiled loop; whether the result is finite, and its checksum in a file."""
        reference = formula.reads_reference
        rows = self._stored(reference=reference)
        where = (self.start, self.size, tile, self.strip, np.array(target, np.int64), number)
        with named_reads():
            fine, stored, found = loops.merge(formula, table(rows), *where)
        self._done()
        self._check(fine, reference=reference)
        return stored, found

    def _done(self, share: float = 1.0) -> None:
        self.source.done(self.site.tensor, self.start, self.stop, share)

    def _by_part(self, arguments: Sequence[Any]) -> Iterator[tuple[StreamChunk, Sequence[Any]]]:
        """The chunk, or its parts if these have sums of their own, with a kernel's arguments."""
        if not any(isinstance(each, PartSums) for each in arguments):
            yield self, arguments
            return
        length = _part(self.step)
        for number, start in enumerate(range(self.start, self.stop, length)):
            part = replace(self, start=start, stop=min(self.stop, start + length))
            yield part, [_of_part(each, number) for each in arguments]

    def _named(self, values: Sequence[Span], reference: bool) -> StoredRows:
        return StoredRows(self.site.tensor, self.start, self._names(reference), values)

    def _stored(self, *, reference: bool) -> list[Span]:
        """The members' values; a table of them does not keep them alive while a kernel runs."""
        tensor, names = self.site.tensor, self._names(reference)
        return [self.source.piece(name, tensor, self.start, self.stop) for name in names]

    def _names(self, reference: bool) -> tuple[str, ...]:
        return (*self.site.experts, "reference") if reference else self.site.experts

    def _check(self, fine: bool, *, reference: bool) -> None:
        if not fine:
            names = self._names(reference)
            self.source.not_finite(names, self.site.tensor, self.start, self.stop)


def _rows(experts: int, size: int) -> tuple[Array, Array]:
    """Rows for the experts and the result, without gaps between them: kernels see one array."""
    rows = _room((experts + 1) * size).reshape(experts + 1, size)
    return rows[:-1], rows[-1]


def _room(size: int) -> Array:
    """The scratch buffer of the calling thread."""
    return room(size, np.float32, "scratch")


def _of_part(argument: Any, number: int) -> Any:
    """A kernel's argument for one part of a chunk."""
    if isinstance(argument, PartMarks):
        return argument.of(number)
    return argument.sums[number] if isinstance(argument, PartSums) else argument


def _part(step: int) -> int:
    """Coordinates of a part, which is a chunk unless chunks may be longer."""
    return max(CHUNK // step, 1) * step


def chunks(
    site: Site,
    granule: int,
    source: Source,
    state: Any = None,
    statistics: Any = None,
    device: Accelerator | None = None,
    *,
    most: int = CHUNK,
) -> list[StreamChunk]:
    """A tensor cut into chunks of whole parts, whose tiles start at multiples of the granule."""
    step = max(TILE // granule, 1) * granule
    length = max(most // _part(step), 1) * _part(step)
    return [
        StreamChunk(
            site,
            start,
            min(site.size, start + length),
            step,
            granule,
            source,
            state,
            statistics,
            device,
        )
        for start in range(0, site.size, length)
    ]


def batches(chunks: Iterable[StreamChunk]) -> Iterator[list[StreamChunk]]:
    """Small chunks together, so that many small tensors are few items of work."""
    batch: list[StreamChunk] = []
    size = 0
    for chunk in chunks:
        if batch and size + chunk.size > CHUNK:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += chunk.size
    if batch:
        yield batch


def ahead(items: Iterable[Any], prefetch: Callable[[Any], None]) -> Iterator[Any]:
    """Yield items in order; prefetches the next one meanwhile."""
    upcoming = iter(items)
    waiting: deque[Any] = deque()
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
    statistics: Any = None
    device: Accelerator | None = None
    anywhere: Callable[[Site], bool] = lambda site: False
    """Whether the chunks of a tensor may be longer."""

    def survey(self, passes: Passes) -> Any:
        """Drive a generator of passes over the whole model to its result."""

        def run(step: Pass) -> Any:
            total = None
            for part in self._map(step.visit, self._visited(step, self.ahead(self.blocks))):
                total = step.fold(total, part)
            return total

        return drive(passes, run)

    def parts(self, step: Pass, block: Sequence[Site]) -> Iterator[Any]:
        """The results of a pass for all chunks of a block, in order."""
        return self._map(step.visit, self._visited(step, [block]))

    def _visited(self, step: Pass, blocks: Iterable[Sequence[Site]]) -> Iterator[StreamChunk]:
        """The chunks of one block after another, so that no thread waits for the end of a block."""
        for block in blocks:
            states = self.prepare(block, step.prepare) if step.prepare else {}
            yield from self._chunks(block, states)

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

    def merge(
        self,
        operator: Operator,
        blocks: Sequence[Sequence[Site]],
        survey: Any,
        dtypes: Mapping[str, str],
        write: Write,
        direct: Direct | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Merge block after block; after each, in order, what the operator noted, by tensor.

        What the compiled loops do not write to `direct` themselves is handed to `write`. Several
        blocks are at work, so that the next ones fill the threads which the end of a pass over the
        first leaves idle.
        """

        def one(block: Sequence[Site]) -> dict[str, Any]:
            states = self.prepare(block, lambda site: operator.prepare(site, survey))
            notes: dict[str, Any] = {}

            def visit(chunk: StreamChunk) -> None:
                dtype = dtypes[chunk.site.tensor]
                for start, raw in merge_chunk(operator, chunk, survey, dtype, direct):
                    write(chunk.site.tensor, start, raw)
                if chunk.notes:
                    notes[chunk.site.tensor] = chunk.notes

            for _ in self._map(visit, self._chunks(block, states)):
                pass
            return notes

        return self.workers.overlap(
            one, self.ahead(blocks), most=max(2, min(self.workers.threads // 2, 8))
        )

    def ahead(self, blocks: Iterable[Sequence[Site]]) -> Iterator[Sequence[Site]]:
        return ahead(blocks, lambda block: self.source.prefetch(site.tensor for site in block))

    def _chunks(self, block: Sequence[Site], states: Mapping[str, Any]) -> list[StreamChunk]:
        return [
            chunk
            for site in block
            for chunk in chunks(
                site,
                self.granule(site),
                self.source,
                states.get(site.tensor),
                self.statistics,
                self.device,
                most=self._most if self.anywhere(site) else CHUNK,
            )
        ]

    @cached_property
    def _most(self) -> int:
        """Coordinates of a chunk that may be longer."""
        if self.device:
            return LONG_CHUNK
        if not self.source.in_files:
            return CHUNK
        size = sum(site.size for block in self.blocks for site in block)
        share = size // (TURNS * self.workers.threads)
        return min(max(share // CHUNK, 1) * CHUNK, LONG_CHUNK)

    def _map(self, visit: Callable[[Any], Any], items: Iterable[StreamChunk]) -> Iterator[Any]:
        """The results for all chunks, in order."""
        for results in self.workers.map(lambda some: [visit(c) for c in some], batches(items)):
            yield from results

    def _round(self, sites: Sequence[Site], steps: Mapping[str, Pass]) -> dict[str, Any]:
        items = self._chunks(sites, {})
        results = self._map(lambda chunk: steps[chunk.site.tensor].visit(chunk), items)
        totals: dict[str, Any] = dict.fromkeys(steps)
        for chunk, part in zip(items, results, strict=True):
            name = chunk.site.tensor
            totals[name] = steps[name].fold(totals[name], part)
        return totals


def merge_chunk(
    operator: Operator, chunk: StreamChunk, survey: Any, dtype: str, direct: Direct | None = None
) -> Iterator[tuple[int, Array]]:
    """The stored values of a merged chunk, with the index of their first; valid until the next.

    By the operator's formula in one call, or tile by tile where it has none. Nothing, if that call
    wrote them already.
    """
    formula = operator.formula(chunk, survey)
    lenient = chunk.source.allow_nonfinite
    if formula is None:
        for tile in operator.merge(chunk, survey):
            if operator.gives_vector:
                chunk.add_reference(tile)
            yield tile.start, rounded(chunk.site.tensor, tile.start, tile.out, dtype, lenient)
        return
    if operator.gives_vector:
        formula = formula.plus_reference(1.0)
    if (stored := chunk.copied(formula, dtype)) is not None:
        yield chunk.start, stored
        chunk.source.done(chunk.site.tensor, chunk.start, chunk.stop)
        return
    if direct is not None and chunk.wrote(formula, dtype, direct):
        return
    raw, finite = chunk.merged(formula, dtype)
    if not finite:
        values = chunk.merged(formula, "F32")[0].copy()
        raw = rounded(chunk.site.tensor, chunk.start, values, dtype, lenient)
    yield chunk.start, raw


def rounded(tensor: str, start: int, values: Array, dtype: str, lenient: bool = False) -> Array:
    """float32 values rounded once to the stored type; overflow is an error.

    `lenient` lets through what was not finite before it was rounded.
    """
    raw = np.empty(values.size, STORAGE[dtype])
    if not NARROW[dtype](values, raw):
        if lenient and dtype == "BF16":
            raw[np.isnan(values)] = 0x7FC0  # rounding can turn a NaN into infinity or 0
        wrong = _overflows(raw, dtype) & (np.isfinite(values) if lenient else True)
        if wrong.any():
            raise OutputError(
                f"{tensor}: the result at flat index {start + int(np.flatnonzero(wrong)[0])} is "
                f"not finite in {dtype}. The weights or the scale are too large: lower them, or "
                "write a wider dtype."
            )
    return raw


def _overflows(raw: Array, dtype: str) -> Any:
    return (raw & 0x7F80) == 0x7F80 if dtype == "BF16" else ~np.isfinite(raw)


def drive(passes: Generator[Pass, Any, Any], run: Callable[[Pass], Any]) -> Any:
    """Run every pass of a generator, and send it the result; returns what the generator does."""
    reply = None
    while True:
        try:
            step = passes.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = run(step)
