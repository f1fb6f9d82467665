"""A document from a pipe, which can be read once: its bytes are held for further reads."""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path

from sigmerge.errors import RecipeError
from sigmerge.files.system import BYTES, NO_WAIT
from sigmerge.messages import reason, size

PIPED = Path("-")
"""Standard input; also the name of a document from a pipe, as if it lay in the current folder."""

_kept: dict[Path, bytes] = {}


def taken(file: Path, most: int) -> Path:
    """The same path, or PIPED if it is a pipe, of which up to `most` bytes are read now."""
    try:
        handle = _handle(file)
        if handle is None:
            return file
        os.set_blocking(handle, True)
        with FileIO(handle, closefd=handle != 0) as stream:
            content = bytearray()
            while len(content) <= most and (piece := stream.read(1 << 16)):
                content += piece
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({reason(error)}).") from None
    if len(content) > most:
        raise RecipeError(f"{file}: more than {size(most)} come through it; too large for YAML.")
    _kept[PIPED] = bytes(content)
    return PIPED


def kept(file: Path) -> bytes | None:
    """The bytes of the pipe if `file` is PIPED, else None."""
    return _kept.get(file)


def is_there(file: Path) -> bool:
    """Whether the file exists, or is a document from a pipe."""
    return file in _kept or file.exists()


def _handle(file: Path) -> int | None:
    """An open pipe; None if the path is something else.

    Opens without blocking: a FIFO without a writer would block forever.
    """
    if file == PIPED:
        return 0
    try:
        found = file.stat()
    except (OSError, ValueError):  # which is reported where the file is read
        return None
    if not stat.S_ISFIFO(found.st_mode) and not stat.S_ISSOCK(found.st_mode):
        return None
    if os.path.samestat(found, os.fstat(0)):
        return 0
    return os.open(file, os.O_RDONLY | BYTES | NO_WAIT)
