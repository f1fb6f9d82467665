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
from sigmerge.kernels.convert import WIDEN


class PoolSource:
    """Reads members by name. NaN or infinity stops the run unless it is allowed.

    A member that is not listed (the reference of a plain soup) is not read at all.
    """

    def __init__(self, members: dict[str, Checkpoint], *, allow_nonfinite: bool = False) -> None:
        self.members = members
        self.reader = Reader()
        self.allow_nonfinite = allow_nonfinite
        self.bytes_read = 0
        self._lock = threading.Lock()

    def fill(self, member: str, tensor: str, start: int, out: np.ndarray[Any, Any]) -> None:
        checkpoint = self.members.get(member)
        if checkpoint is None:
            return
        stored = checkpoint.tensors[tensor]
        finite = WIDEN[stored.dtype](self.reader.raw(stored, start, start + out.size), out)
        if not finite and not self.allow_nonfinite:
            place = start + int(np.flatnonzero(~np.isfinite(out))[0])
            raise PoolError(
                f"{member}: tensor {tensor} holds {out[place - start]} at flat index {place} "
                f"({stored.file}). Repair the checkpoint, or pass --allow-nonfinite."
            )

    def raw(self, member: str, tensor: str) -> np.ndarray[Any, Any]:
        """A whole tensor as it is stored; nothing is read before it is touched."""
        return self.reader.raw(self.members[member].tensors[tensor])

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
