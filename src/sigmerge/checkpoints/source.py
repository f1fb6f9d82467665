"""A pool as the engine's source of stored values."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.header import ITEM_SIZE, Tensor
from sigmerge.checkpoints.lazy import FormedTensor, stored_pieces
from sigmerge.checkpoints.links import is_there
from sigmerge.checkpoints.prefetch import AHEAD_BYTES, Passing
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.remote import place_of
from sigmerge.core import TILE, Array
from sigmerge.core.dtypes import STORAGE, Span, is_finite, load_rows, table
from sigmerge.errors import PoolError
from sigmerge.files.objects import remote_file, remote_folder
from sigmerge.files.opened import named_reads
from sigmerge.files.streaming_digest import HELD

FORMED_AT_ONCE = 16 * TILE
"""Coordinates of a tensor that one worker forms at a time."""


def read_ahead(members: Iterable[Checkpoint]) -> int:
    """Bytes that reading and hashing from a remote store take for these checkpoints at most."""
    return AHEAD_BYTES + HELD if _remote(members) else 0


def _remote(members: Iterable[Checkpoint]) -> bool:
    return any(remote_file(file) for member in members for file in member.files)


@dataclass(frozen=True)
class OpenMembers:
    """Opens checkpoints in another process, which may be on another machine.

    Local folders must lie there under the same names; remote ones get a stand-in there.
    """

    members: Mapping[str, Checkpoint]
    allow_nonfinite: bool
    addresses: Mapping[Path, str]
    """Where the stand-ins among their folders come from."""

    @classmethod
    def of(cls, members: Mapping[str, Checkpoint], *, allow_nonfinite: bool) -> OpenMembers:
        folders = [f for m in members.values() for f in (m.path, m.adapter) if f]
        remote = {folder: found[0] for folder in folders if (found := remote_folder(folder))}
        return cls(members, allow_nonfinite, remote)

    def __call__(self) -> PoolSource:
        for member in self.members.values():
            for folder in (member.path, member.adapter):
                if folder is not None and not is_there(folder):
                    self._bring(folder)
        return PoolSource(dict(self.members), allow_nonfinite=self.allow_nonfinite)

    def _bring(self, folder: Path) -> None:
        url = self.addresses.get(folder)
        if url is None or place_of(url) != folder:
            raise PoolError(
                f"{folder}: is not there on {platform.node()}. Workers on other machines read the "
                "same paths (a shared file system, an equal SIGMERGE_CACHE), or addresses."
            )


class FormedValues:
    """Float32 values of stored and formed tensors."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.kept: dict[Tensor, Array] = {}

    def __call__(self, tensor: Tensor, start: int, stop: int) -> Array:
        out = np.empty(stop - start, np.float32)
        self.fill(tensor, start, out)
        return out

    def raw(self, tensor: Tensor, start: int, stop: int) -> Array:
        """Bytes of a stored tensor."""
        return np.frombuffer(self._reader.bytes(tensor, start, stop), np.uint8)

    def fill(self, tensor: Tensor, start: int, out: Array) -> bool:
        """Values from `start` on; False if any is NaN or infinite."""
        if isinstance(tensor, FormedTensor):
            tensor.form(self, start, out)
            return is_finite(out)
        row = self._reader.span(tensor, start, start + out.size)
        with named_reads():
            return load_rows(table([row]), table([]), out[None])


class PoolSource:
    """Reads members by name. NaN or infinity stops the run unless it is allowed.

    Use as a context manager, or call `close`: files stay open and a thread reads ahead until
    then. `passing` is called with what is read of a remote file.
    """

    def __init__(
        self,
        members: dict[str, Checkpoint],
        *,
        allow_nonfinite: bool = False,
        passing: Passing | None = None,
    ) -> None:
        self.members, self.passing = members, passing
        self.reader = Reader(passing)
        self.allow_nonfinite = allow_nonfinite
        self._read = 0.0
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], Span] = {}
        self._formed = FormedValues(self.reader)

    def __enter__(self) -> PoolSource:
        self.reader.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._held.clear()
        self._formed.kept.clear()
        self.reader.close()

    @property
    def in_files(self) -> bool:
        """Whether all tensors lie in local files: none is formed, and none is remote."""
        formed = (isinstance(t, FormedTensor) for m in self.members.values()
                  for t in m.tensors.values())  # fmt: skip
        return not _remote(self.members.values()) and not any(formed)

    @property
    def in_order(self) -> bool:
        """Whether tensors are best read one behind the other: a remote file is hashed meanwhile."""
        return _remote(self.members.values())

    @property
    def bytes_read(self) -> int:
        return int(self._read)

    def read_elsewhere(self, count: int) -> None:
        """These bytes were read for this job by another process."""
        with self._lock:
            self._read += count

    def fill(self, member: str, tensor: str, start: int, out: np.ndarray[Any, Any]) -> None:
        """Write float32 values of a tensor from `start` on into `out`."""
        stored = self.members[member].tensors[tensor]
        if not self._formed.fill(stored, start, out) and not self.allow_nonfinite:
            self._refuse(member, tensor, start, out)

    def _lies_here(self, stored: Tensor) -> bool:
        """Whether a tensor's bytes are in a local file: not formed, and not remote."""
        return not isinstance(stored, FormedTensor) and self.reader.remote(stored) is None

    def check(self, member: str, tensor: str) -> None:
        """Raise if a tensor that is only copied holds NaN or infinity."""
        self.not_finite([member], tensor, 0, self.members[member].tensors[tensor].size)

    def not_finite(self, members: Sequence[str], tensor: str, start: int, stop: int) -> None:
        """Raise if one of these values is NaN or infinite, unless that is allowed."""
        if self.allow_nonfinite:
            return
        values = np.empty(min(stop - start, TILE), np.float32)
        for begin in range(start, stop, TILE):
            for member in members:
                self.fill(member, tensor, begin, values[: stop - begin])

    def _refuse(self, member: str, tensor: str, start: int, values: np.ndarray[Any, Any]) -> None:
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        place, stored = start + at, self.members[member].tensors[tensor]
        raise PoolError(
            f"{member}: tensor {tensor} holds {values[at]} at flat index {place} "
            f"({self._source_of(stored, place)}). Repair the checkpoint, or pass --allow-nonfinite."
        )

    def _source_of(self, tensor: Tensor, place: int) -> str:
        """The file in which a value that is not finite is stored; or what it was formed of."""
        if not isinstance(tensor, FormedTensor):
            return str(tensor.file)
        pieces = stored_pieces(tensor, place, place + 1)
        for part, first, last in pieces:
            if part.floating and not is_finite(self._formed(part, first, last)):
                return f"{part.name} in {part.file}"
        files = " and ".join(dict.fromkeys(str(part.file) for part, _, _ in pieces))
        return f"formed of {files}"

    def raw(self, member: str, tensor: str) -> Span:
        """A whole tensor as it is stored; see `piece`."""
        return self.piece(member, tensor, 0, self.members[member].tensors[tensor].size)

    def piece(self, member: str, tensor: str, start: int, stop: int) -> Span:
        """A run of a tensor as it is stored; nothing is read before it is touched.

        What is stored nowhere is formed in float32, and what is remote is read, unless it is held.
        """
        held = self._held.get((member, tensor))
        if held is not None:
            return held.part(start, stop)
        stored = self.members[member].tensors[tensor]
        if isinstance(stored, FormedTensor):
            return Span.of(self._formed(stored, start, stop))
        return self.reader.span(stored, start, stop)

    def hold(self, tensors: Sequence[str], run: Callable[..., Iterable[Any]]) -> None:
        """Form or read now, by run(function, items), what does not lie here; `let_go` ends it."""
        work: list[tuple[Tensor, int, Array]] = []
        for tensor in tensors:
            for name, member in self.members.items():
                stored = member.tensors.get(tensor)
                if stored is None or self._lies_here(stored):
                    continue
                formed = isinstance(stored, FormedTensor)
                kind = np.dtype(np.float32) if formed else STORAGE[stored.dtype]
                room = np.empty(stored.size, kind)
                self._held[name, tensor] = Span.of(room)
                starts = range(0, stored.size, FORMED_AT_ONCE)
                work += [(stored, s, room[s : s + FORMED_AT_ONCE]) for s in starts]

        def fill(stored: Tensor, start: int, room: Array) -> None:
            if isinstance(stored, FormedTensor):
                self._formed.fill(stored, start, room)
            else:
                room[:] = self.reader.raw(stored, start, start + room.size)

        for _ in run(lambda one: fill(*one), work):
            pass

    def let_go(self, tensors: Iterable[str]) -> None:
        for tensor in tensors:
            for name, member in self.members.items():
                stored = member.tensors.get(tensor)
                if stored is not None and not self._lies_here(stored):
                    self._held.pop((name, tensor), None)

    def done(self, tensor: str, start: int, stop: int, read: float = 1.0) -> None:
        """These coordinates, or that share of them, were read."""
        pieces = [p for t in self._stored(tensor) for p in stored_pieces(t, start, stop)]
        passed = sum((last - first) * ITEM_SIZE[one.dtype] for one, first, last in pieces)
        with self._lock:
            self._read += passed * read

    def prefetch(self, tensors: Iterable[str]) -> None:
        self.reader.prefetch([
            [part for t in self._stored(tensor) for part, _, _ in stored_pieces(t, 0, t.size)]
            for tensor in tensors
        ])  # fmt: skip

    def _stored(self, tensor: str) -> list[Tensor]:
        """A tensor in all members that have it; members of a stacked model have some layers."""
        return [m.tensors[tensor] for m in self.members.values() if tensor in m.tensors]
