"""Tensors of remote files: range requests, and prefetching within a memory budget."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from sigmerge.checkpoints.header import Tensor
from sigmerge.errors import PoolError
from sigmerge.files.objects import RemoteFile

UNIT = 8 << 20
"""Bytes of one request when reading ahead."""
AHEAD_BYTES = 1 << 30
"""Maximum bytes buffered or requested; a reader that is ahead may add one unit."""
CONNECTIONS = 16
Passing: TypeAlias = Callable[[RemoteFile, int, bytes], None]
"""Called with bytes that were read of a file, and their position."""


@dataclass(eq=False)
class _Unit:
    """Bytes [begin, end) of a file: a part of a tensor, or small ones that lie side by side."""

    file: RemoteFile
    begin: int
    end: int
    turn: tuple[int, int]
    """Order of use: number of the tensor, position in it."""
    left: int
    """Bytes that no reader has taken yet."""
    data: Future[bytes] | None = None
    """None until it is requested."""


class ReadAhead:
    """Requests units in order of use; what a reader needs earlier is requested at once.

    What was read stays for the next pass over it, until its room is needed.
    """

    def __init__(self, passing: Passing | None = None) -> None:
        self._passing = passing
        self._lock = threading.Lock()
        self._units: dict[str, list[_Unit]] = {}
        self._waiting: deque[_Unit] = deque()
        self._spent: dict[_Unit, None] = {}
        """Units that were read, the one that was read longest ago first."""
        self._held = 0
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="sigmerge-storage")

    def close(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._spent.clear()
        self._pool.shutdown(cancel_futures=True)
        self._units.clear()

    def want(self, turns: Sequence[Sequence[tuple[RemoteFile, Tensor]]]) -> None:
        """These tensors are read soon, each once: in turn, and those of one turn side by side."""
        with self._lock:
            wanted: dict[RemoteFile, list[tuple[int, int, int]]] = {}
            for turn, tensors in enumerate(turns):
                for file, tensor in tensors:
                    runs = self._absent(file, tensor.begin, tensor.end)
                    wanted.setdefault(file, []).extend((*run, turn) for run in runs)
            found = [unit for file, runs in wanted.items() for unit in _units(file, sorted(runs))]
            for unit in sorted(found, key=lambda unit: unit.turn):
                known = self._units.setdefault(unit.file.url, [])
                known.insert(bisect_right(known, unit.begin, key=_begin), unit)
                self._waiting.append(unit)
            self._send()

    def read(self, file: RemoteFile, begin: int, end: int) -> bytearray:
        """Bytes [begin, end) of a file."""
        out, at = bytearray(end - begin), begin
        while at < end:
            with self._lock:
                unit = self._find(file, at)
                stop = min(end, unit.end if unit else self._next(file, at, end))
                data = self._request(unit) if unit else None
            if unit is None or data is None:
                found = self._fetched(file, at, stop)
            else:
                found = data.result()[at - unit.begin : stop - unit.begin]
                self._taken(unit, stop - at)
            if len(found) < stop - at:
                raise PoolError(f"{file.url}: became shorter while it was read.")
            out[at - begin : stop - begin] = found
            at = stop
        return out

    def _find(self, file: RemoteFile, at: int) -> _Unit | None:
        known = self._units.get(file.url, [])
        place = bisect_right(known, at, key=_begin)
        return known[place - 1] if place and at < known[place - 1].end else None

    def _next(self, file: RemoteFile, at: int, end: int) -> int:
        """Where the next unit after a position begins, at `end` at the latest."""
        known = self._units.get(file.url, [])
        place = bisect_right(known, at, key=_begin)
        return min(known[place].begin, end) if place < len(known) else end

    def _absent(self, file: RemoteFile, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The runs between two positions that no unit has; units there are wanted once more."""
        while begin < end:
            unit = self._find(file, begin)
            stop = min(end, unit.end) if unit else self._next(file, begin, end)
            if unit is None:
                yield begin, stop
            else:
                unit.left = max(unit.left, 0) + stop - begin
                self._spent.pop(unit, None)
            begin = stop

    def _taken(self, unit: _Unit, count: int) -> None:
        with self._lock:
            unit.left -= count
            if unit.left <= 0 and self._find(unit.file, unit.begin) is unit:
                self._spent.pop(unit, None)
                self._spent[unit] = None
                self._send()

    def _send(self) -> None:
        """Request what waits while there is room, or room can be made; the caller has the lock."""
        while self._waiting:
            while self._held + UNIT > AHEAD_BYTES and self._spent:
                unit = next(iter(self._spent))
                del self._spent[unit]
                self._units[unit.file.url].remove(unit)
                self._held -= unit.end - unit.begin
            if self._held and self._held + UNIT > AHEAD_BYTES:
                return
            self._request(self._waiting.popleft())

    def _request(self, unit: _Unit) -> Future[bytes]:
        if unit.data is None:
            self._held += unit.end - unit.begin
            unit.data = self._pool.submit(self._fetched, unit.file, unit.begin, unit.end)
        return unit.data

    def _fetched(self, file: RemoteFile, begin: int, end: int) -> bytes:
        data = file.read(begin, end)
        if self._passing is not None:
            self._passing(file, begin, data)
        return data


def _begin(unit: _Unit) -> int:
    return unit.begin


def _units(file: RemoteFile, runs: Sequence[tuple[int, int, int]]) -> Iterator[_Unit]:
    """Sorted runs (begin, end, turn) as units; runs that touch share one while it has room."""
    unit: _Unit | None = None
    for first, end, turn in runs:
        begin = first
        while begin < end:
            if unit is None or unit.end != begin or unit.end - unit.begin >= UNIT:
                if unit is not None:
                    yield unit
                unit = _Unit(file, begin, begin, (turn, begin - first), 0)
            stop = min(end, unit.begin + UNIT)
            unit.turn = min(unit.turn, (turn, begin - first))
            unit.end, unit.left = stop, stop - unit.begin
            begin = stop
    if unit is not None:
        yield unit
