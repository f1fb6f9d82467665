"""`sigmerge cache`: what is kept between runs, whether it is whole, and its removal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge import kept
from sigmerge.checkpoints.writer import parse_size
from sigmerge.errors import OutputError
from sigmerge.kept import Listed

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class CacheListing:
    """Entries of the cache: `removed` says whether they are gone now."""

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
    return _over(pools, lambda root: kept.listing(root, verify=verify))


def prune(
    pools: Sequence[Path] = (), *, older_than: str | None = None, larger_than: str | None = None
) -> CacheListing:
    """Remove entries that were not used for so long, or are larger; of both, what both hold for.

    Damaged ones always go.
    """
    age, most = _seconds(older_than), parse_size(larger_than) if larger_than else None
    if age is None and most is None:
        age = math.inf
    return _over(
        pools, lambda root: kept.prune(root, older_than=age, larger_than=most), removed=True
    )


def clear(pools: Sequence[Path] = ()) -> CacheListing:
    """Remove every entry."""

    def gone(root: Path) -> list[Listed]:
        entries = list(kept.listing(root))
        kept.clear(root)
        return entries

    return _over(pools, gone, removed=True)


def _over(
    pools: Sequence[Path], work: Callable[[Path], Iterable[Listed]], *, removed: bool = False
) -> CacheListing:
    for pool in pools:
        if not pool.is_dir():
            raise OutputError(f"--pool {pool}: no such folder.")
    roots = tuple(kept.roots(pools))
    entries = tuple(entry for root in roots for entry in work(root))
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
