"""One writer at a time: a lock file that exists while something is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sigmerge.errors import OutputError


@contextmanager
def only_writer(lock_file: Path, message: str) -> Iterator[None]:
    """Hold a lock; OutputError with `message` if another process holds it.

    The lock file is removed at the end, while the lock is still held. A process that opened it
    before and locks it afterwards holds a file that no longer has a name; it is refused too.
    """
    lock = FileLock(lock_file, is_singleton=False)
    try:
        lock.acquire(blocking=False)
        handle = lock._context.lock_file_fd
        named = handle is not None and os.path.samestat(os.fstat(handle), lock_file.stat())
    except (Timeout, FileNotFoundError):
        named = False
    except OSError as error:
        raise OutputError(f"{lock_file}: cannot be written ({error.strerror}).") from None
    if not named:
        lock.release()
        raise OutputError(message)
    try:
        yield
    finally:
        with suppress(OSError):
            lock_file.unlink()
        lock.release()
