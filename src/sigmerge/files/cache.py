"""Where results are kept between runs: beside a pool, or in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from sigmerge.errors import OutputError


def cache_folder(name: str) -> Path:
    """SIGMERGE_CACHE, or the user's cache folder."""
    root = Path(os.environ.get("SIGMERGE_CACHE") or platformdirs.user_cache_dir("sigmerge"))
    folder = root / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: what is remembered between runs cannot be kept there ({error.strerror}). "
            "Set SIGMERGE_CACHE to a folder that can be written."
        ) from None
    return folder


def beside(member: Path, name: str) -> Path:
    """A place of that name beside a pool's members, or in the cache if that cannot be written."""
    folder = member.parent / ".sigmerge"
    writable = os.access(folder if folder.exists() else folder.parent, os.W_OK)
    if writable or (folder / name).exists():
        return folder / name
    return cache_folder("profiles") / name
