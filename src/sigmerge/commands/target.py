"""Folders that hold a whole piece of work, of `search` or `run`: what in them is ours."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sigmerge.errors import OutputError

_UNFINISHED = r"\.+{name}(\.\d+-\d+)?(\.(search|candidate|old|partial|partial\.lock))+"
"""What an interrupted command leaves beside something of this name while it makes it."""


@dataclass(frozen=True)
class WorkFolder:
    """What a command writes into its folder: files, checkpoints, and the file written last."""

    what: str
    files: tuple[str, ...]
    checkpoints: tuple[str, ...]
    last: str

    def check(self, out: Path, overwrite: bool, inputs: Iterable[Path]) -> None:
        """Refuse a folder with an input or anything foreign in it; a finished one unless asked."""
        if out.is_symlink():
            raise OutputError(f"{out}: is a link; name the folder itself, or choose a new one.")
        if out.exists() and not out.is_dir():
            raise OutputError(f"{out}: is a file; choose a new folder for the {self.what}.")
        target = Path(os.path.realpath(out))
        for folder in inputs:
            if Path(os.path.realpath(folder)).is_relative_to(target):
                raise OutputError(f"{out}: holds an input, {folder}; choose a new folder.")
        names = sorted(file.name for file in out.iterdir()) if out.exists() else []
        for name in names:
            if not self._ours(out / name):
                raise OutputError(
                    f"{out}: holds {name}, which no {self.what} wrote; choose a new folder."
                )
        if self.last in names and not overwrite:
            raise OutputError(
                f"{out}: holds a finished {self.what}; pass --overwrite to replace it."
            )

    def clear(self, out: Path) -> None:
        """Take away what is ours, and nothing else; the mark of a finished one goes first."""
        (out / self.last).unlink(missing_ok=True)
        for path in list(out.iterdir()) if out.exists() else []:
            if self._ours(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _ours(self, path: Path) -> bool:
        if path.is_symlink():
            return False
        if path.name in self.files:
            return path.is_file()
        if path.name in self.checkpoints:
            made = (path / "config.json").is_file() and (path / "sigmerge").is_dir()
            return path.is_dir() and (made or not any(path.iterdir()))
        known = "|".join(map(re.escape, (*self.files, *self.checkpoints)))
        return re.fullmatch(_UNFINISHED.format(name=f"({known})"), path.name) is not None
