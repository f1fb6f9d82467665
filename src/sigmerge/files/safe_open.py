"""Regular files only: a FIFO, a socket or a device is refused without being opened."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

from sigmerge.errors import SigmergeError
from sigmerge.files.system import BYTES, NO_WAIT
from sigmerge.messages import reason


@contextmanager
def open_regular(
    file: Path, what: str = "a file", error: type[SigmergeError] = SigmergeError
) -> Iterator[FileIO]:
    """An unbuffered stream of a regular file; `what` names its content in the error.

    The kind is checked before the file is opened, since opening a device can have effects, and
    again afterwards, since the name may lead to another file by then. O_NONBLOCK keeps the opening
    of a FIFO from waiting; reading a regular file does not heed it.
    """
    with _told(file, what, error):
        _check(file, os.stat(file), what, error)  # noqa: PTH116
        handle = os.open(file, os.O_RDONLY | BYTES | NO_WAIT)
        with FileIO(handle, "rb") as stream:
            _check(file, os.fstat(handle), what, error)
            yield stream


def regular_status(
    file: Path, what: str = "a file", error: type[SigmergeError] = SigmergeError
) -> os.stat_result:
    """The status of a regular file, without opening it."""
    with _told(file, what, error):
        status = os.stat(file)  # noqa: PTH116
        _check(file, status, what, error)
        return status


@contextmanager
def _told(file: Path, what: str, error: type[SigmergeError]) -> Iterator[None]:
    """Convert an OSError to an error that names the file and its expected content."""
    try:
        yield
    except FileNotFoundError:
        raise error(f"{_short(file)}: no such file; {what} is expected.") from None
    except OSError as problem:
        raise error(
            f"{_short(file)}: cannot be read ({reason(problem)}); {what} is expected."
        ) from None
    except ValueError as problem:  # a NUL in the name
        raise error(f"{_short(file)}: cannot be read ({problem}).") from None


def is_regular(file: Path) -> bool:
    """Whether a path is a regular file; False for a path that the system does not accept."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except (OSError, ValueError):
        return False


def remove(path: Path, *, if_possible: bool = False) -> None:
    """Remove a file, folder, link or FIFO; links are not followed.

    Raises OSError if it cannot be removed; with `if_possible` it is left.
    """
    with suppress(OSError) if if_possible else nullcontext():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=if_possible)
        else:
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk, where the system can open a folder."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def begin_sync(handle: int, begin: int, nbytes: int) -> None:
    """Start writing a range of a file to disk, where the system supports it.

    It guarantees nothing, but shortens a later `os.fsync`.
    """
    call = _sync_range()
    if call is not None and nbytes:
        call(handle, begin, nbytes, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    call: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


_SYNC_FILE_RANGE_WRITE = 2


def _check(file: Path, status: os.stat_result, what: str, error: type[SigmergeError]) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise error(f"{file}: is a folder; {what} is expected.")
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{file}: is not a regular file; {what} is expected.")


def _short(file: Path) -> str:
    name = str(file)
    return name if len(name) <= 1000 else f"{name[:500]}…{name[-100:]}"
