"""Tensor bytes, memory-mapped and handed out in pieces."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.header import Tensor
from sigmerge.kernels.convert import STORAGE

PAGE = mmap.PAGESIZE


class Reader:
    """Maps each file once. `release` gives pages back, so resident memory follows the work."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def _map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                with file.open("rb") as stream:
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[file]

    def raw(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> np.ndarray[Any, Any]:
        """Elements [start, stop) of a floating tensor in their stored type."""
        dtype = STORAGE[tensor.dtype]
        count = (tensor.size if stop is None else stop) - start
        offset = tensor.begin + start * dtype.itemsize
        view = np.frombuffer(self._map(tensor.file), dtype, count, offset)
        return view if offset % dtype.itemsize == 0 else view.copy()

    def bytes(self, tensor: Tensor) -> memoryview:
        return memoryview(self._map(tensor.file))[tensor.begin : tensor.end]

    def prefetch(self, tensor: Tensor) -> None:
        """Ask the system to read ahead; a hint only."""
        self._advise(tensor, 0, tensor.size, "MADV_WILLNEED")

    def release(self, tensor: Tensor, start: int, stop: int) -> None:
        """These elements will not be needed soon: drop their pages from resident memory."""
        self._advise(tensor, start, stop, "MADV_DONTNEED")

    def _advise(self, tensor: Tensor, start: int, stop: int, advice: str) -> None:
        if not hasattr(mmap, advice):
            return
        item = tensor.nbytes // max(1, tensor.size)
        begin = (tensor.begin + start * item) // PAGE * PAGE
        length = tensor.begin + stop * item - begin
        if length > 0:
            self._map(tensor.file).madvise(getattr(mmap, advice), begin, length)
