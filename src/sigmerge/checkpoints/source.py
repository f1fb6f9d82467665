"""A pool as the engine's source of stored values."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.header import ITEM_SIZE, Tensor
from sigmerge.checkpoints.reader import Reader
from sigmerge.errors import PoolError
from sigmerge.kernels import TILE
from sigmerge.kernels.convert import WIDEN


class PoolSource:
    """Reads members by name. NaN or infinity stops the run unless it is allowed.

    Use as a context manager, or call `close`: files stay mapped and a thread reads ahead until
    then.
    """

    def __init__(self, members: dict[str, Checkpoint], *, allow_nonfinite: bool = False) -> None:
        self.members = members
        self.reader = Reader()
        self.allow_nonfinite = allow_nonfinite
        self._read = 0.0
        self._lock = threading.Lock()
        self._raw: dict[tuple[str, str], np.ndarray[Any, Any]] = {}

    def __enter__(self) -> PoolSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._raw.clear()
        self.reader.close()

    @property
    def bytes_read(self) -> int:
        return int(self._read)

    def fill(self, member: str, tensor: str, start: int, out: np.ndarray[Any, Any]) -> None:
        """Write float32 values of a tensor from `start` on into `out`."""
        stored = self.members[member].tensors[tensor]
        raw = self.raw(member, tensor)[start : start + out.size]
        if not WIDEN[stored.dtype](raw, out) and not self.allow_nonfinite:
            self._refuse(member, tensor, start, out)

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
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise PoolError(
            f"{member}: tensor {tensor} holds {values[place]} at flat index {start + place} "
            f"({self.members[member].tensors[tensor].file}). Repair the checkpoint, or pass "
            "--allow-nonfinite."
        )

    def raw(self, member: str, tensor: str) -> np.ndarray[Any, Any]:
        """A whole tensor as it is stored; nothing is read before it is touched."""
        key = member, tensor
        if key not in self._raw:
            self._raw[key] = self.reader.raw(self.members[member].tensors[tensor])
        return self._raw[key]

    def done(self, tensor: str, start: int, stop: int, read: float = 1.0) -> None:
        """These coordinates, or that share of them, were read and are not needed for now."""
        stored = self._stored(tensor)
        self.reader.release((one, start, stop) for one in stored)
        passed = (stop - start) * sum(ITEM_SIZE[one.dtype] for one in stored)
        with self._lock:
            self._read += passed * read

    def release(self, member: str, tensor: str) -> None:
        """This member's values are not needed for now, but were not read for the last time."""
        stored = self.members[member].tensors[tensor]
        self.reader.release([(stored, 0, stored.size)])

    def prefetch(self, tensors: Iterable[str]) -> None:
        for tensor in tensors:
            for stored in self._stored(tensor):
                self.reader.prefetch(stored)

    def _stored(self, tensor: str) -> list[Tensor]:
        """A tensor in all members that have it; members of a stacked model have some layers."""
        return [m.tensors[tensor] for m in self.members.values() if tensor in m.tensors]
