"""Digests of files, cached by file identity.

The digest of a file of up to RUN_BYTES is its SHA-256. SHA-256 runs in one thread, at a fraction of
the speed of a disk or of a merge. A longer file is therefore cut into leaves of LEAF bytes, whose
digests are BLAKE3, and threads hash runs of leaves side by side. Its digest is the BLAKE3 of its
leaves' digests one after another, written with the prefix TREE. Where a store says the SHA-256 of
a file, as the hub does of weights, that is taken, with the prefix SHA256 for a longer file: a merge
that needs some of its tensors does not read the others.

A plan trusts the cached digest of a file with the same size and times. A pass that reads inputs
verifies them (`prove`): where times are no proof (ruling 37), they are hashed in that pass.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from sigmerge.errors import ChangedInput, PoolError, SigmergeError
from sigmerge.files.cache import cache_place, keep_json, kept_json
from sigmerge.files.mounts import kept_elsewhere
from sigmerge.files.objects import SHA256, RemoteFile, address, remote_file
from sigmerge.files.safe_open import open_regular, regular_status
from sigmerge.files.system import read_into

GRAIN = 2_000_000_000
"""Nanoseconds. The coarsest timestamp of a file system in use: two writes within it can leave the
same times, so the digest of a file that is younger is not cached."""

RUN_BYTES, LEAF = 1 << 26, 1 << 22
TREE = "4MiB-blake3:"
"""How a digest of a long file begins."""

_BUFFER = 1 << 20
"""Bytes read at a time: few enough to stay in the processor's cache until they are hashed."""
_REQUEST = 16 << 20
"""Bytes of a remote file that are requested at a time."""

Passed: TypeAlias = Callable[[RemoteFile, int], bytes | None]
"""Returns the leaf digests of the run of a remote file that begins there, or None."""

_rehashed: ContextVar[dict[str, str] | None] = ContextVar("rehashed", default=None)
_stopping: ContextVar[bool] = ContextVar("stopping", default=False)
"""Whether a digest that differs from the cached one raises ChangedInput."""
when_contradicted: list[Callable[[Path, str], None]] = []
"""Callbacks for a file whose content differs from its cached digest, which they get."""
_log = logging.getLogger(__name__)
_read: dict[str, dict[str, Any]] = {}
"""Notes read or written by this process: a job asks for the same digests many times."""


@contextmanager
def rehashing() -> Iterator[None]:
    """In this context cached digests are ignored: every file is hashed again, once."""
    token = _rehashed.set({})
    try:
        yield
    finally:
        _rehashed.reset(token)


def rehash_from_now_on() -> None:
    """As `rehashing` for the rest of a command; a digest unlike the cached one raises."""
    _rehashed.set({})
    _stopping.set(True)


def is_rehashing() -> bool:
    return _rehashed.get() is not None


def identity(file: Path) -> str:
    """Changes whenever the file is replaced or written: path, inode, size and times.

    For a remote file: address, size and version. Where times prove nothing, also the digest.
    """
    key = _key(file)
    return f"{key}|{file_digests([file])[file]}" if unproven([file]) else key


def _key(file: Path) -> str:
    if remote := remote_file(file):
        return remote.identity
    return _identity(file, file.stat())


def unproven(files: Iterable[Path]) -> list[Path]:
    """Files whose size and times do not prove their content.

    These are files on file systems that other machines write, and files that changed once while
    their size and times stayed.
    """
    listed = [file for file in files if not remote_file(file)]
    elsewhere = kept_elsewhere(listed)
    return [file for file in listed if file in elsewhere or _was_another(file)]


def _was_another(file: Path) -> bool:
    try:
        return "another" in (_note_of(_begun(file, PoolError)) or {})
    except PoolError:  # who reads it says so
        return False


class Hasher(Protocol):
    def update(self, data: Any, /) -> Any: ...

    def digest(self) -> bytes: ...


class LeafRule(NamedTuple):
    """How a file is cut: the size of a leaf, and the hasher of one."""

    size: int
    hasher: Callable[[], Hasher]


def leaf_rule(size: int) -> LeafRule:
    """The rule of a file that has so many bytes."""
    if size <= RUN_BYTES:
        return LeafRule(max(size, 1), hashlib.sha256)
    from blake3 import blake3  # short files need none

    return LeafRule(LEAF, blake3)


def combined(runs: Iterable[bytes]) -> str:
    """The digest of a file from the leaf digests of its runs."""
    leaves = b"".join(runs)
    if len(leaves) == hashlib.sha256().digest_size:
        return leaves.hex()
    from blake3 import blake3

    return TREE + blake3(leaves).hexdigest()


def by_leaf(begin: int, data: memoryview, leaf: int) -> Iterator[tuple[int, memoryview]]:
    """Cut bytes, which start at `begin`, at leaf boundaries; yields (start of leaf, bytes)."""
    at, end = begin, begin + len(data)
    while at < end:
        first = at // leaf * leaf
        stop = min(first + leaf, end)
        yield first, data[at - begin : stop - begin]
        at = stop


def leaf_digests(
    descriptor: int,
    begin: int,
    end: int,
    rule: LeafRule,
    progress: Callable[[int], None] | None = None,
) -> bytes:
    """Leaf digests between two positions of a file; stops at its end."""
    buffer = memoryview(bytearray(min(_BUFFER, end - begin)))
    found = []
    for start in range(begin, max(end, begin + 1), rule.size):
        value, at, stop = rule.hasher(), start, min(start + rule.size, end)
        while count := read_into(descriptor, buffer[: stop - at], at):
            value.update(buffer[:count])
            at += count
            if progress:
                progress(count)
        found.append(value.digest())
    return b"".join(found)


def digest_now(file: Path) -> str:
    """The digest of a file, computed now."""
    with file.open("rb") as stream:
        handle = stream.fileno()
        size = os.fstat(handle).st_size
        runs = [(at, min(at + RUN_BYTES, size)) for at in range(0, max(size, 1), RUN_BYTES)]
        return combined(leaf_digests(handle, *run, leaf_rule(size)) for run in runs)


def file_digests(
    files: Iterable[Path],
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    error: type[SigmergeError] = PoolError,
    *,
    passed: Passed | None = None,
) -> dict[Path, str]:
    """Digests of files; a file that has a cached digest and has not changed is not read.

    `passed` gives leaf digests of remote files that a job has read.
    """
    found, others = _digests(files, _rehashed.get(), threads, progress, error, passed)
    for file in others:
        if _stopping.get():
            raise _changed_unseen(file)
        _log.warning(f"{file}: {_ANOTHER}")
    return found


def prove(
    files: Iterable[Path],
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    *,
    passed: Passed | None = None,
) -> dict[Path, str]:
    """Digests of the inputs of a pass, verified before its result is published.

    A file whose size and times prove nothing is always hashed. Raises ChangedInput if its digest
    differs from the cached one; entries that were made under the cached one are removed then.
    """
    listed = set(files)
    doubtful = {*unproven(listed)}
    found, others = _digests(
        listed - doubtful, _rehashed.get(), threads, progress, PoolError, passed
    )
    again, more = _digests(doubtful, {}, threads, progress, PoolError, None)
    for file in (*others, *more):
        raise _changed_unseen(file)
    return found | again


_ANOTHER = "its content changed, and its size and times did not. What was kept of it is removed."


def _changed_unseen(file: Path) -> ChangedInput:
    return ChangedInput(
        f"{address(file)}: {_ANOTHER} Nothing is published; run the same command again."
    )


def _digests(
    files: Iterable[Path],
    memory: dict[str, str] | None,
    threads: int,
    progress: Callable[[int], None] | None,
    error: type[SigmergeError],
    passed: Passed | None,
) -> tuple[dict[Path, str], list[Path]]:
    """Digests, and the files whose cached digests were wrong.

    With a `memory`, only digests in it are used, and no cached one.
    """
    unique = sorted(set(files))
    todo = {file: _begun(file, error) for file in unique}
    known = {file: _known(one, memory) for file, one in todo.items()}
    runs = [
        (todo[file], begin)
        for file in unique
        if known[file] is None
        for begin in range(0, max(todo[file].size, 1), max(RUN_BYTES, todo[file].rule.size))
    ]

    def digest(run: tuple[_File, int]) -> tuple[Path, bytes, bool]:
        return run[0].file, *(_passed(*run, passed) or _hashed(*run, progress, error))

    found: dict[Path, list[tuple[bytes, bool]]] = {}
    if runs:
        with ThreadPoolExecutor(max(1, threads)) as pool:
            each = pool.map if threads > 1 and len(runs) > 1 else map
            for file, value, settled in each(digest, runs):
                found.setdefault(file, []).append((value, settled))
    others = []
    for file, parts in found.items():
        known[file] = whole = combined(part for part, _ in parts)
        if all(settled for _, settled in parts) and _is_another(todo[file], whole, memory):
            others.append(file)
    return {file: value for file, value in known.items() if value is not None}, others


def unknown(files: Iterable[Path]) -> list[Path]:
    """Files without a cached digest."""
    memory = _rehashed.get()
    return [f for f in files if _known(_begun(f, PoolError), memory) is None]


def notes() -> list[Path]:
    """Files of the cached digests."""
    return sorted(cache_place("digests").glob("*"))


def is_whole(note: Path) -> bool:
    """Whether a note is undamaged."""
    return kept_json(note, {"file", "identity", "sha256"}) is not None


def idle_notes() -> list[Path]:
    """Notes that can be removed: damaged ones, and those of files that are gone or have changed."""
    return [note for note in notes() if not _is_of_use(note)]


def _is_of_use(note: Path) -> bool:
    content = kept_json(note, {"file", "identity"})
    try:
        return content is not None and _key(Path(content["file"])) == content["identity"]
    except OSError:
        return False


class _File(NamedTuple):
    """A file to be hashed, with its identity when hashing begins."""

    file: Path
    key: str
    size: int
    rule: LeafRule
    old: bool
    remote: RemoteFile | None = None

    @property
    def note(self) -> Path:
        """The file of its cached digest."""
        return cache_place("digests") / hashlib.sha256(self.key.encode()).hexdigest()[:32]


def _begun(file: Path, error: type[SigmergeError]) -> _File:
    if remote := remote_file(file):
        rule = leaf_rule(remote.size)
        return _File(file, remote.identity, remote.size, rule, True, remote)
    status = regular_status(file, "a file to hash", error)
    rule, key = leaf_rule(status.st_size), _identity(file, status)
    return _File(file, key, status.st_size, rule, _old(status))


def _known(one: _File, memory: dict[str, str] | None) -> str | None:
    if stated := _stated(one):
        return stated
    if memory is not None:
        return memory.get(str(one.note))
    return _believed(one)


def _stated(one: _File) -> str | None:
    """What the store said when the folder was opened: the digest of a short file, and a name of a
    long one's content."""
    told = one.remote.sha256 if one.remote else None
    return SHA256 + told if told and one.size > RUN_BYTES else told


def _believed(one: _File) -> str | None:
    """The cached digest of the file, if its identity is the same."""
    note = _note_of(one)
    return str(note["sha256"]) if note else None


def _note_of(one: _File) -> dict[str, Any] | None:
    """The note of a file, if it is undamaged and its identity is the same."""
    note = one.note
    content = _read.get(str(note)) or kept_json(note, {"identity", "sha256"})
    if content is None or content["identity"] != one.key:
        return None
    _read[str(note)] = content
    return content


def _hashed(
    one: _File,
    begin: int,
    progress: Callable[[int], None] | None,
    error: type[SigmergeError],
) -> tuple[bytes, bool]:
    """Leaf digests of one run, and whether the file stayed unchanged meanwhile."""
    end = min(begin + max(RUN_BYTES, one.rule.size), one.size)
    if one.remote:
        return _hashed_remote(one.remote, begin, end, one.rule, progress)
    with open_regular(one.file, "a file to hash", error) as stream:
        value = leaf_digests(stream.fileno(), begin, end, one.rule, progress)
        same = _identity(one.file, os.fstat(stream.fileno())) == one.key
    return value, same


def _passed(one: _File, begin: int, passed: Passed | None) -> tuple[bytes, bool] | None:
    """As `_hashed`, of a run that a job has read; the version is checked once per file."""
    if one.remote is None or passed is None:
        return None
    value = passed(one.remote, begin)
    return None if value is None else (value, begin > 0 or one.remote.now() == one.remote)


def _hashed_remote(
    remote: RemoteFile,
    begin: int,
    end: int,
    rule: LeafRule,
    progress: Callable[[int], None] | None,
) -> tuple[bytes, bool]:
    """As `_hashed`, of a remote file."""
    leaves = [rule.hasher() for _ in range(begin, max(end, begin + 1), rule.size)]
    for start in range(begin, end, _REQUEST):
        data = remote.read(start, min(start + _REQUEST, end))
        for first, part in by_leaf(start, memoryview(data), rule.size):
            leaves[(first - begin) // rule.size].update(part)
        if progress:
            progress(len(data))
    return b"".join(value.digest() for value in leaves), remote.now() == remote


def _is_another(one: _File, digest: str, memory: dict[str, str] | None) -> bool:
    """Cache a digest; True if the cached one differed, whose entries are removed then.

    Nothing is cached where a write could leave the file's times unchanged.
    """
    if not one.old:
        return False
    another = _believed(one) not in (None, digest)
    if another:
        for drop in when_contradicted:
            drop(one.file, str(_believed(one)))
    if memory is not None:
        memory[str(one.note)] = digest
    content: dict[str, Any] = {"file": str(one.file), "identity": one.key, "sha256": digest}
    if another or "another" in (_note_of(one) or {}):
        content["another"] = True
    _read[str(one.note)] = content
    keep_json(one.note, content)
    return another


def _identity(file: Path, status: os.stat_result) -> str:
    """Path as given, device, inode, size and times; a redirected link has another inode."""
    absolute = os.path.abspath(file)  # noqa: PTH100
    name = os.fsencode(absolute).decode(errors="backslashreplace")  # not every name is UTF-8
    times = f"{status.st_mtime_ns}|{status.st_ctime_ns}"
    return f"{name}|{status.st_dev}|{status.st_ino}|{status.st_size}|{times}"


def _old(status: os.stat_result) -> bool:
    """Whether a later write must change the times; False for times in the future."""
    return max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - GRAIN
