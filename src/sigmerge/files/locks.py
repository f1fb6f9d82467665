"""Lock files: one writer at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sigmerge.errors import OutputError
from sigmerge.files.system import BYTES, NO_LINK, lock
from sigmerge.messages import reason


@contextmanager
def locked(file: Path, *, wait: bool = False) -> Iterator[int | None]:
    """Hold the lock of a file, which is created if it does not exist.

    Yields the file's handle, or None if another process holds the lock and `wait` is not set. The
    system releases the lock when the process ends.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | NO_LINK | BYTES, 0o644)
    try:
        yield handle if lock(handle, wait=wait) else None
    finally:
        os.close(handle)


@contextmanager
def only_writer(lock_file: Path, message: str) -> Iterator[None]:
    """Hold a lock; OutputError with `message` if another process holds it.

    The lock file is removed at the end, while the lock is still held. A process that opened it
    before and locks it afterwards holds a file that no longer has a name; it is refused too.
    """
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(locked(lock_file))
        except OSError as error:
            raise OutputError(f"{lock_file}: cannot be written ({reason(error)}).") from None
        if handle is None or not has_name(lock_file, handle):
            raise OutputError(message)
        try:
            yield
        finally:
            with suppress(OSError):
                lock_file.unlink()


def has_name(file: Path, handle: int) -> bool:
    """Whether the path still leads to this open file."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False
