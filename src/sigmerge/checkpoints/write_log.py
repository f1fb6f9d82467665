"""A log of what was written into the shards of an output, and its check.

Every piece leaves a checksum of the bytes in memory, before the system has them. Reading the pieces
back shows whether the shards hold what was written: after an interruption, and before publishing.
A checksum detects accidents: a truncated, zeroed or mixed-up shard. A digest identifies the result
(see files/digests.py). It is computed from the very bytes that are read back before publishing.
The disk gets a run of a shard as soon as the tensors in it are complete, while other tensors are
made, so that little is left to be written when the result is synced.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sigmerge._native import ReadFailed, read_summed
from sigmerge.checkpoints.header import ITEM_SIZE
from sigmerge.core import Array
from sigmerge.core.buffers import room
from sigmerge.files.digests import combined, leaf_rule
from sigmerge.files.safe_open import begin_sync
from sigmerge.progress import Progress, silent

READ_BACK = 1 << 24
"""Bytes of a shard that a thread reads back at a time, a multiple of leaves: few enough that all
threads end at about the same time."""
SUMMED_AT_ONCE = 1 << 22
"""Bytes of a shard that are read at a time, as many as a leaf of a digest: threads that take fewer
wait for Python's lock more often."""
WORD = 8
"""Bytes of a checksum's word, which may begin before what is read."""
GIVEN = 1 << 26
"""Bytes of a shard that the disk is given at a time."""

WrittenPiece = tuple[int, int, int]
"""Position in the tensor in bytes, length, checksum."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes: shard number and absolute position of its first byte."""

    shard: int
    begin: int
    dtype: str
    size: int

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_SIZE[self.dtype]


@dataclass
class _Tensor:
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    filled: int = 0
    journaled: bool = False


class Written:
    """The pieces of every tensor. Threads may note pieces at the same time."""

    def __init__(
        self,
        places: dict[str, Slot],
        handles: Sequence[int],
        sizes: Sequence[int],
        *,
        durable: bool = False,
    ) -> None:
        self._places, self._handles, self._sizes = places, handles, sizes
        self._tensors = {name: _Tensor() for name in places}
        self._lock = threading.Lock()
        self._disk = _Disk(places, handles) if durable else None

    def note(self, tensor: str, position: int, nbytes: int, found: int) -> None:
        """Record a written piece and its checksum; replaces one at the same position."""
        place = self._places[tensor]
        if self._disk:
            self._disk.rewritten(tensor)
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
        if self._disk:
            for name in found:
                self._disk.complete(name)
        return found

    def restore(self, pieces: dict[str, Sequence[Sequence[int]]]) -> bool:
        """Restore the log of an earlier run for tensors whose bytes are unchanged in the shards."""
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
            if self._disk:
                self._disk.complete(name)
        return True

    def missing(self) -> list[str]:
        """Tensors that were not written completely."""
        return [
            name
            for name, entry in self._tensors.items()
            if not _covers([(at, *piece) for at, piece in sorted(entry.pieces.items())],
                           self._places[name].nbytes)
        ]  # fmt: skip

    def read_back(
        self, pool: ThreadPoolExecutor, progress: Progress = silent
    ) -> tuple[list[str], list[str]]:
        """Tensors whose bytes in the shards are not those that were written, and every shard's
        digest.
        """
        runs, found = self._runs(), Counter[_Piece]()
        wrong: set[str] = set()
        leaves: list[list[bytes]] = [[] for _ in self._sizes]
        done = 0
        for run, read in zip(runs, pool.map(self._read, runs), strict=True):
            done += run.end - run.begin
            progress("reading back", done, sum(self._sizes))
            if read is None:  # the digest is not that of the shard either
                wrong.update(n for n, place in self._places.items() if place.shard == run.shard)
                continue
            leaves[run.shard].append(read[0])
            for piece, total in zip(run.pieces, read[1], strict=True):
                found[piece] += total
        for name in self._tensors:
            if any(found[piece] % 2**64 != piece.known for piece in self._pieces(name)):
                wrong.add(name)
        damaged = [name for name in self._tensors if name in wrong]
        return damaged, [combined(digests) for digests in leaves]

    def close(self) -> None:
        if self._disk:
            self._disk.close()

    def _pieces(self, name: str) -> Iterator[_Piece]:
        place = self._places[name]
        for at, (nbytes, known) in self._tensors[name].pieces.items():
            yield _Piece(name, place.begin + at, place.begin + at + nbytes, known)

    def _runs(self) -> list[_Run]:
        """All bytes of the shards, with the pieces that lie in each run of them."""
        lengths = [max(READ_BACK, leaf_rule(size).size) for size in self._sizes]
        runs = [
            [_Run(shard, at, min(at + length, size), []) for at in range(0, size, length)]
            for shard, (size, length) in enumerate(zip(self._sizes, lengths, strict=True))
        ]
        for name, place in self._places.items():
            for piece in self._pieces(name):
                for number in _touched(piece.begin, piece.end, lengths[place.shard]):
                    runs[place.shard][number].pieces.append(piece)
        return [run for of_shard in runs for run in of_shard]

    def _read(self, run: _Run) -> tuple[bytes, list[int]] | None:
        """The digests of a run's leaves, and its part of the pieces' checksums.

        None if the shard ends before.
        """
        handle, rule = self._handles[run.shard], leaf_rule(self._sizes[run.shard])
        places = np.array([piece[1:3] for piece in run.pieces], np.int64).reshape(-1, 2)
        totals, leaves = np.zeros(len(places), np.uint64), []
        try:
            for start in range(run.begin, run.end, rule.size):
                leaf = rule.hasher()
                for data in _read_all(
                    handle, start, min(start + rule.size, run.end), places, totals
                ):
                    leaf.update(data)
                leaves.append(leaf.digest())
        except ReadFailed:
            return None
        return b"".join(leaves), totals.tolist()

    def _intact(self, place: Slot, piece: Sequence[int]) -> bool:
        at, nbytes, wanted = piece
        begin, totals = place.begin + at, np.zeros(1, np.uint64)
        end = begin + nbytes
        try:
            for _ in _read_all(
                self._handles[place.shard], begin, end, np.array([[begin, end]]), totals
            ):
                pass
        except ReadFailed:
            return False
        return int(totals[0]) == wanted


class _Piece(NamedTuple):
    """A piece of a tensor, where it lies in its shard, and its checksum when it was written."""

    tensor: str
    begin: int
    end: int
    known: int


class _Run(NamedTuple):
    """Bytes of a shard that one thread reads back, and the pieces that have bytes there."""

    shard: int
    begin: int
    end: int
    pieces: list[_Piece]


def _touched(begin: int, end: int, length: int) -> range:
    """The numbers of the runs of a length that hold bytes of a shard; no bytes touch none."""
    return range(begin // length, -(-end // length) if end > begin else 0)


def _read_all(handle: int, begin: int, end: int, places: Array, totals: Array) -> Iterator[Array]:
    """Bytes of a shard, some at a time, each valid until the next; the checksums of pieces grow."""
    for at in range(begin, end, SUMMED_AT_ONCE):
        held = room(WORD + min(SUMMED_AT_ONCE, end - at), np.uint8, "read back")
        read_summed(handle, at, held, places, totals)
        yield held[WORD:]


def _covers(pieces: Iterable[Sequence[int]], nbytes: int) -> bool:
    """Whether sorted pieces follow one another from the first byte to the last.

    Those of a journal may be anything.
    """
    position = 0
    for piece in pieces:
        at, length, _ = piece
        if at != position or length < 0 or any(type(number) is not int for number in piece):
            return False
        position += length
    return position == nbytes


class _Disk:
    """Gives the disk runs of shards, each once all tensors in it are complete."""

    def __init__(self, places: dict[str, Slot], handles: Sequence[int]) -> None:
        self._handles = handles
        self._runs = {
            name: [(at.shard, n) for n in _touched(at.begin, at.begin + at.nbytes, GIVEN)]
            for name, at in places.items()
        }
        self._tensors: dict[tuple[int, int], set[str]] = {}
        for name, runs in self._runs.items():
            for run in runs:
                self._tensors.setdefault(run, set()).add(name)
        self._complete: set[str] = set()
        self._lock = threading.Lock()
        # A full disk queue makes the caller wait.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sigmerge-disk")

    def complete(self, tensor: str) -> None:
        """Mark a tensor as complete: no more writes follow."""
        with self._lock:
            if tensor in self._complete:
                return
            self._complete.add(tensor)
            for run in self._runs[tensor]:
                if self._tensors[run] <= self._complete:
                    self._pool.submit(self._give, *run)

    def rewritten(self, tensor: str) -> None:
        """Mark a tensor as being rewritten; it is synced again when complete."""
        with self._lock:
            self._complete.discard(tensor)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _give(self, shard: int, number: int) -> None:
        begin_sync(self._handles[shard], number * GIVEN, GIVEN)
