"""SHA-256 of files, remembered by file identity.

SHA-256 runs in one thread, at a fraction of the speed of a disk or of a merge. A file longer than
LEAF is therefore cut into pieces of that length, which threads hash side by side; its digest is
the SHA-256 of the pieces' digests one after another, written with the prefix TREE. The digest of a
shorter file is its plain SHA-256, and so are all digests in records from before this rule.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, TypeAlias

from sigmerge.errors import PoolError, SigmergeError
from sigmerge.files.cache import cache_place, keep_json, kept_json
from sigmerge.files.objects import RemoteFile, remote_file
from sigmerge.files.regular import open_regular

GRAIN = 2_000_000_000
"""Nanoseconds. The coarsest clock of a file system in use: two writes within it can leave the same
times, so the digest of a file that is younger is not remembered."""

LEAF = 1 << 26
TREE = "64MiB-tree:"

_BUFFER = 4 << 20
_REQUEST = 16 << 20
"""Bytes of a remote file that are requested at a time."""

Passed: TypeAlias = Callable[[RemoteFile, int], bytes | None]
"""The SHA-256 of a remote file's piece that begins there, if it is known."""

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
    """Changes whenever the file is replaced or written: path, inode, size and times.

    Of a remote file: address, size and version.
    """
    if remote := remote_file(file):
        return remote.identity
    real = file.resolve()
    return _identity(real, real.stat())


def combined(pieces: Sequence[bytes]) -> str:
    """The digest of a file from the SHA-256 of each of its pieces."""
    if len(pieces) == 1:
        return pieces[0].hex()
    return TREE + hashlib.sha256(b"".join(pieces)).hexdigest()


def are_plain(digests: Iterable[str]) -> bool:
    """Whether these are plain SHA-256 of whole files, as old records hold them."""
    return not any(digest.startswith(TREE) for digest in digests)


def sha256(
    files: Iterable[Path],
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    error: type[SigmergeError] = PoolError,
    *,
    plain: bool = False,
    passed: Passed | None = None,
) -> dict[Path, str]:
    """Digests of files; one that was hashed before and has not changed is not read again.

    With `plain`, all are plain SHA-256, for a comparison with an old record. `passed` knows pieces
    of remote files.
    """
    memory = _rehashed.get()
    unique = sorted(set(files))
    todo = {file: _begun(file, error, plain=plain) for file in unique}
    known = {file: _known(one, memory) for file, one in todo.items()}
    pieces = [
        (todo[file], begin)
        for file in unique
        if known[file] is None
        for begin in range(0, max(todo[file].size, 1), todo[file].piece)
    ]

    def digest(piece: tuple[_File, int]) -> tuple[Path, bytes, bool]:
        return piece[0].file, *(_passed(*piece, passed) or _hashed(*piece, progress, error))

    found: dict[Path, list[tuple[bytes, bool]]] = {}
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for file, value, settled in pool.map(digest, pieces):
            found.setdefault(file, []).append((value, settled))
    for file, parts in found.items():
        known[file] = whole = combined([part for part, _ in parts])
        if all(settled for _, settled in parts):
            _remember(todo[file], whole, memory)
    return {file: value for file, value in known.items() if value is not None}


def unknown(files: Iterable[Path]) -> list[Path]:
    """Files whose digests are not remembered."""
    memory = _rehashed.get()
    return [f for f in files if _known(_begun(f, PoolError, plain=False), memory) is None]


class _File(NamedTuple):
    """A file to be hashed, as it is when that begins."""

    file: Path
    real: Path
    key: str
    size: int
    piece: int
    old: bool
    remote: RemoteFile | None = None

    @property
    def note(self) -> Path:
        """Where its digest is remembered; another place for every kind of digest."""
        kind = "" if self.size <= self.piece else f"|{TREE}"
        return cache_place("digests") / hashlib.sha256((self.key + kind).encode()).hexdigest()[:32]


def _begun(file: Path, error: type[SigmergeError], *, plain: bool) -> _File:
    if remote := remote_file(file):
        piece = max(remote.size, 1) if plain else LEAF
        return _File(file, file, remote.identity, remote.size, piece, True, remote)
    with open_regular(file, "a file to hash", error) as stream:
        real, status = file.resolve(), os.fstat(stream.fileno())
    piece = max(status.st_size, 1) if plain else LEAF
    return _File(file, real, _identity(real, status), status.st_size, piece, _old(status))


def _known(one: _File, memory: dict[str, str] | None) -> str | None:
    return memory.get(str(one.note)) if memory is not None else _noted(one.note, one.key)


def _hashed(
    one: _File, begin: int, progress: Callable[[int], None] | None, error: type[SigmergeError]
) -> tuple[bytes, bool]:
    """The SHA-256 of one piece, and whether the file stayed the same meanwhile.

    A file that grows is read to its new end, in its last piece.
    """
    if one.remote:
        return _hashed_remote(one.remote, begin, min(begin + one.piece, one.size), progress)
    last = begin + one.piece >= one.size
    value, left = hashlib.sha256(), one.piece
    buffer = memoryview(bytearray(min(_BUFFER, one.piece)))
    with open_regular(one.file, "a file to hash", error) as stream:
        stream.seek(begin)
        while count := stream.readinto(buffer if last else buffer[: min(left, _BUFFER)]):
            value.update(buffer[:count])
            left -= count
            if progress:
                progress(count)
        same = _identity(one.file.resolve(), os.fstat(stream.fileno())) == one.key
    return value.digest(), same


def _passed(one: _File, begin: int, passed: Passed | None) -> tuple[bytes, bool] | None:
    """The same of a piece that went by; that the version stays is asked once a file."""
    if one.remote is None or one.piece != LEAF or passed is None:
        return None
    value = passed(one.remote, begin)
    return None if value is None else (value, begin > 0 or one.remote.now() == one.remote)


def _hashed_remote(
    remote: RemoteFile, begin: int, end: int, progress: Callable[[int], None] | None
) -> tuple[bytes, bool]:
    """The same of a remote file, whose version is compared by the caller before and after."""
    value = hashlib.sha256()
    for start in range(begin, end, _REQUEST):
        data = remote.read(start, min(start + _REQUEST, end))
        value.update(data)
        if progress:
            progress(len(data))
    return value.digest(), remote.now() == remote


def _remember(one: _File, digest: str, memory: dict[str, str] | None) -> None:
    """Keep a digest for later runs, unless a write could leave the file's times as they are."""
    if not one.old:
        return
    if memory is not None:
        memory[str(one.note)] = digest
    content = {"identity": one.key, "sha256": digest, "check": _check(one.key, digest)}
    keep_json(one.note, {"file": str(one.file), **content})


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
