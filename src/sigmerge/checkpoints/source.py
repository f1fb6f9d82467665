"""A pool as the engine's source of float32 values."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.header import ITEM_SIZE
from sigmerge.checkpoints.reader import Reader
from sigmerge.errors import PoolError
from sigmerge.kernels import TILE
from sigmerge.kernels.convert import STORAGE, WIDEN
from sigmerge.kernels.merge import add_difference, add_stored

_ADDABLE = STORAGE["BF16"], STORAGE["F32"]


class PoolSource:
    """Reads members by name. NaN or infinity stops the run unless it is allowed."""

    def __init__(self, members: dict[str, Checkpoint], *, allow_nonfinite: bool = False) -> None:
        self.members = members
        self.reader = Reader()
        self.allow_nonfinite = allow_nonfinite
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._raw: dict[tuple[str, str], np.ndarray[Any, Any]] = {}

    def fill(self, member: str, tensor: str, start: int, out: np.ndarray[Any, Any]) -> None:
        stored = self.members[member].tensors[tensor]
        raw = self.raw(member, tensor)[start : start + out.size]
        if not WIDEN[stored.dtype](raw, out):
            self._refuse(member, tensor, start, out)

    def add(
        self,
        member: str,
        tensor: str,
        start: int,
        weight: float,
        out: np.ndarray[Any, Any],
        *,
        fresh: bool,
        less: str | None = None,
    ) -> None:
        members = [member] if less is None else [member, less]
        rows = [self.raw(name, tensor)[start : start + out.size] for name in members]
        if any(row.dtype not in _ADDABLE or row.dtype != rows[0].dtype for row in rows):
            rows = [np.empty(out.size, np.float32) for _ in members]
            for name, row in zip(members, rows, strict=True):
                self.fill(name, tensor, start, row)
        kernel = add_stored if less is None else add_difference
        if not kernel(*rows, weight, fresh, out):
            for name in members:
                self.fill(name, tensor, start, np.empty(out.size, np.float32))

    def check(self, member: str, tensor: str) -> None:
        """Stop if a tensor that is only copied holds NaN or infinity."""
        size = self.members[member].tensors[tensor].size
        values = np.empty(min(size, TILE), np.float32)
        for start in range(0, size, TILE):
            self.fill(member, tensor, start, values[: size - start])

    def _refuse(self, member: str, tensor: str, start: int, values: np.ndarray[Any, Any]) -> None:
        if not self.allow_nonfinite:
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

    def done(self, tensor: str, start: int, stop: int) -> None:
        passed = 0
        for checkpoint in self.members.values():
            stored = checkpoint.tensors[tensor]
            self.reader.release(stored, start, stop)
            passed += (stop - start) * ITEM_SIZE[stored.dtype]
        with self._lock:
            self.bytes_read += passed

    def prefetch(self, tensors: Iterable[str]) -> None:
        for tensor in tensors:
            for checkpoint in self.members.values():
                self.reader.prefetch(checkpoint.tensors[tensor])
