"""Temporary folders that end with their process; a later run removes those of a killed one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from sigmerge.files.locks import locked
from sigmerge.files.regular import remove

PREFIX, NEW, LOCK = "sigmerge-", "sigmerge-new-", "lock"
YOUNG = 60.0
"""Seconds in which a folder with a new one's name is left alone: its owner may hold no lock yet."""


@contextmanager
def scratch(place: Path | None = None) -> Iterator[Path]:
    """An empty folder in `place`, removed at the end; without a place, where the system has them.

    Its owner holds a lock beside it until then.
    """
    place = place or Path(tempfile.gettempdir())
    remove_stale(place)
    outer = Path(tempfile.mkdtemp(prefix=NEW, dir=place))
    with locked(outer / LOCK):
        outer = outer.rename(outer.with_name(PREFIX + outer.name.removeprefix(NEW)))
        try:
            folder = outer / "work"
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            remove(outer, if_possible=True)


@cache
def remove_stale(place: Path) -> None:
    """Remove this user's folders there whose process has ended; done once by every process."""
    for outer in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = outer.lstat()
            mine = status.st_uid == os.getuid() and not outer.is_symlink()
            new = outer.name.startswith(NEW)
            if not mine or (new and time.time() - status.st_mtime < YOUNG):
                continue
            if not new and not (outer / LOCK).is_file():  # somebody else's
                continue
            with locked(outer / LOCK) as held:
                if held is not None:
                    remove(outer, if_possible=True)
