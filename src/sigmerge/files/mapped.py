"""Which file lies at an address: the maps of this process, whose bytes can also be read.

Reading puts bytes where they are wanted without mapping pages in, of which many threads could only
map one after another.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple


def mapped(descriptor: int) -> memoryview:
    """All of an open file, to be read; the map goes with the last array that views it.

    It needs no descriptor: Python's own maps keep one each, and a merge maps all shards of all
    members. An empty file is a ValueError.
    """
    if sys.platform == "win32":
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    size = os.fstat(descriptor).st_size
    if not size:
        raise ValueError("cannot map an empty file")
    map_file, unmap = _calls()
    first = map_file(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if first == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    content = (ctypes.c_ubyte * size).from_address(first)
    weakref.finalize(content, unmap, first, size).atexit = False
    return memoryview(content).cast("B").toreadonly()


@cache
def _calls() -> tuple[Any, Any]:
    library = ctypes.CDLL(None, use_errno=True)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.mmap.restype = pointer
    library.mmap.argtypes = [pointer, ctypes.c_size_t, number, number, number, ctypes.c_long]
    library.munmap.argtypes = [pointer, ctypes.c_size_t]
    return library.mmap, library.munmap


class MappedFile:
    """A file that is mapped from an address on, and opened again once it is to be read."""

    def __init__(self, first: int, file: Path, status: os.stat_result) -> None:
        self.first, self.path, self._status = first, file, status
        self._lock = threading.Lock()
        self._opened: FileIO | None = None
        self._gone = False

    def read(self, address: int, room: ctypes.Array[ctypes.c_char]) -> bool:
        """Fill a writable buffer with the bytes at an address; False if they cannot be read."""
        opened = self._opened or self._open()
        if opened is None:
            return False
        try:
            return os.preadv(opened.fileno(), [room], address - self.first) == len(room)
        except OSError:
            return False

    def descriptor(self) -> int | None:
        """Of the file, open until it is forgotten; None if it cannot be read."""
        opened = self._opened or self._open()
        return None if opened is None else opened.fileno()

    def has(self, descriptor: int) -> bool:
        opened = self._opened
        return opened is not None and not opened.closed and opened.fileno() == descriptor

    def _open(self) -> FileIO | None:
        with self._lock:
            if self._opened is None and not self._gone:
                # Others look without the lock, and use the number until the file is forgotten.
                self._opened = self._same()
                self._gone = self._opened is None
            return self._opened

    def _same(self) -> FileIO | None:
        """The file, open; None if another one has its name by now, or too many are open."""
        with suppress(OSError):
            opened = FileIO(self.path)
            number = opened.fileno()
            same = os.path.samestat(os.fstat(number), self._status)
            if same and number < _most_descriptors():
                return opened
            opened.close()
        return None

    def close(self) -> None:
        """It is not read any more."""
        with self._lock:
            opened, self._opened, self._gone = self._opened, None, True
        if opened is not None:
            opened.close()


def _most_descriptors() -> int:
    """Half of what the process may have: the other half is for files that must be opened."""
    if sys.platform == "win32":
        return 256
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit // 2


class _Table(NamedTuple):
    """Where maps begin, ascending; where each ends, and its file."""

    firsts: tuple[int, ...] = ()
    maps: tuple[tuple[int, MappedFile], ...] = ()


_changing = threading.Lock()
_table = _Table()
"""Replaced as a whole, so that who looks something up waits for nobody."""


def note(first: int, size: int, file: Path, status: os.stat_result) -> None:
    """A file with this status is mapped there now."""
    global _table
    with _changing:
        firsts, maps = _table
        at = bisect_right(firsts, first)
        made = first + size, MappedFile(first, file, status)
        _table = _Table((*firsts[:at], first, *firsts[at:]), (*maps[:at], made, *maps[at:]))


def forget(first: int) -> None:
    """What was mapped from this address on may be gone soon."""
    global _table
    with _changing:
        firsts, maps = _table
        at = bisect_left(firsts, first)
        for _, file in maps[at : at + 1]:
            file.close()
        _table = _Table(firsts[:at] + firsts[at + 1 :], maps[:at] + maps[at + 1 :])


def opened_as(descriptor: int) -> Path | None:
    """The file that was opened again with this descriptor."""
    return next((file.path for _, file in _table.maps if file.has(descriptor)), None)


def mapped_at(address: int) -> MappedFile | None:
    """The file that lies at an address."""
    firsts, maps = _table
    at = bisect_right(firsts, address) - 1
    if at < 0 or address >= maps[at][0]:
        return None
    return maps[at][1]
