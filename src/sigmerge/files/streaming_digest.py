"""Digests of remote files, computed from the ranges that a job reads anyway.

A digest needs bytes in order, but a job reads tensors in its own order. So each leaf of a file
(files/digests.py) is hashed on its own: a range that continues its leaf is hashed at once, an early
one is buffered, and a run with an incomplete leaf is read again at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sigmerge.files import digests
from sigmerge.files.objects import RemoteFile, remote_file

HELD = 256 << 20
"""Maximum number of buffered bytes; further early ranges are dropped, and read again."""


@dataclass(eq=False)
class _Leaf:
    at: int
    """Position up to which it is hashed."""
    end: int
    value: digests.Hasher
    waiting: dict[int, bytes] = field(default_factory=dict)
    """Buffered early ranges by position."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Leaves:
    """The leaves of those remote files whose digests are not cached."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        found = {file: remote for file in files if (remote := remote_file(file))}
        unknown = digests.unknown(found)
        self._watched = {file: found[file] for file in unknown}
        self._remotes = set(self._watched.values())
        self._begun: dict[tuple[RemoteFile, int], _Leaf] = {}
        self._digests: dict[tuple[RemoteFile, int], bytes] = {}
        self._held, self._lock = 0, threading.Lock()
        for file, remote in self._watched.items():
            self.take(remote, 0, file.read_bytes())  # the header, which a stub has

    def __contains__(self, file: Path) -> bool:
        """Whether a file is hashed from what is read of it."""
        return file in self._watched

    def take(self, remote: RemoteFile, begin: int, data: bytes) -> None:
        """Receive bytes of a file that were read at `begin`."""
        if remote not in self._remotes:
            return
        size, hasher = digests.leaf_rule(remote.size)
        for first, part in digests.by_leaf(begin, memoryview(data), size):
            key = remote, first
            with self._lock:
                if key in self._digests:
                    continue
                fresh = _Leaf(first, min(first + size, remote.size), hasher())
                leaf = self._begun.setdefault(key, fresh)
            with leaf.lock:
                self._add(leaf, max(begin, first), part)
                if leaf.at == leaf.end:
                    with self._lock:
                        self._digests[key] = leaf.value.digest()
                        self._begun.pop(key, None)

    def digest(self, remote: RemoteFile, begin: int) -> bytes | None:
        """Leaf digests of the run that begins there; None if it was not read completely."""
        size = digests.leaf_rule(remote.size).size
        run = range(begin, min(begin + max(digests.RUN_BYTES, size), remote.size), size)
        keys = [(remote, first) for first in run]
        # Of an empty file nothing comes.
        there = bool(keys) and all(key in self._digests for key in keys)
        return b"".join(self._digests[key] for key in keys) if there else None

    def _add(self, leaf: _Leaf, at: int, data: memoryview) -> None:
        if at > leaf.at:
            if at not in leaf.waiting and self._reserve(len(data)):
                leaf.waiting[at] = bytes(data)
            return
        _update(leaf, at, data)
        while leaf.waiting and (first := min(leaf.waiting)) <= leaf.at:
            early = leaf.waiting.pop(first)
            self._reserve(-len(early))
            _update(leaf, first, memoryview(early))

    def _reserve(self, size: int) -> bool:
        with self._lock:
            fits = self._held + size <= HELD
            self._held += size if fits else 0
            return fits


def _update(leaf: _Leaf, at: int, data: memoryview) -> None:
    """Hash the new part of a range."""
    new = data[leaf.at - at :]
    leaf.value.update(new)
    leaf.at += len(new)
