"""A file of known size that threads fill.

The system lets one thread at a time write to a file; those that wait inside it keep cores busy, so
they take turns here. Many threads write through a map instead, side by side. The system is asked
for the pages first: where the disk is full this is an answer, and no signal ends the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import Any

import numpy as np

MAPPED_FROM = 8
"""Threads from which on a map is faster; fewer pay more for its pages than they wait."""
POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, since 5.14, which Python has no name for."""
_PAGE = mmap.PAGESIZE


class FilledFile:
    """Writes to an open file, which must not shrink meanwhile."""

    def __init__(self, handle: int, size: int, threads: int) -> None:
        self._handle, self._turn = handle, threading.Lock()
        self._map = _mapped(handle, size) if threads >= MAPPED_FROM else None

    def write(self, data: memoryview, place: int) -> None:
        """Store bytes from a place on."""
        if self._map is not None and _stored(self._map, data, place):
            return
        while data:
            with self._turn:
                count = os.pwrite(self._handle, data, place)
            data, place = data[count:], place + count

    def close(self) -> None:
        if self._map is not None:
            self._map.close()


def _mapped(handle: int, size: int) -> mmap.mmap | None:
    with contextlib.suppress(OSError, ValueError):  # an empty file, a file system without maps
        return mmap.mmap(handle, size)
    return None


def _stored(there: mmap.mmap, data: memoryview, place: int) -> bool:
    """Copy bytes into a map whose pages are to be had; False if they are not."""
    first, end = place // _PAGE * _PAGE, place + data.nbytes
    advise: Any = there.madvise
    try:
        advise(POPULATE_WRITE, first, end - first)
    except (OSError, ValueError):  # a full disk, an older system; a file that shrank
        return False
    np.copyto(np.frombuffer(there, np.uint8)[place:end], np.frombuffer(data, np.uint8))
    advise(mmap.MADV_DONTNEED, first, end - first)  # the file has them; they count as ours no more
    return True
