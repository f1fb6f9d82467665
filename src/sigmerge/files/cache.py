"""The user's cache folder, and notes in it: one JSON object each, with a checksum.

A cache may lose anything. A note that is missing, damaged or unreadable is made again, and a folder
that is full or read-only stores nothing; neither stops a run. The checksum of a note also covers
its file name, so that a damaged or a renamed note is detected.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from sigmerge.errors import OutputError, SigmergeError
from sigmerge.files.checksums import CHECKSUM, is_intact, sealed
from sigmerge.files.documents import read_json, write_json
from sigmerge.files.scratch import temporary
from sigmerge.files.sources import PACKAGE
from sigmerge.files.system import is_own, user


def cache_place(name: str) -> Path:
    """A folder in SIGMERGE_CACHE, or in the user's cache folder; it need not exist."""
    return Path(cache_root()) / name


def cache_root() -> str:
    return os.environ.get("SIGMERGE_CACHE") or _users()


@cache
def _users() -> str:
    named, below = _OF_SYSTEMS.get(sys.platform, ("XDG_CACHE_HOME", "~/.cache"))
    place = os.environ.get(named, "")
    if not os.path.isabs(place):  # noqa: PTH117  (XDG has relative ones passed over)
        place = os.path.expanduser(below)  # noqa: PTH111  (pathlib raises where no home is known)
    return str(_of_homeless()) if place.startswith("~") else str(Path(place, "sigmerge"))


_OF_SYSTEMS = {
    "darwin": ("", "~/Library/Caches"),
    "win32": ("LOCALAPPDATA", "~/AppData/Local"),
}
"""The environment variable that names the folder of all caches, and its default."""


def _of_homeless() -> Path:
    """A folder in the temporary folder, for a user without a home folder, as in many containers.

    Only this user may write it, since cached results are trusted.
    """
    place = temporary() / f"sigmerge-cache-{user()}"
    with suppress(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
        mine = stat.S_ISDIR(status.st_mode) and is_own(status)
        if mine and not status.st_mode & 0o077:
            return place
    raise OutputError(
        f"{place}: is not this user's alone, and no home folder is known. Set HOME, or "
        "SIGMERGE_CACHE to a folder that can be written."
    )


def cache_folder(name: str) -> Path:
    """As `cache_place`, created; raises OutputError if that fails."""
    folder = cache_place(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: the cache cannot be written there ({error.strerror}). "
            "Set SIGMERGE_CACHE to a folder that can be written."
        ) from None
    return folder


def is_installed(folder: Path) -> bool:
    """Whether a folder lies in an installed package: nothing is written there."""
    real = folder.resolve()
    return real.is_relative_to(PACKAGE) or bool({"site-packages", "dist-packages"} & {*real.parts})


def kept_json(note: Path, keys: set[str]) -> dict[str, Any] | None:
    """A note with these keys; None if it is missing or damaged."""
    try:
        content = read_json(note, "a note")
    except SigmergeError:
        return None
    if not isinstance(content, dict) or not keys <= content.keys():
        return None
    if not is_intact(content, note.name):
        return None
    content.pop(CHECKSUM)
    return content


def keep_json(note: Path, content: dict[str, Any]) -> bool:
    """Write a note for later runs; False if it could not be written."""
    with suppress(OSError):
        write_note(note, content)
        return True
    return False


def write_note(note: Path, content: dict[str, Any]) -> None:
    """Write a note; raises OSError if that fails."""
    write_json(note, sealed(content, note.name), indent=None, durable=False)
