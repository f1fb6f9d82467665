"""The identity of files, without reading them; and a check that they stay unchanged during a job.

    before = identify(files)     before the first byte is read; costs no reading
    ...                          the job reads the files
    unchanged(before)            raises if one of them was written or replaced meanwhile

A write changes a file's times, a replacement its inode; a remote file gets another version. Two
writes within one clock tick can leave the same times, so `identify` waits until a file that was
just written is older than a tick.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sigmerge.errors import ChangedInput, PoolError
from sigmerge.files.objects import RemoteFile, address, remote_file
from sigmerge.messages import reason

COARSE, FINE = 2_000_000_000, 20_000_000
"""Nanoseconds within which two writes can leave the same time: of a file system that keeps seconds
only, and of one that keeps the time of the kernel's last tick."""


@dataclass(frozen=True)
class InputIdentity:
    file: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    version: str = ""
    """Of a remote file: the version that its store reports."""
    sha256: str | None = None


def identify(files: Iterable[Path]) -> tuple[InputIdentity, ...]:
    """What identifies the files now."""
    return tuple(_settled(file) for file in sorted(set(files)))


def unchanged(before: Iterable[InputIdentity]) -> None:
    """Raise if a file has changed; the error names it."""
    for one in before:
        try:
            same = _identity(one.file) == replace(one, sha256=None)
        except (OSError, PoolError):
            same = False
        if not same:
            raise changed(address(one.file))


def changed(file: Path | str) -> ChangedInput:
    return ChangedInput(
        f"{file}: changed while it was read. Nothing is published; run the same command again when "
        "the file does not change any more."
    )


def _identity(file: Path) -> InputIdentity:
    if remote := remote_file(file):
        return _version(file, remote.now())
    status = file.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return InputIdentity(file, status.st_size, *times, status.st_ino, status.st_dev)


def _version(file: Path, remote: RemoteFile) -> InputIdentity:
    return InputIdentity(file, remote.size, 0, 0, 0, 0, remote.version)


def _settled(file: Path) -> InputIdentity:
    """The identity, as soon as a later write would change it: waits for a file just written.

    A remote file has the version that it had when its folder was opened.
    """
    if remote := remote_file(file):
        return _version(file, remote)
    try:
        found = _identity(file)
        grain = FINE if found.ctime_ns % 10**9 else COARSE
        age = time.time_ns() - found.ctime_ns
        if 0 <= age < grain:
            time.sleep((grain - age) / 1e9)
            found = _identity(file)
    except OSError as error:
        raise PoolError(f"{file}: cannot be read ({reason(error)}).") from None
    return found
