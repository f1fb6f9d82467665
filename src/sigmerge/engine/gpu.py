"""Chunks on a GPU: copied there through pinned memory, passed over by torch, copied back.

Every worker thread has its own stream, so that while one thread's chunk is copied another's is
computed and a third's is written. What a pass has copied stays on the device for the next pass over
it, as long as there is room. A chunk that does not fit is taken in ever smaller parts. A pass that
has no counterpart there, or meets a value that is not finite, is left to the processor's loops.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch

from sigmerge.engine.stream import StoredRows
from sigmerge.errors import PoolError
from sigmerge.kernels import TILE, Array, tensors
from sigmerge.kernels.merge import LEAD, NORM, TRIM, Formula
from sigmerge.kernels.stored import BF16, CODE, F32
from sigmerge.kernels.tensor_claims import TensorClaims
from sigmerge.kernels.tensors import Tensors

if TYPE_CHECKING:
    from sigmerge.kernels.algebra import Algebra

_Made = TypeVar("_Made")
KEPT_SHARE = 0.4
"""Part of the free memory in which copies are kept for the next pass."""
BLOCKS = 4
"""Blocks of a repair that share that room."""


class Gpu:
    """Where torch passes over chunks: `cuda`, or `cpu` in tests."""

    def __init__(self, name: str = "cuda", keep: int | None = None) -> None:
        self._device = torch.device(name)
        if keep is None:
            keep = int(KEPT_SHARE * torch.cuda.mem_get_info()[0]) if name == "cuda" else 0
        self._keep, self._kept = keep, _Kept(keep)
        self._local = threading.local()
        self._solving = threading.Lock()

    def merge(
        self, rows: StoredRows, formula: Formula, tile: int, step: int, kind: int, out: Array
    ) -> bool:
        """Fill `out` with stored values, or add NORM or LEAD to its first; whether it was done."""
        if formula.thin in tensors.LEFT_TO_LOOPS:
            return False

        def run(raw: Tensors, length: int) -> bool:
            left, found = formula, []
            for begin in range(0, _size(rows), length):
                part = [row[begin : begin + length] for row in raw]
                result = tensors.merge(left, part, rows.start + begin, tile, kind)
                if result is None:
                    return False
                found.append(result)
                if length < _size(rows) and formula.thin == TRIM:
                    left = left._replace(cuts=tensors.cuts_left(left, part))
            self._give(found, kind, out)
            return True

        # A norm is added up by tiles, so its parts are whole ones.
        return self._fitting(rows, max(tile, step), run, again=kind in (NORM, LEAD))

    def read(self, kernel: Any, rows: StoredRows, *arguments: Any) -> bool:
        """The same as a kernel that reads a chunk; whether it was done."""
        program = tensors.COUNTERPARTS.get(kernel)
        if program is None:
            return False
        results = [each for each in arguments if isinstance(each, np.ndarray)]
        before = [each.copy() for each in results]

        def restore() -> None:
            for each, copy in zip(results, before, strict=True):
                each[...] = copy

        def run(raw: Tensors, length: int) -> bool:
            restore()  # what a longer part did before it ran out of memory
            return all(
                program(
                    [row[begin : begin + length] for row in raw], rows.start + begin, *arguments
                )
                for begin in range(0, _size(rows), length)
            )

        done = self._fitting(rows, TILE, run, again=True)
        if not done:
            restore()
        return done

    def solve(self, tensor: str, program: Callable[[Algebra], _Made]) -> _Made:
        """program(algebra) with matrices on this device: those of one tensor at a time."""
        from sigmerge.kernels.tensor_algebra import TensorAlgebra

        with self._solving:
            try:
                with self._stream():
                    return program(TensorAlgebra(self._device))
            except torch.OutOfMemoryError:
                self._kept.clear()
                torch.cuda.empty_cache()
            try:
                with self._stream():
                    return program(TensorAlgebra(self._device))
            except torch.OutOfMemoryError:
                raise PoolError(
                    f"{tensor}: the GPU's memory does not hold its matrices in float64; free "
                    "some, or use --device cpu."
                ) from None

    def claims(self) -> TensorClaims:
        """The loops of a repair on this device, for one block, whose copies they keep."""
        kept = _Kept(self._keep // BLOCKS)

        def tiles(address: int, kind: int, sizes: Sequence[int]) -> list[torch.Tensor]:
            raw = _at(address, kind, sum(sizes))
            places = [address + raw.itemsize * before for before in accumulate(sizes, initial=0)]
            found = [copy for place in places[:-1] if (copy := kept.get((place,), last=False))]
            if len(found) == len(sizes):
                return [copy for [copy] in found]
            [whole] = self._copied([raw])
            copies = list(whole.split(list(sizes)))
            for place, part in zip(places, copies, strict=False):
                kept.put((place,), [part])
            if self._device.type == "cuda":
                self._local.stream.synchronize()  # the pinned memory is used again
            return copies

        way: type[TensorClaims] = TensorClaims
        if tensors.in_triton(self._device):
            from sigmerge.kernels.triton_claims import TritonClaims as way  # noqa: N813
        return way(self._device, tiles, self._give_to, self._halved)

    def _give_to(self, values: torch.Tensor, address: int) -> None:
        out = _at(address, F32 if values.element_size() == 4 else BF16, len(values))
        self._give([values], BF16, out)

    def _halved(self, first: int, last: int, program: Callable[[int, int], None]) -> None:
        """Run a program over tiles at once or, where memory is short, over halves of them."""
        try:
            with self._stream():
                program(first, last)
            return
        except torch.OutOfMemoryError:
            if last - first == 1:
                raise PoolError(
                    "The GPU's memory does not hold one tile of a repair; free some, or use "
                    "--device cpu."
                ) from None
        self._kept.clear()
        torch.cuda.empty_cache()
        middle = (first + last) // 2
        self._halved(first, middle, program)
        self._halved(middle, last, program)

    def _fitting(
        self, rows: StoredRows, step: int, run: Callable[[Tensors, int], bool], *, again: bool
    ) -> bool:
        """Run a pass over a chunk at once or, where memory is short, over ever smaller parts.

        With `again` the chunk's copies are kept for another pass.
        """
        length = _size(rows)
        while True:
            try:
                with self._stream():
                    return run(self._copies(rows, again=again), length)
            except torch.OutOfMemoryError:
                if length <= step:
                    raise PoolError(
                        f"{rows.tensor}: the GPU's memory does not hold {step:,} coordinates of "
                        f"{len(rows.members)} checkpoints; free some, or use --device cpu."
                    ) from None
            self._kept.clear()
            torch.cuda.empty_cache()
            length = max(step, length // 2 // step * step)

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """The calling thread's own stream; all that it was given is done in the end."""
        if self._device.type != "cuda":
            with torch.inference_mode():
                yield
            return
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(self._local.stream):
            try:
                yield
            finally:
                self._local.stream.synchronize()

    def _copies(self, rows: StoredRows, *, again: bool) -> Tensors:
        """The values on the device: from an earlier pass, or copied now."""
        key = (rows.tensor, rows.start, *rows.members)
        copies = self._kept.get(key, last=not again)
        if copies is None:
            copies = self._copied(rows.values)
            if again:
                self._kept.put(key, copies)
        return copies

    def _copied(self, rows: Sequence[Array]) -> Tensors:
        """Rows on the device; those of one type go over at once and lie below one another."""
        room, offset, staged = self._pinned(sum(values.nbytes for values in rows)), 0, []
        for values in rows:
            place = room[offset : offset + values.nbytes].view(values.dtype)
            np.copyto(place, values)
            staged.append(_typed(place))
            offset += values.nbytes
        if len({row.dtype for row in rows}) > 1:
            return [row.to(self._device, non_blocking=True) for row in staged]
        whole = _typed(room[:offset].view(rows[0].dtype).reshape(len(rows), -1))
        return whole.to(self._device, non_blocking=True).unbind()

    def _pinned(self, size: int) -> Array:
        """The calling thread's room for what is copied to and fro."""
        if self._device.type != "cuda":
            return np.empty(size, np.uint8)
        if not hasattr(self._local, "room") or self._local.room.size < size:
            self._local.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._local.room = self._local.pinned.numpy()
        room: Array = self._local.room
        return room

    def _give(self, found: Tensors, kind: int, out: Array) -> None:
        """Results of all parts to where they belong."""
        if kind == NORM:
            for part in found:
                tensors.add_totals(part, out)
        elif kind == LEAD:
            out[0] += sum(int(part) for part in found)
        else:
            stored = torch.cat(list(found)).view(torch.int32 if out.itemsize == 4 else torch.int16)
            out[...] = self._fetched(stored).view(out.dtype)

    def _fetched(self, stored: torch.Tensor) -> Array:
        """The values in memory; those of a GPU in the calling thread's pinned memory."""
        if self._device.type != "cuda":
            return stored.numpy()
        room = self._pinned(stored.nbytes)[: stored.nbytes]
        place = torch.from_numpy(room).view(stored.dtype)
        place.copy_(stored, non_blocking=True)
        self._local.stream.synchronize()
        return place.numpy()


def _at(address: int, kind: int, count: int) -> Array:
    """The values in memory at an address."""
    dtype = next(dtype for dtype, code in CODE.items() if code == kind)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def _size(rows: StoredRows) -> int:
    return len(rows.values[0])


def _typed(values: Array) -> torch.Tensor:
    """Stored values as a tensor: bit patterns of bfloat16 as numbers."""
    if CODE[values.dtype] == BF16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


CopyKey: TypeAlias = tuple[Any, ...]


class _Kept:
    """Copies for the next pass, the least recently used of which make room for new ones."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._copies: OrderedDict[CopyKey, Tensors] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: CopyKey, *, last: bool) -> Tensors | None:
        """Copies, which the `last` to read them takes away."""
        with self._lock:
            copies = self._copies.pop(key, None)
            if copies is not None and last:
                self._size -= _bytes(copies)
            elif copies is not None:
                self._copies[key] = copies
            return copies

    def put(self, key: CopyKey, copies: Tensors) -> None:
        with self._lock:
            if _bytes(copies) > self._limit or key in self._copies:
                return
            self._copies[key] = copies
            self._size += _bytes(copies)
            while self._size > self._limit:
                self._size -= _bytes(self._copies.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._copies.clear()
            self._size = 0


def _bytes(copies: Tensors) -> int:
    return sum(copy.nbytes for copy in copies)
