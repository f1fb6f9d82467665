"""SHA-256 of files, remembered by file identity."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from sigmerge.errors import PoolError, SigmergeError
from sigmerge.files.cache import cache_place, keep_json, kept_json
from sigmerge.files.regular import open_regular

GRAIN = 2_000_000_000
"""Nanoseconds. The coarsest clock of a file system in use: two writes within it can leave the same
times, so the digest of a file that is younger is not remembered."""

_rehashed: ContextVar[dict[str, str] | None] = ContextVar("rehashed", default=None)


@contextmanager
def rehashing() -> Iterator[None]:
    """In this context no digest of an earlier run is trusted; every file is read again, once."""
    token = _rehashed.set({})
    try:
        yield
    finally:
        _rehashed.reset(token)


def rehash_from_now_on() -> None:
    """As `rehashing`, for the rest of this process: what a command line asks for."""
    _rehashed.set({})


def identity(file: Path) -> str:
    """Changes whenever the file is replaced or written: path, inode, size and times."""
    real = file.resolve()
    return _identity(real, real.stat())


def sha256(
    files: Iterable[Path],
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    error: type[SigmergeError] = PoolError,
) -> dict[Path, str]:
    """SHA-256 of files; one that was hashed before and has not changed is not read again."""
    memory = _rehashed.get()

    def digest(file: Path) -> str:
        return _remembered(file, memory, progress, error)

    unique = sorted(set(files))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return dict(zip(unique, pool.map(digest, unique), strict=True))


def _remembered(
    file: Path,
    memory: dict[str, str] | None,
    progress: Callable[[int], None] | None,
    error: type[SigmergeError],
) -> str:
    with open_regular(file, "a file to hash", error) as stream:
        real, before = file.resolve(), os.fstat(stream.fileno())
        key = _identity(real, before)
        note = cache_place("digests") / hashlib.sha256(key.encode()).hexdigest()[:32]
        known = memory.get(key) if memory is not None else _noted(note, key)
        if known is not None:
            return known
        value = hashlib.sha256()
        buffer = memoryview(bytearray(1 << 22))
        while count := stream.readinto(buffer):
            value.update(buffer[:count])
            if progress:
                progress(count)
        settled = _identity(real, os.fstat(stream.fileno())) == key and _old(before)
    if settled:
        if memory is not None:
            memory[key] = value.hexdigest()
        digest = value.hexdigest()
        content = {"identity": key, "sha256": digest, "check": _check(key, digest)}
        keep_json(note, {"file": str(file), **content})
    return value.hexdigest()


def _identity(real: Path, status: os.stat_result) -> str:
    times = f"{status.st_mtime_ns}|{status.st_ctime_ns}"
    return f"{real}|{status.st_dev}|{status.st_ino}|{status.st_size}|{times}"


def _noted(note: Path, key: str) -> str | None:
    """A digest from an earlier run, if the note is whole and about this very file."""
    content = kept_json(note, {"identity", "sha256", "check"})
    if content is None or content["identity"] != key:
        return None
    digest = str(content["sha256"])
    return digest if content["check"] == _check(key, digest) else None


def _check(key: str, digest: str) -> str:
    """A checksum, by which a note with a wrong bit is recognised."""
    return hashlib.sha256(f"{key} {digest}".encode()).hexdigest()[:16]


def _old(status: os.stat_result) -> bool:
    """Whether a write from now on would leave other times; a time to come never is old."""
    return max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - GRAIN
