"""Checks where the files of a checkpoint lie.

A link in a downloaded folder could lead to any file of the user, which would then be copied into
the result. So a link must stay in its folder. There are two exceptions: snapshots in the hub's
cache, and what stands in for one that is not whole, consist of links into `blobs/` of the same
model; and a folder that `sigmerge.kept` shows to what scores a checkpoint consists of links to the
checkpoint's files, which were checked already.
"""

from __future__ import annotations

import stat
from pathlib import Path

from sigmerge.errors import PoolError
from sigmerge.files.objects import linked_folder
from sigmerge.files.scratch import is_held


def is_there(file: Path) -> bool:
    """Whether a file of a checkpoint exists; False for invalid names."""
    try:
        return file.exists()
    except (OSError, ValueError):
        return False


def check_file(folder: Path, file: Path) -> None:
    """Raises for non-regular files and for symlinks that point outside the folder."""
    try:
        status = file.lstat()
        if stat.S_ISREG(status.st_mode) and file.parent == folder:
            return
        real, mode = file.resolve(strict=True), file.stat().st_mode
    except (OSError, RuntimeError, ValueError) as error:
        raise PoolError(
            f"{folder}: {file.name[:200]} cannot be opened ({error}); copy or download it again."
        ) from None
    inside = any(real.is_relative_to(root) for root in _roots(folder))
    if not inside and not is_held(folder.resolve().parent):
        raise PoolError(
            f"{folder}: {file.name} is a link that leaves the folder, to {real}; refused. Put the "
            "file itself there if it belongs to the checkpoint."
        )
    if not stat.S_ISREG(mode):
        raise PoolError(f"{folder}: {file.name} is not a regular file; refused.")


def _roots(folder: Path) -> list[Path]:
    real = folder.resolve()
    hub = real.parent.name == "snapshots" and real.parents[1].name.startswith("models--")
    blobs = real.parents[1] / "blobs" if hub else linked_folder(real)
    return [real, blobs] if blobs else [real]
