"""What was written into the shards of an output, and whether it is still there.

Every piece leaves a checksum of the bytes in memory, before the system has them. Reading the pieces
back shows whether the shards hold what was written: after an interruption, and before publishing.
A checksum detects accidents: a truncated, zeroed or mixed-up shard. SHA-256 identifies the result.
It is computed in file order by a thread of its own, as far as tensors are complete, from pages that
the system still holds.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sigmerge.kernels.checksum import checksum

READ_BACK = 1 << 18
"""Bytes that are read back at a time; they fit into a core's own cache."""

WrittenPiece = tuple[int, int, int]
"""Position in the tensor in bytes, length, checksum."""


@dataclass(frozen=True)
class ShardBytes:
    """The bytes of a tensor in a shard."""

    shard: int
    begin: int
    nbytes: int


@dataclass
class _Tensor:
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    filled: int = 0
    journaled: bool = False


class Written:
    """The pieces of every tensor. Threads may note pieces at the same time."""

    def __init__(self, places: dict[str, ShardBytes], handles: Sequence[int]) -> None:
        self._places, self._handles = places, handles
        self._tensors = {name: _Tensor() for name in places}
        self._lock = threading.Lock()
        self._hasher = _Hasher(handles, self._in_file_order())

    def note(self, tensor: str, position: int, nbytes: int, found: int) -> None:
        """A piece that was written, and its checksum; one at the same position is replaced."""
        place = self._places[tensor]
        self._hasher.rewritten(tensor)
        with self._lock:
            entry = self._tensors[tensor]
            if nbytes == place.nbytes:  # all of it, whatever its pieces were before
                entry.pieces.clear()
                entry.filled = 0
            entry.filled += nbytes - entry.pieces.get(position, (0, 0))[0]
            entry.pieces[position] = nbytes, found
            entry.journaled = False

    def fresh(self, tensors: Iterable[str] | None = None) -> dict[str, list[WrittenPiece]]:
        """The pieces of tensors that are complete and were not returned before; all, or these."""
        with self._lock:
            found = {}
            for name in self._tensors if tensors is None else tensors:
                entry = self._tensors[name]
                if not entry.journaled and entry.filled == self._places[name].nbytes:
                    entry.journaled = True
                    found[name] = [(at, *piece) for at, piece in sorted(entry.pieces.items())]
        for name in found:
            self._hasher.complete(name)
        return found

    def restore(self, pieces: dict[str, Sequence[Sequence[int]]]) -> bool:
        """Take over tensors of an earlier run, if the shards still hold these very bytes."""
        for name, listed in pieces.items():
            place = self._places.get(name)
            if place is None or not _covers(listed, place.nbytes):
                return False
        checked = [(self._places[name], tuple(piece)) for name, all_ in pieces.items()
                   for piece in all_]  # fmt: skip
        if not all(self._intact(place, piece) for place, piece in checked):
            return False
        for name, listed in pieces.items():
            entry = self._tensors[name]
            entry.pieces = {at: (nbytes, found) for at, nbytes, found in listed}
            entry.filled, entry.journaled = self._places[name].nbytes, True
            self._hasher.complete(name)
        return True

    def missing(self) -> list[str]:
        """Tensors that were not written, or only in part."""
        return [
            name
            for name, entry in self._tensors.items()
            if not _covers([(at, *piece) for at, piece in sorted(entry.pieces.items())],
                           self._places[name].nbytes)
        ]  # fmt: skip

    def damaged(self, pool: ThreadPoolExecutor) -> list[str]:
        """Tensors whose bytes in the shards are not those that were written."""

        def check(name: str) -> bool:
            pieces = self._tensors[name].pieces.items()
            return all(self._intact(self._places[name], (at, *piece)) for at, piece in pieces)

        names = list(self._tensors)
        return [name for name, good in zip(names, pool.map(check, names), strict=True) if not good]

    def sha256(self) -> list[str]:
        """The digest of every shard; all tensors must be complete."""
        self.fresh()
        return self._hasher.digests()

    def close(self) -> None:
        self._hasher.close()

    def _in_file_order(self) -> list[list[tuple[str, int, int]]]:
        shards: list[list[tuple[str, int, int]]] = [[] for _ in self._handles]
        for name, place in sorted(self._places.items(), key=lambda item: item[1].begin):
            shards[place.shard].append((name, place.begin, place.begin + place.nbytes))
        return shards

    def _intact(self, place: ShardBytes, piece: Sequence[int]) -> bool:
        at, nbytes, wanted = piece
        buffer, found, done = memoryview(bytearray(min(READ_BACK, nbytes))), 0, 0
        while done < nbytes:
            part = buffer[: min(READ_BACK, nbytes - done)]
            if not _fill(self._handles[place.shard], place.begin + at + done, part):
                return False
            found = checksum(part, done, found)
            done += len(part)
        return found == wanted


def _fill(handle: int, position: int, buffer: memoryview) -> bool:
    """Read a buffer full from a position; False if the file ends before."""
    while buffer:
        count = os.preadv(handle, [buffer], position)
        if count == 0:
            return False
        buffer, position = buffer[count:], position + count
    return True


def _covers(pieces: Iterable[Sequence[int]], nbytes: int) -> bool:
    """Whether sorted pieces follow one another from the first byte to the last."""
    position = 0
    for at, length, _ in pieces:
        if at != position:
            return False
        position += length
    return position == nbytes


class _Hasher:
    """SHA-256 of shards, each in file order as far as its tensors are complete."""

    def __init__(
        self, handles: Sequence[int], tensors: Sequence[Sequence[tuple[str, int, int]]]
    ) -> None:
        self._handles, self._tensors = handles, tensors
        self._shard = {name: i for i, shard in enumerate(tensors) for name, _, _ in shard}
        self._complete: set[str] = set()
        self._states = [_State() for _ in handles]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sigmerge-digests")
        self._pending: Future[Any] | None = None

    def complete(self, tensor: str) -> None:
        """This tensor will not be written any more; hash on in its shard."""
        self._complete.add(tensor)
        self._pending = self._thread.submit(self._advance, self._shard[tensor])

    def rewritten(self, tensor: str) -> None:
        """This tensor changes; what was hashed of it is forgotten."""
        if tensor in self._complete:
            state = self._states[self._shard[tensor]]
            with state.lock:
                self._complete.discard(tensor)
                state.begin_again()

    def digests(self) -> list[str]:
        for shard in range(len(self._handles)):
            self._pending = self._thread.submit(self._advance, shard)
        if self._pending:
            self._pending.result()
        return [state.value.hexdigest() for state in self._states]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _advance(self, shard: int) -> None:
        state = self._states[shard]
        with state.lock:
            while state.tensor < len(self._tensors[shard]):
                name, _, end = self._tensors[shard][state.tensor]
                if name not in self._complete:
                    return
                state.read(self._handles[shard], end)
                state.tensor += 1
            state.read(self._handles[shard], os.fstat(self._handles[shard]).st_size)


class _State:
    """How far a shard is hashed: bytes, and tensors in file order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begin_again()

    def begin_again(self) -> None:
        self.value, self.reached, self.tensor = hashlib.sha256(), 0, 0

    def read(self, handle: int, end: int) -> None:
        buffer = memoryview(bytearray(READ_BACK))
        while self.reached < end:
            part = buffer[: min(READ_BACK, end - self.reached)]
            if not _fill(handle, self.reached, part):
                return  # truncated; the pieces show it
            self.value.update(part)
            self.reached += len(part)
