"""Tensor bytes, handed out in pieces: memory-mapped, or read by range from a remote store."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from sigmerge._native import advise, advise_file
from sigmerge.checkpoints.ahead import Passing, ReadAhead
from sigmerge.checkpoints.header import Tensor, Version, version_of
from sigmerge.errors import PoolError
from sigmerge.files.identity import changed
from sigmerge.files.mapped import forget, mapped, note
from sigmerge.files.objects import RemoteFile, remote_file
from sigmerge.kernels.convert import STORAGE

MEMORY_PAGE = mmap.PAGESIZE
AHEAD = 4 << 20
"""Bytes of one request when reading ahead. Of a longer one Linux reads only the beginning: as much
as its device takes at a time, or as it reads ahead by itself."""


class Reader:
    """Maps each file once. `release` gives pages back, so resident memory follows the work.

    `close` ends the threads that read ahead; the maps go with the arrays that view them. What is
    read of a remote file belongs to the array that is returned; `passing` is called with it. As a
    context manager it notes which file lies where, until it is closed and its maps may go.
    """

    def __init__(self, passing: Passing | None = None) -> None:
        self._passing = passing
        self._maps: dict[Path, memoryview] = {}
        self._versions: dict[Path, Version] = {}
        self._firsts: list[int] | None = None
        self._lock = threading.Lock()
        self._ahead: SimpleQueue[Tensor | None] | None = None
        self._remote: dict[Path, RemoteFile | None] = {}
        self._requests: ReadAhead | None = None

    def __enter__(self) -> Reader:
        self._firsts = []
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for first in self._firsts or ():
                forget(first)
            self._firsts = None
            self._maps.clear()
            if self._ahead is not None:
                with suppress(Empty):
                    while True:
                        self._ahead.get_nowait()
                self._ahead.put(None)
                self._thread.join()
                self._ahead = None
            if self._requests is not None:
                self._requests.close()
                self._requests = None

    def remote(self, tensor: Tensor) -> RemoteFile | None:
        """The object that a tensor lies in, where it is in no local file."""
        if tensor.file not in self._remote:
            self._remote[tensor.file] = remote_file(tensor.file)
        return self._remote[tensor.file]

    def _map(self, tensor: Tensor) -> memoryview:
        """The map of a tensor's file, which is the file whose header was read."""
        file = tensor.file
        found = self._maps.get(file) or self._mapped(file)  # without the lock, which all take
        if tensor.version and tensor.version != self._versions[file]:
            raise changed(file)
        return found

    def _mapped(self, file: Path) -> memoryview:
        with self._lock:
            if file not in self._maps:
                with file.open("rb") as stream:
                    content = mapped(stream.fileno())
                    status = os.fstat(stream.fileno())
                    if self._firsts is not None:
                        self._firsts.append(_address(content))
                        note(self._firsts[-1], len(content), file, status)
                    self._versions[file] = version_of(status)
                    self._maps[file] = content
            return self._maps[file]

    def _whole(self, tensor: Tensor) -> memoryview:
        """The map of a tensor's file, which has all of the tensor."""
        with suppress(ValueError):  # an empty file is not mapped
            content = self._map(tensor)
            if len(content) >= tensor.end:
                return content
        raise became_shorter(tensor.file)

    def raw(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> np.ndarray[Any, Any]:
        """Elements [start, stop) of a floating tensor in their stored type."""
        dtype = STORAGE[tensor.dtype]
        count = (tensor.size if stop is None else stop) - start
        offset = tensor.begin + start * dtype.itemsize
        if remote := self.remote(tensor):
            end = offset + count * dtype.itemsize
            data = self._requested().read(remote, offset, end)
            return np.frombuffer(memoryview(data).toreadonly(), dtype)
        view = np.frombuffer(self._whole(tensor), dtype, count, offset)
        return view if offset % dtype.itemsize == 0 else view.copy()

    def bytes(self, tensor: Tensor) -> memoryview:
        if remote := self.remote(tensor):
            data = self._requested().read(remote, tensor.begin, tensor.end)
            return memoryview(data)
        return self._whole(tensor)[tensor.begin : tensor.end]

    def _requested(self) -> ReadAhead:
        with self._lock:
            if self._requests is None:
                self._requests = ReadAhead(self._passing)
            return self._requests

    def prefetch(self, turns: Sequence[Sequence[Tensor]]) -> None:
        """Have tensors read ahead: one turn after another, those of a turn side by side."""
        remote = [[(f, t) for t in tensors if (f := self.remote(t))] for tensors in turns]
        if any(remote):
            self._requested().want(remote)
        for tensor in (tensor for tensors in turns for tensor in tensors):
            if self.remote(tensor) is None:
                self._prefetch_local(tensor)

    def _prefetch_local(self, tensor: Tensor) -> None:
        """In a thread of its own, which waits for the disk."""
        if not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            if self._ahead is None:
                queue: SimpleQueue[Tensor | None] = SimpleQueue()
                thread = threading.Thread(target=_read_ahead, args=(queue,), daemon=True)
                thread.start()  # or the system lets no thread start; then there is none to end
                self._ahead, self._thread = queue, thread
            self._ahead.put(tensor)

    def release(self, pieces: Iterable[tuple[Tensor, int, int]]) -> None:
        """These elements will not be needed soon: drop their pages from resident memory."""
        here = [piece for piece in pieces if not self.remote(piece[0])]
        release_pages([self._span(*piece) for piece in here])

    def address(self, tensor: Tensor) -> int:
        """Where the first byte of a tensor in a local file lies in memory."""
        return _address(self._map(tensor)) + tensor.begin

    def _span(self, tensor: Tensor, start: int, stop: int) -> tuple[int, int]:
        """The first address of elements [start, stop), and the last."""
        item, first = tensor.nbytes // max(1, tensor.size), self.address(tensor)
        return first + start * item, first + stop * item


def became_shorter(file: Path) -> PoolError:
    return PoolError(
        f"{file} became shorter while it was read. Nothing is published. Put the whole file back, "
        "then run the same command again."
    )


def _address(mapped: memoryview) -> int:
    """Where a map lies in memory."""
    return int(np.frombuffer(mapped, np.uint8).__array_interface__["data"][0])


def release_pages(spans: Sequence[tuple[int, int]]) -> None:
    """Drop the pages of mapped files between these addresses from resident memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        firsts = [(first // MEMORY_PAGE * MEMORY_PAGE, stop) for first, stop in spans]
        ranges = [(first, max(0, stop - first)) for first, stop in firsts]
        advise(np.array(ranges, np.int64).reshape(-1, 2), mmap.MADV_DONTNEED)


def _read_ahead(tensors: SimpleQueue[Tensor | None]) -> None:
    """Have the system read what comes next; None ends the thread."""
    while (tensor := tensors.get()) is not None:
        # What cannot be opened is reported by the thread that reads it; this is a hint.
        with suppress(OSError), tensor.file.open("rb") as stream:
            place = stream.fileno(), tensor.begin, tensor.end
            advise_file(*place, AHEAD, os.POSIX_FADV_WILLNEED)
