"""What was written into the shards of an output, and whether it is still there.

Every piece leaves a checksum of the bytes in memory, before the system has them. Reading the pieces
back shows whether the shards hold what was written: after an interruption, and before publishing.
A checksum detects accidents: a truncated, zeroed or mixed-up shard. A digest identifies the result.
It is computed piece by piece of a shard (see files/digests.py) as soon as the tensors in a piece
are complete, from pages that the system still holds, while other tensors are made. The disk gets a
piece at the same time, so that little is left to be written when the result is synced.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from sigmerge.files.apart import leaf_digests
from sigmerge.files.digests import RUN_BYTES, combined, leaf_rule
from sigmerge.files.regular import begin_sync
from sigmerge.kernels.window import file_checksum

READ_BACK = 64 << 20
"""Bytes that a thread reads back in one call, a multiple of eight: with many threads a call costs
tens of microseconds, for which each waits for Python's lock."""

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

    def __init__(
        self,
        places: dict[str, ShardBytes],
        handles: Sequence[int],
        sizes: Sequence[int],
        threads: int,
        *,
        durable: bool = False,
    ) -> None:
        self._places, self._handles = places, handles
        self._tensors = {name: _Tensor() for name in places}
        self._lock = threading.Lock()
        self._hasher = _Hasher(places, handles, sizes, threads, durable)

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
        parts = [
            (name, at, done, min(READ_BACK, nbytes - done))
            for name, entry in self._tensors.items()
            for at, (nbytes, _) in entry.pieces.items()
            for done in range(0, nbytes, READ_BACK)
        ]

        def read_back(part: tuple[str, int, int, int]) -> int | None:
            name, at, done, nbytes = part
            place = self._places[name]
            begin = place.begin + at + done
            return file_checksum(self._handles[place.shard], begin, nbytes, done)

        found: Counter[tuple[str, int]] = Counter()
        wrong: set[str] = set()
        for (name, at, *_), part in zip(parts, pool.map(read_back, parts), strict=True):
            if part is None:
                wrong.add(name)
            else:
                found[name, at] += part
        for name, entry in self._tensors.items():
            if any(found[name, at] % 2**64 != known for at, (_, known) in entry.pieces.items()):
                wrong.add(name)
        return [name for name in self._tensors if name in wrong]

    def digests(self) -> list[str]:
        """The digest of every shard; all tensors must be complete."""
        self.fresh()
        return self._hasher.digests()

    def close(self) -> None:
        self._hasher.close()

    def _intact(self, place: ShardBytes, piece: Sequence[int]) -> bool:
        at, nbytes, wanted = piece
        return file_checksum(self._handles[place.shard], place.begin + at, nbytes, 0) == wanted


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


class _Hasher:
    """Digests of the pieces of shards, each once all tensors in it are complete."""

    def __init__(
        self,
        places: dict[str, ShardBytes],
        handles: Sequence[int],
        sizes: Sequence[int],
        threads: int,
        durable: bool,
    ) -> None:
        self._handles, self._durable = handles, durable
        self._rules = [leaf_rule(size) for size in sizes]
        self._pieces = [
            [_HashedPiece(shard, at, min(at + RUN_BYTES, size)) for at in range(0, size, RUN_BYTES)]
            for shard, size in enumerate(sizes)
        ]
        self._of = {name: self._touched(place) for name, place in places.items()}
        for name, pieces in self._of.items():
            for piece in pieces:
                piece.tensors.add(name)
        self._complete: set[str] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="sigmerge-digests")

    def complete(self, tensor: str) -> None:
        """This tensor will not be written any more; pieces that lacked it alone are hashed."""
        with self._lock:
            if tensor in self._complete:
                return
            self._complete.add(tensor)
            for piece in self._of[tensor]:
                if piece.tensors <= self._complete:
                    piece.digest = self._pool.submit(self._hash, piece)

    def rewritten(self, tensor: str) -> None:
        """This tensor changes; what was hashed of it is hashed again when it is complete."""
        with self._lock:
            self._complete.discard(tensor)

    def digests(self) -> list[str]:
        """By shard; all tensors must be complete."""
        with self._lock:
            every = [piece for pieces in self._pieces for piece in pieces]
            for piece in every:
                if piece.digest is None:  # a piece without tensors
                    piece.digest = self._pool.submit(self._hash, piece)
        found = {id(piece): piece.digest.result() for piece in every if piece.digest}
        return [combined([found[id(piece)] for piece in pieces]) for pieces in self._pieces]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _touched(self, place: ShardBytes) -> list[_HashedPiece]:
        """The pieces that hold bytes of a tensor; a tensor without bytes touches none."""
        pieces = self._pieces[place.shard]
        first, last = place.begin // RUN_BYTES, (place.begin + place.nbytes - 1) // RUN_BYTES
        return pieces[first : last + 1] if place.nbytes else []

    def _hash(self, piece: _HashedPiece) -> bytes:
        if self._durable:
            begin_sync(self._handles[piece.shard], piece.begin, piece.end - piece.begin)
        handle, rule = self._handles[piece.shard], self._rules[piece.shard]
        # A shard that was truncated has other digests; the checksums show it.
        return leaf_digests(handle, piece.begin, piece.end, *rule)


@dataclass(eq=False)
class _HashedPiece:
    """A run of bytes of a shard that is hashed by itself."""

    shard: int
    begin: int
    end: int
    tensors: set[str] = field(default_factory=set)
    """Those that have bytes in it."""
    digest: Future[bytes] | None = None
