"""One writer at a time: a lock file that exists while something is written."""

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
    """Hold the lock of a file, which is made if need be; it ends with the process at the latest.

    Yields the file's handle, or None if another holds the lock and is not waited for.
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
    """Whether the file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False
