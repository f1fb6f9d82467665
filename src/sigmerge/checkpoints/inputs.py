"""The input files of a result: their identity when a job began, and the check that it stays.

    before = identify(files)           before the first tensor is read; costs no reading
    ...                                the job reads the files
    known = digested(before)           the same files with their digests, or a PoolError

A file that was written or replaced in between has other times or another inode, and a remote one
another version, so the digests are those of the bytes that the job read. Where times prove nothing
(ruling 37) a file is hashed while the job reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.companions import companion_files
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.header import version_of
from sigmerge.errors import PoolError
from sigmerge.files.digests import Passed, file_digests, identity, is_rehashing, prove
from sigmerge.files.identity import InputIdentity, changed, unchanged
from sigmerge.files.mounts import kept_elsewhere
from sigmerge.files.objects import address, remote_file


def same_configuration(checkpoint: Checkpoint) -> None:
    """Raise if a configuration changed since its checkpoint was opened."""
    file, version = checkpoint.path / "config.json", checkpoint.config_version
    if version and (not file.exists() or version_of(file.stat()) != version):
        raise changed(address(file))


def digested(
    before: Iterable[InputIdentity],
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    passed: Passed | None = None,
    known: Mapping[Path, str] | None = None,
) -> tuple[InputIdentity, ...]:
    """The files with their digests; raises if one has changed.

    `passed` knows pieces of remote files, and `known` has what was hashed since `before`.
    """
    listed, found = tuple(before), known or {}
    unchanged(listed)
    todo = [one.file for one in listed if one.file not in found]
    digests = {**found, **prove(todo, threads, progress, passed=passed)}
    unchanged(listed)
    return tuple(replace(one, sha256=digests[one.file]) for one in listed)


def hashed_again(members: Iterable[Checkpoint]) -> tuple[str, ...]:
    """The note of a dry run about inputs that are always hashed, with the reason."""
    if is_rehashing():
        return ("--rehash: every input is hashed",)
    files = (file for member in members for file in member.files if remote_file(file) is None)
    kinds = ", ".join(sorted({*kept_elsewhere(files).values()}))
    kinds = kinds.replace("unknown", "a file system of unknown kind")
    why = "another machine may change files there, and their times (docs/rulings.md, 37)"
    return (f"inputs on {kinds} are hashed while they are read: {why}",) if kinds else ()


def fingerprint(members: Mapping[str, Checkpoint], others: Iterable[Path] = ()) -> dict[str, Any]:
    """The inputs of a job as plain content, by which an interrupted one is recognised.

    Weights are known by their identity, and all other files by their content: a file that is
    written again with the same content is the same.
    """
    companions = {name: companion_files(member.path) for name, member in members.items()}
    beside = [Path(file) for file in others]
    digests = file_digests([*beside, *(file for files in companions.values() for file in files)])
    return {
        "weights": {n: [identity(m.given(f)) for f in m.files] for n, m in members.items()},
        "companions": {n: [[f.name, digests[f]] for f in fs] for n, fs in companions.items()},
        "others": [[file.name, digests[file]] for file in beside],
    }


def stays(members: Iterable[Checkpoint]) -> Callable[[], None]:
    """What stops if a file of these checkpoints, weights or another, is not what it is now.

    For work that takes long before `identify`: it may have read some of them.
    """
    listed = list(members)
    before = _state(listed)

    def check() -> None:
        now = _state(listed)
        for file in sorted({*before, *now}):
            if now.get(file) != before.get(file):
                raise changed(address(file))

    return check


def _state(members: Iterable[Checkpoint]) -> dict[Path, str]:
    """Weights by their identity, all other files by their content; what is gone is left out."""
    found: dict[Path, str] = {}
    for member in members:
        for file in member.files:
            with suppress(OSError, PoolError):
                found[file] = identity(member.given(file))
        found |= file_digests(companion_files(member.path))
    return found
