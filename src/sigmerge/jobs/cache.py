"""`sigmerge cache`: list, verify and remove what is cached between runs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sigmerge import kept
from sigmerge.checkpoints.remote import is_sound, stand_ins
from sigmerge.checkpoints.writer import parse_size
from sigmerge.errors import OutputError
from sigmerge.files.digests import idle_notes, is_whole, notes, rehashing
from sigmerge.files.objects import STAND_IN_RECORD
from sigmerge.files.safe_open import remove
from sigmerge.kept import Listed

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class CacheListing:
    """Entries of the cache; `removed` is True if they were removed."""

    roots: tuple[Path, ...]
    entries: tuple[Listed, ...]
    limit: int
    removed: bool = False

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    @property
    def damaged(self) -> tuple[Listed, ...]:
        return tuple(entry for entry in self.entries if not entry.sound)

    def as_json(self) -> dict[str, Any]:
        entries = [
            {
                "name": entry.name,
                "of": entry.of,
                "key": entry.key,
                "root": str(entry.root),
                "bytes": entry.bytes,
                "made": entry.made,
                "used": entry.used,
                "libraries": dict(entry.runtime),
                "sound": entry.sound,
            }
            for entry in self.entries
        ]
        roots = [str(root) for root in self.roots]
        return {"roots": roots, "bytes": self.bytes, "limit": self.limit,
                "removed": self.removed, "entries": entries}  # fmt: skip


def listing(pools: Sequence[Path] = (), *, verify: bool = False) -> CacheListing:
    """Every entry of the user's cache and of these pools; `verify` reads all their bytes."""
    _check(pools)
    with rehashing() if verify else nullcontext():
        others = (*_stand_ins(verify), *_digests(notes(), verify))
        return _over(pools, lambda root: kept.listing(root, verify=verify), others)


def _stand_ins(verify: bool = False) -> Iterator[Listed]:
    """Local copies of remote folders: headers and small files, or complete if loaded."""
    for place, url in stand_ins().items():
        files = tuple(file for file in place.rglob("*") if file.is_file())
        record = place / STAND_IN_RECORD
        used = (record if record.exists() else place).stat().st_mtime
        size = sum(file.stat().st_size for file in files)
        yield Listed(
            place.parent, "remote", url, place.name, size, place.stat().st_mtime, used, {}, {},
            (place, *files), bool(url) and (not verify or is_sound(place)),
        )  # fmt: skip


def _digests(found: Sequence[Path], verify: bool = False) -> Iterator[Listed]:
    """All cached digests as one entry: there is one note for every file that was read."""
    if found:
        times = [note.stat().st_mtime for note in found]
        size = sum(note.stat().st_size for note in found)
        yield Listed(
            found[0].parent, "digests", f"{len(found):,} files", "", size, min(times), max(times),
            {}, {}, tuple(found), not verify or all(map(is_whole, found)),
        )  # fmt: skip


def _dropped(entries: Iterable[Listed]) -> tuple[Listed, ...]:
    gone = tuple(entries)
    for entry in gone:
        for file in entry.files if entry.name == "digests" else entry.files[:1]:
            remove(file, if_possible=True)
    return gone


def prune(
    pools: Sequence[Path] = (), *, older_than: str | None = None, larger_than: str | None = None
) -> CacheListing:
    """Remove entries that exceed the given age or size; with both limits, those that exceed both.

    Damaged entries, and notes of files that are gone or have changed, are always removed.
    """
    age, most = _seconds(older_than), parse_size(larger_than) if larger_than else None
    if age is None and most is None:
        age = math.inf
    _check(pools)
    now = time.time()
    others = _dropped(
        entry for entry in _stand_ins()
        if not entry.sound or ((age is None or now - entry.used > age)
                               and (most is None or entry.bytes > most))
    )  # fmt: skip
    others += _dropped(_digests(idle_notes()))
    made = partial(kept.prune, older_than=age, larger_than=most)
    return _over(pools, made, others, removed=True)


def clear(pools: Sequence[Path] = ()) -> CacheListing:
    """Remove every entry."""

    def gone(root: Path) -> list[Listed]:
        entries = list(kept.listing(root))
        kept.clear(root)
        return entries

    _check(pools)
    others = _dropped((*_stand_ins(), *_digests(notes())))
    return _over(pools, gone, others, removed=True)


def _check(pools: Sequence[Path]) -> None:
    for pool in pools:
        if not pool.is_dir():
            raise OutputError(f"--pool {pool}: no such folder.")


def _over(
    pools: Sequence[Path],
    work: Callable[[Path], Iterable[Listed]],
    others: Sequence[Listed],
    *,
    removed: bool = False,
) -> CacheListing:
    roots = tuple(kept.roots(pools))
    entries = (*(entry for root in roots for entry in work(root)), *others)
    return CacheListing(roots, entries, kept.size_limit(), removed)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if not found or found[2] not in _UNITS:
        raise OutputError(
            f"--older-than {text!r} is not understood; write it as 30d, 12h or 90min."
        )
    return float(found[1]) * _UNITS[found[2]]
