"""Differences between systems: locks, reads at a position, owners, flags of opening.

Linux and macOS take the first branch everywhere. The others are for Windows.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

BYTES = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags of os.open: binary, and not inherited by child processes."""
NO_LINK, NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
_FAR = 1 << 40
"""Position of the byte that Windows locks: behind the content, which stays readable."""
_AGAIN = 0.05
_moving = threading.Lock()


def lock(handle: int, *, wait: bool) -> bool:
    """Lock a file until it is closed; False if it is locked and `wait` is not set."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True
    while not _locked_there(handle):
        if not wait:
            return False
        time.sleep(_AGAIN)
    return True


def _locked_there(handle: int) -> bool:
    import msvcrt

    windows: Any = msvcrt
    with _At(handle, _FAR):
        try:
            windows.locking(handle, windows.LK_NBLCK, 1)
        except PermissionError:
            return False
    return True


def read_at(handle: int, count: int, position: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(handle, count, position)
    with _At(handle, position):
        return os.read(handle, count)


def read_into(handle: int, buffer: memoryview, position: int) -> int:
    """Fill a buffer from a position; returns the number of bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [buffer], position)
    found = read_at(handle, len(buffer), position)
    buffer[: len(found)] = found
    return len(found)


def write_at(handle: int, data: bytes | memoryview, position: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(handle, data, position)
    with _At(handle, position):
        return os.write(handle, data)


class _At:
    """Sets the position of a handle for one thread at a time, and restores it afterwards."""

    def __init__(self, handle: int, position: int) -> None:
        self._handle, self._position = handle, position

    def __enter__(self) -> None:
        _moving.acquire()
        self._before = os.lseek(self._handle, 0, os.SEEK_CUR)
        os.lseek(self._handle, self._position, os.SEEK_SET)

    def __exit__(self, *_: object) -> None:
        os.lseek(self._handle, self._before, os.SEEK_SET)
        _moving.release()


def is_own(status: os.stat_result) -> bool:
    """Whether a file belongs to this user; True on systems without file owners."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def user() -> str:
    """A user identifier for names of folders."""
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "")


def stored_bytes(status: os.stat_result) -> int:
    """Bytes that a file occupies on disk, or its size if the system does not report them."""
    return int(getattr(status, "st_blocks", -(-status.st_size // 512))) * 512


def most_descriptors() -> tuple[int, int] | None:
    """Soft and hard limit of open files; None where there is no such limit."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)
