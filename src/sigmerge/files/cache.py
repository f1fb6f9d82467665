"""The user's cache folder, and notes in it: one JSON object each, with a checksum.

What is kept can be made again. So a note that is missing, damaged or unreadable is made again, and
a place that is full or read-only keeps nothing; neither stops a run. A note has a checksum, which
also covers its own name: one with a wrong bit, or under the name of another, is known as damaged.
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
"""The variable that names the folder of all caches, and where it is else."""


def _of_homeless() -> Path:
    """Among the temporary folders, for a user whose home nothing names, as in many containers.

    It is this user's alone: what is kept is believed.
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
    """The same folder, made; for what a run cannot do without."""
    folder = cache_place(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: what is remembered between runs cannot be kept there ({error.strerror}). "
            "Set SIGMERGE_CACHE to a folder that can be written."
        ) from None
    return folder


def is_installed(folder: Path) -> bool:
    """Whether a folder is in an installed package, into which nothing is written."""
    real = folder.resolve()
    return real.is_relative_to(PACKAGE) or bool({"site-packages", "dist-packages"} & {*real.parts})


def kept_json(note: Path, keys: set[str]) -> dict[str, Any] | None:
    """A note that is a JSON object with these keys; None if it has to be made again."""
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
    """Keep a note for the next run, where that is possible; returns whether it was."""
    with suppress(OSError):
        write_note(note, content)
        return True
    return False


def write_note(note: Path, content: dict[str, Any]) -> None:
    """Write a note that has to be there."""
    write_json(note, sealed(content, note.name), indent=None, durable=False)
