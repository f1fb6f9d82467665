"""Chunks on a GPU: copied there through pinned memory, passed over by Triton, copied back.

Every worker thread has its own stream and a ring of pinned memory (`gpu/staging.py`): while one
slot is copied to the device the next is filled, another thread's chunk is computed and a third's
is written. What a pass has copied stays on the device for the next pass over it, as long as there
is room. A chunk that does not fit is taken in ever smaller parts. A pass that has no counterpart
there, or meets a value that is not finite, is left to the processor's loops. Solvers are torch's.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch

from sigmerge._native import read
from sigmerge.core import TILE, Array
from sigmerge.core.dtypes import BF16, CODE, F32, MEMORY, Span
from sigmerge.core.merge import LEAD, NORM, Formula
from sigmerge.core.partial_sums import PartSums
from sigmerge.core.products import signature
from sigmerge.engine.stream import StoredRows
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.opened import named_reads
from sigmerge.gpu import chunk_passes, staging
from sigmerge.gpu.memory import STORED, matrix, no_flag
from sigmerge.gpu.staging import Drain
from sigmerge.gpu.triton_claims import TileCopies, TritonClaims, sizes

if TYPE_CHECKING:
    from sigmerge.core.algebra import Algebra

_Made = TypeVar("_Made")
KEPT_SHARE = 0.4
"""Part of the free memory for copies that are cached for the next pass."""
BLOCKS = 3, 6
"""Blocks of a repair that are at work at a time, and share that room: one is copied there while
another is claimed and a third written. More where all of them have room."""
SENT = 32 << 20
"""Bytes of a block that one worker copies at a time."""
SLOTS, SLOT_BYTES = 8, 1 << 20
"""A thread's ring of pinned memory has so many slots of so many bytes."""
AT_ONCE = 2
"""Threads that launch at a time, and wait for what they launched; those that read or write files
do not count. Each call of torch's lets go of Python's lock: if more threads called at a time, each
would wait for the lock after every call."""
LEAST = 1 << 16
"""Fewest coordinates of a chunk for the device: for fewer, launches take too long."""
READ_ONCE = {signature}
"""Kernels after which no other pass reads the chunk."""


class Gpu:
    """Where programs pass over chunks: `cuda`, or `cpu` where Triton interprets them."""

    def __init__(
        self, name: str = "cuda", keep: int | None = None, least: int | None = None
    ) -> None:
        self._device = torch.device(name)
        self._least = LEAST if least is None else least
        if keep is None:
            keep = int(KEPT_SHARE * torch.cuda.mem_get_info()[0]) if name == "cuda" else 0
        self._keep, self._kept = keep, _Kept(keep)
        self._local = threading.local()
        self._solving = threading.Lock()
        self._launching = threading.Semaphore(AT_ONCE)

    def merge(
        self, rows: StoredRows, formula: Formula, tile: int, step: int, kind: int, out: Array
    ) -> bool:
        """Fill `out` with stored values, or add NORM or LEAD to its first; whether it was done."""
        if not chunk_passes.has_program(formula) or _size(rows) < self._least:
            return False
        number = kind in (NORM, LEAD)

        def run(raw: torch.Tensor, length: int) -> bool:
            left, flag, total = formula, no_flag(self._device), np.zeros(1)
            for begin in range(0, _size(rows), length):
                part = raw[:, begin : begin + length]
                found = chunk_passes.merge(left, part, rows.start + begin, tile, kind, flag)
                if number:
                    chunk_passes.add_number(found, total)
                else:
                    self.give(found, out[begin : begin + length])
                if length < _size(rows):
                    left = left._replace(cuts=chunk_passes.cuts_left(left, part))
            if flag.item():  # all that the stream was given is done now
                return False
            if number:
                out[0] += total[0]
            return True

        # A norm is added up by tiles, so its parts are whole ones.
        return self._fitting(rows, max(tile, step), run, again=number)

    def write(
        self, rows: StoredRows, formula: Formula, tile: int, kind: int, target: Drain
    ) -> bool:
        """Write stored values into a file; whether it was done."""
        if not chunk_passes.has_program(formula) or _size(rows) < self._least:
            return False
        made: list[torch.Tensor] = []

        def run(raw: torch.Tensor, length: int) -> bool:
            if length < _size(rows):
                return False
            flag = no_flag(self._device)
            found = chunk_passes.merge(formula, raw, rows.start, tile, kind, flag)
            if flag.item():
                return False
            made.append(found)
            return True

        done = self._fitting(rows, tile, run, again=False)
        return done and self.drain(made[0], target)

    def read(self, kernel: Any, rows: StoredRows, *arguments: Any) -> bool:
        """The same as a kernel that reads a chunk; whether it was done."""
        program = chunk_passes.COUNTERPARTS.get(kernel)
        if program is None or _size(rows) < self._least:
            return False

        def run(raw: torch.Tensor, length: int) -> bool:
            if length >= _size(rows):  # it changes nothing before all is computed
                return program(raw, rows.start, *arguments)
            own = [_own(each) for each in arguments]
            for begin in range(0, _size(rows), length):
                given = [_from(each, begin) for each in own]
                if not program(raw[:, begin : begin + length], rows.start + begin, *given):
                    return False
            for each, copy in zip(arguments, own, strict=True):
                _take(each, copy)
            return True

        return self._fitting(rows, TILE, run, again=kernel not in READ_ONCE)

    def select(self, rows: StoredRows, experts: Array, ranks: Array) -> Array | None:
        """`chunk_passes.selected`; None if it is left to passes."""
        if _size(rows) < self._least:
            return None
        found: list[Array | None] = [None]

        def run(raw: torch.Tensor, length: int) -> bool:
            if length >= _size(rows):  # a part of a chunk has no ranks
                found[0] = chunk_passes.selected(raw, experts, ranks)
            return True

        self._fitting(rows, TILE, run, again=True)
        return found[0]

    def solve(self, tensor: str, program: Callable[[Algebra], _Made]) -> _Made:
        """program(algebra) with matrices on this device: those of one tensor at a time."""
        from sigmerge.gpu.algebra import TensorAlgebra

        with self._solving:
            try:
                with self.stream():
                    return program(TensorAlgebra(self._device))
            except torch.OutOfMemoryError:
                self._make_room()
            try:
                with self.stream():
                    return program(TensorAlgebra(self._device))
            except torch.OutOfMemoryError:
                raise PoolError(
                    f"{tensor}: the GPU's memory does not hold its matrices in float64; free "
                    "some, or use --device cpu."
                ) from None

    def room(self, size: int) -> Array:
        """The calling thread's own pinned room for so many float32, valid until it asks again."""
        room: torch.Tensor = self._local.__dict__.get("room", _NOTHING)
        if room.numel() < size:
            pinned = self._device.type == "cuda"
            room = self._local.room = torch.empty(size, dtype=torch.float32, pin_memory=pinned)
        found: Array = room[:size].numpy()
        return found

    def blocks(self, nbytes: int) -> int:
        """How many blocks of a repair are at work at a time, whose members take so many bytes."""
        fewest, most = BLOCKS
        return max(fewest, min(most, self._keep // max(1, nbytes)))

    def claims(self, run: _Map = map, blocks: int = 1) -> TritonClaims:
        """The loops of a repair on this device, for one of `blocks`, whose copies they keep.

        `run` spreads copying over threads.
        """
        return TritonClaims(self._device, _BlockCopies(self, self._keep // blocks, run), self)

    def drain(self, values: torch.Tensor, target: Drain, begun: int = 0) -> bool:
        """Write values into a file, from so many bytes behind its place on; whether it was done.

        They are computed, or will be by the calling thread's stream.
        """
        if self._device.type != "cuda":
            return staging.write_memory(target, _at(values.data_ptr(), values.nbytes), begun)
        ring, stream = self._own_ring().table, self._own_stream().cuda_stream
        place = values.data_ptr(), values.nbytes
        return staging.drain(*place, ring, SLOT_BYTES, stream, begun, target)

    def give(self, values: torch.Tensor, out: Array) -> None:
        """Copy results back to the host; complete when the stream is."""
        _typed(out).copy_(values, non_blocking=True)

    def give_at(self, values: torch.Tensor, address: int) -> None:
        """The same to an address."""
        self.give(values, _at(address, values.nbytes).view(_STORAGE[values.dtype]))

    def halved(self, first: int, last: int, program: Callable[[int, int], None]) -> None:
        """Run a program over tiles at once or, where memory is short, over halves of them."""
        try:
            with self._launching, self.stream():
                program(first, last)
            return
        except torch.OutOfMemoryError:
            if last - first == 1:
                raise PoolError(
                    "The GPU's memory does not hold one tile of a repair; free some, or use "
                    "--device cpu."
                ) from None
        self._make_room()
        middle = (first + last) // 2
        self.halved(first, middle, program)
        self.halved(middle, last, program)

    def _fitting(
        self, rows: StoredRows, step: int, run: Callable[[torch.Tensor, int], bool], *, again: bool
    ) -> bool:
        """Run a pass over a chunk at once or, where memory is short, over ever smaller parts.

        With `again` the chunk's copies are kept for another pass.
        """
        length = _size(rows)
        while True:
            try:
                with self.stream():
                    copies = self._copies(rows, again=again)  # alive until the stream is done
                    with self._launching:
                        return run(copies, length)
            except torch.OutOfMemoryError:
                if length <= step:
                    raise PoolError(
                        f"{rows.tensor}: the GPU's memory does not hold {step:,} coordinates of "
                        f"{len(rows.members)} checkpoints; free some, or use --device cpu."
                    ) from None
            self._make_room()
            length = max(step, length // 2 // step * step)

    @contextmanager
    def launches_of_others(self) -> Iterator[None]:
        """In a program of `halved`: it waits for other threads, which may wait to launch."""
        self._launching.release()
        try:
            yield
        finally:
            self._launching.acquire()

    def _make_room(self) -> None:
        self._kept.clear()
        torch.cuda.empty_cache()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The calling thread's stream; it is synchronised at the end."""
        if self._device.type != "cuda":
            with torch.inference_mode():
                yield
            return
        own = self._own_stream()
        with torch.inference_mode(), torch.cuda.stream(own):
            try:
                yield
            finally:
                own.synchronize()

    def _own_stream(self) -> torch.cuda.Stream:
        """The stream of the calling thread."""
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream()
        found: torch.cuda.Stream = self._local.stream
        return found

    def _copies(self, rows: StoredRows, *, again: bool) -> torch.Tensor:
        """The values on the device: from an earlier pass, or copied now."""
        key = (rows.tensor, rows.start, *rows.members)
        copies = self._kept.get(key, last=not again)
        if copies is None:
            copies = self._copied(rows.values)
            if again:
                self._kept.put(key, copies)
        return copies

    def _copied(self, rows: Sequence[Span]) -> torch.Tensor:
        """Rows on the device, one matrix; those of different types become float32, which has all
        of their values."""
        kinds, length = {CODE[row.dtype] for row in rows}, rows[0].size
        alike = len(kinds) == 1
        with self._for_all():
            kind = STORED[kinds.pop() if alike else F32]
            found = matrix(len(rows), length, kind, self._device)
        if alike:
            apart = found.stride(0) * found.itemsize
            spans = [(r.descriptor, r.position, i * apart, r.nbytes) for i, r in enumerate(rows)]
            self.send(spans, found)
        else:
            for row, place in zip(rows, found, strict=True):
                stored = self.bytes_there(row.nbytes)
                self.send([(row.descriptor, row.position, 0, row.nbytes)], stored)
                place[:length].copy_(stored.view(_TORCH[CODE[row.dtype]]))
        return found[:, :length]

    @contextmanager
    def _for_all(self) -> Iterator[None]:
        """Memory of all threads: what one gives back another takes, whatever its stream."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.stream(torch.cuda.default_stream()):
            yield

    def bytes_there(self, count: int) -> torch.Tensor:
        """Memory of the calling thread's stream that other threads may fill at once."""
        found = torch.empty(count, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return found

    def send(self, spans: Sequence[_Copy], there: torch.Tensor) -> None:
        """Copy bytes to the device, where they are when this returns."""
        if self._device.type != "cuda":
            with named_reads():
                for descriptor, position, place, count in spans:
                    _read(descriptor, position, there.data_ptr() + place, count)
            return
        ring, stream = self._own_ring(), self._own_stream().cuda_stream
        with named_reads():
            lying = np.array(spans, np.int64)
            staging.send(lying, there.data_ptr(), ring.table, SLOT_BYTES, stream)

    def _own_ring(self) -> _Ring:
        """The ring of the calling thread."""
        if not hasattr(self._local, "ring"):
            try:
                staging.driver()
            except RuntimeError as error:
                advice = "Install the driver, or use --device cpu."
                raise RecipeError(f"--device cuda: {error}. {advice}") from None
            self._local.ring = _Ring()
        found: _Ring = self._local.ring
        return found


class _Ring:
    """Slots of pinned memory, each with an event that shows that its copy is done."""

    def __init__(self) -> None:
        self._memory = torch.empty((SLOTS, SLOT_BYTES), dtype=torch.uint8, pin_memory=True)
        self._events = [torch.cuda.Event() for _ in self._memory]
        for event in self._events:
            event.record()  # which makes it
        pairs = zip(self._memory, self._events, strict=True)
        self.table = np.array([(m.data_ptr(), e.cuda_event) for m, e in pairs], np.int64)


_Copy: TypeAlias = tuple[int, int, int, int]
"""A descriptor and a position, or MEMORY and an address; a place on the device; how many bytes."""


def _parts(spans: Iterable[_Copy]) -> list[list[_Copy]]:
    """Spans, cut where needed, in parts of SENT bytes."""
    parts: list[list[_Copy]] = []
    left = 0
    for descriptor, position, place, count in spans:
        done = 0
        while done < count:
            if not left:
                parts.append([])
                left = SENT
            taken = min(count - done, left)
            parts[-1].append((descriptor, position + done, place + done, taken))
            done, left = done + taken, left - taken
    return parts


_Map: TypeAlias = Callable[..., Iterable[Any]]
"""Like `map`: applies a function to every item and returns the results in the items' order."""


class _BlockCopies(TileCopies):
    """The tiles of a block's members on the device, each at a multiple of 256 bytes.

    Members are copied whole, all together before they are read or each when it is read first, as
    long as there is room; else only the tiles that a pass reads, for that pass. The rows of a
    member's tiles tell it from others: an adapter has tensors of its reference.
    """

    def __init__(self, gpu: Gpu, limit: int, run: _Map) -> None:
        self._gpu, self._left, self._run = gpu, limit, run
        self._whole: dict[bytes, tuple[torch.Tensor, Array]] = {}

    def __call__(
        self, rows: Array, edges: Array, first: int, last: int, *, alone: bool = False
    ) -> tuple[torch.Tensor, Array]:
        key = rows.tobytes()
        if key not in self._whole and not alone:
            with self._gpu.launches_of_others():
                self.bring(rows[None], edges)
        if key in self._whole:
            there, places = self._whole[key]
            return there, places[first:last]
        some = sizes(rows[first:last, 0], edges[first : last + 1])
        if alone:
            return self._copied(rows[first:last, 1:], some, map)
        with self._gpu.launches_of_others():
            return self._copied(rows[first:last, 1:], some, self._run)

    def bring(self, rows: Array, edges: Array) -> None:
        each = np.stack([sizes(member[:, 0], edges) for member in rows])
        needed = int(_aligned(each).sum())
        if needed > self._left:
            return
        try:
            there, places = self._copied(rows[..., 1:].reshape(-1, 2), each.ravel(), self._run)
        except torch.OutOfMemoryError:
            if len(rows) == 1:  # of several, some may still have room
                self._left = 0
            return
        self._left -= needed
        for member, row in zip(rows, places.reshape(each.shape), strict=True):
            self._whole[member.tobytes()] = there, row

    def _copied(self, lying: Array, sizes: Array, run: _Map) -> tuple[torch.Tensor, Array]:
        places = _places(sizes)
        there = self._gpu.bytes_there(int(places[-1]) + _aligned(int(sizes[-1])))
        spans = _spans(lying, places, sizes)
        for _ in run(lambda part: self._gpu.send(part, there), _parts(spans)):
            pass
        return there, places


def _places(sizes: Array) -> Array:
    """Where rows of so many bytes begin, each at a multiple of 256."""
    return np.cumsum(_aligned(sizes)) - _aligned(sizes)


def _aligned(sizes: Any) -> Any:
    return -(-sizes // 256) * 256


def _spans(lying: Array, places: Array, sizes: Array) -> Iterator[_Copy]:
    """Spans of what lies together here and there; rows of `lying` are descriptor and position."""
    files, positions = lying[:, 0], lying[:, 1]
    together = [starts[1:] == starts[:-1] + sizes[:-1] for starts in (positions, places)]
    whole = together[0] & together[1] & (files[1:] == files[:-1])
    firsts = np.flatnonzero(np.concatenate([[True], ~whole]))
    lasts = np.concatenate([firsts[1:], [len(sizes)]]) - 1
    counts = places[lasts] + sizes[lasts] - places[firsts]
    found = (files[firsts], positions[firsts], places[firsts], counts)
    return zip(*(each.tolist() for each in found), strict=True)


def _read(descriptor: int, position: int, target: int, count: int) -> None:
    """Copy bytes of a file or of memory into memory, without Python's lock."""
    if descriptor == MEMORY:
        ctypes.memmove(target, position, count)
    else:
        read(descriptor, position, _at(target, count))


def _at(address: int, count: int) -> Array:
    """The bytes in memory at an address."""
    memory: Any = (ctypes.c_char * count).from_address(address)
    return np.frombuffer(memory, np.uint8)


def _own(argument: Any) -> Any:
    """An argument of a program, whose arrays may be changed."""
    if isinstance(argument, PartSums):
        return argument._replace(sums=argument.sums.copy())
    return argument.copy() if isinstance(argument, np.ndarray) else argument


def _from(argument: Any, begin: int) -> Any:
    """The argument of a program that begins so far in a chunk."""
    return argument._replace(begin=begin) if isinstance(argument, PartSums) else argument


def _take(argument: Any, changed: Any) -> None:
    """Copy back what a program has changed."""
    if isinstance(argument, PartSums):
        argument.sums[...] = changed.sums
    elif isinstance(argument, np.ndarray):
        argument[...] = changed


def _size(rows: StoredRows) -> int:
    return rows.values[0].size


_NOTHING = torch.empty(0)
_STORAGE = {torch.int16: np.uint16, torch.float16: np.float16, torch.float32: np.float32}
_TORCH = {**STORED, BF16: torch.bfloat16}
"""The types that torch converts from."""


def _typed(values: Array) -> torch.Tensor:
    """Stored values as a tensor; those of bfloat16 as programs have them."""
    return torch.from_numpy(values.view(np.int16) if CODE[values.dtype] == BF16 else values)


CopyKey: TypeAlias = tuple[Any, ...]


class _Kept:
    """Copies for the next pass, the least recently used of which make room for new ones."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._copies: OrderedDict[CopyKey, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: CopyKey, *, last: bool) -> torch.Tensor | None:
        """Cached copies; the `last` reader removes them."""
        with self._lock:
            copies = self._copies.pop(key, None)
            if copies is not None and last:
                self._size -= copies.nbytes
            elif copies is not None:
                self._copies[key] = copies
            return copies

    def put(self, key: CopyKey, copies: torch.Tensor) -> None:
        with self._lock:
            if copies.nbytes > self._limit or key in self._copies:
                return
            self._copies[key] = copies
            self._size += copies.nbytes
            while self._size > self._limit:
                self._size -= self._copies.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        with self._lock:
            self._copies.clear()
            self._size = 0
