"""Reads tensor bytes in pieces: by position in an open file, or from a remote store."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from sigmerge._native import advise_file, read
from sigmerge.checkpoints.header import Tensor, version_of
from sigmerge.checkpoints.prefetch import Passing, ReadAhead
from sigmerge.core import Array
from sigmerge.core.dtypes import STORAGE, Span
from sigmerge.files.identity import changed
from sigmerge.files.objects import RemoteFile, remote_file
from sigmerge.files.opened import OpenFile, became_shorter, named_reads

AHEAD = 4 << 20
"""Bytes of one request when reading ahead. Of a longer one Linux reads only the beginning: as much
as its device takes at a time, or as it reads ahead by itself."""


class Reader:
    """Opens each file once, and keeps it open as long as few are; `close` lets go of them.

    A file is closed when no span of it is left. What is read of a remote file belongs to the array
    that is returned; `passing` is called with it.
    """

    def __init__(self, passing: Passing | None = None) -> None:
        self._passing = passing
        self._files: dict[Path, OpenFile] = {}
        self._lock = threading.Lock()
        self._ahead: SimpleQueue[Tensor | None] | None = None
        self._remote: dict[Path, RemoteFile | None] = {}
        self._requests: ReadAhead | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._files.clear()
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

    def _open(self, tensor: Tensor) -> OpenFile:
        """A tensor's file, which is the file whose header was read, and has all of the tensor."""
        file = self._files.get(tensor.file) or self._opened(tensor.file)  # no lock, as a rule
        if tensor.version and tensor.version != version_of(file.status):
            raise changed(tensor.file)
        if file.status.st_size < tensor.end:
            raise became_shorter(tensor.file)
        return file

    def _opened(self, path: Path) -> OpenFile:
        with self._lock:
            if path in self._files:
                return self._files[path]
            made = OpenFile(path)
            if made.may_stay:
                self._files[path] = made
            return made

    def span(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> Span:
        """Elements [start, stop) of a floating tensor in their stored type.

        They are read now if they are remote, or if too many files are open.
        """
        dtype = STORAGE[tensor.dtype]
        count = (tensor.size if stop is None else stop) - start
        offset = tensor.begin + start * dtype.itemsize
        if remote := self.remote(tensor):
            end = offset + count * dtype.itemsize
            data = self._requested().read(remote, offset, end)
            return Span.of(np.frombuffer(memoryview(data).toreadonly(), dtype))
        file = self._open(tensor)
        found = Span(dtype, count, file.descriptor, offset, file)
        if file.may_stay:
            return found
        with named_reads():
            return Span.of(found.array())

    def raw(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> Array:
        """The same, read."""
        with named_reads():
            return self.span(tensor, start, stop).array()

    def bytes(self, tensor: Tensor, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes of a tensor from a position on, as far as it goes."""
        first = min(tensor.begin + begin, tensor.end)
        last = tensor.end if end is None else min(tensor.begin + end, tensor.end)
        if remote := self.remote(tensor):
            return memoryview(self._requested().read(remote, first, last))
        file, content = self._open(tensor), np.empty(last - first, np.uint8)
        with named_reads():
            read(file.descriptor, first, content)
        return content.data

    def _requested(self) -> ReadAhead:
        with self._lock:
            if self._requests is None:
                self._requests = ReadAhead(self._passing)
            return self._requests

    def prefetch(self, turns: Sequence[Sequence[Tensor]]) -> None:
        """Prefetch tensors: one turn after another, those of a turn concurrently."""
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


def _read_ahead(tensors: SimpleQueue[Tensor | None]) -> None:
    """Body of the prefetch thread; None ends it."""
    while (tensor := tensors.get()) is not None:
        # What cannot be opened is reported by the thread that reads it; this is a hint.
        with suppress(OSError), tensor.file.open("rb") as stream:
            place = stream.fileno(), tensor.begin, tensor.end
            advise_file(*place, AHEAD, os.POSIX_FADV_WILLNEED)
