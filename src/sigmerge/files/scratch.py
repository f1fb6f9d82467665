"""Temporary folders that end with their process; a later run removes those of a killed one."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from sigmerge.errors import OutputError
from sigmerge.files.locks import locked
from sigmerge.files.safe_open import remove
from sigmerge.files.system import is_own, read_at

PREFIX, NEW, LOCK, CONTENT = "sigmerge-", "sigmerge-new-", "lock", "work"
MARKER = b"This lock is held by the sigmerge that uses the folder.\n"
_MADE_HERE = re.compile(rf"{PREFIX}(new-)?[a-z0-9_]{{8}}")
"""The names that mkdtemp gives."""
YOUNG = 60.0
"""A new folder is left alone for this many seconds: its owner may not hold its lock yet."""


def temporary() -> Path:
    """The system's folder for temporary files: TMPDIR, or the usual ones."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise OutputError(
            f"temporary files can be written nowhere ({error.strerror}). Set TMPDIR to a folder "
            "that can be written."
        ) from None


@contextmanager
def scratch(place: Path | None = None) -> Iterator[Path]:
    """An empty folder in `place`, or in the system's temporary folder; removed at the end.

    Its owner holds a lock beside it until then.
    """
    place = place or temporary()
    remove_stale(place)
    outer = Path(tempfile.mkdtemp(prefix=NEW, dir=place))
    with locked(outer / LOCK) as held:
        assert held is not None
        os.write(held, MARKER)
        outer = outer.rename(outer.with_name(PREFIX + outer.name.removeprefix(NEW)))
        try:
            folder = outer / CONTENT
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            remove(outer, if_possible=True)


def is_held(folder: Path) -> bool:
    """Whether this is a folder of `scratch` that a process uses now."""
    lock = folder.with_name(LOCK)
    if folder.name != CONTENT or not _MADE_HERE.fullmatch(folder.parent.name):
        return False
    try:
        if not is_own(lock.stat()):
            return False
        with locked(lock) as handle:
            return handle is None
    except OSError:
        return False


@cache
def remove_stale(place: Path) -> None:
    """Remove this user's scratch folders whose process has ended; runs once per process.

    A folder with unexpected content is not ours and is left alone.
    """
    for outer in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not _may_be_stale(outer):
                continue
            markers = (MARKER, b"") if outer.name.startswith(NEW) else (MARKER,)
            with locked(outer / LOCK) as held:
                if held is not None and read_at(held, len(MARKER) + 1, 0) in markers:
                    remove(outer, if_possible=True)


def _may_be_stale(outer: Path) -> bool:
    """Whether name, owner, age and content are those of a folder that `scratch` made."""
    status = outer.lstat()
    mine = is_own(status) and not outer.is_symlink()
    if not mine or not _MADE_HERE.fullmatch(outer.name):
        return False
    within = {path.name for path in outer.iterdir()}
    if outer.name.startswith(NEW):
        return within <= {LOCK} and time.time() - status.st_mtime >= YOUNG
    return LOCK in within and within <= {LOCK, CONTENT}
