"""JSON and YAML files: read within limits, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sigmerge.errors import SigmergeError

LARGEST = 64 << 20
"""Bytes of the largest document that is read."""
DEEPEST = 64
"""Levels of nesting that a document may have."""


def read_bytes(
    file: Path, what: str, error: type[SigmergeError] = SigmergeError, limit: int = LARGEST
) -> bytes:
    """The content of a regular file of at most `limit` bytes; `what` names it in the error.

    A FIFO, a socket or a device is refused without being opened.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise error(f"{file}: is not a regular file; {what} is expected.")
        with file.open("rb") as stream:
            content = stream.read(limit + 1)
    except FileNotFoundError:
        raise error(f"{file}: no such file; {what} is expected.") from None
    except OSError as problem:
        raise error(f"{file}: cannot be read ({problem.strerror}); {what} is expected.") from None
    if len(content) > limit:
        raise error(f"{file}: is larger than {limit >> 20} MiB, too large for {what}.")
    return content


def read_json(
    file: Path, what: str, error: type[SigmergeError] = SigmergeError, limit: int = LARGEST
) -> Any:
    """The JSON value in a file."""
    return parse_json(read_bytes(file, what, error, limit), str(file), error)


def parse_json(text: str | bytes, where: str, error: type[SigmergeError] = SigmergeError) -> Any:
    """A JSON value; `where` names the text in the error."""
    try:
        value = json.loads(text)
    except (ValueError, UnicodeDecodeError) as problem:
        raise error(f"{where}: not valid JSON ({problem}).") from None
    except RecursionError:
        raise error(f"{where}: JSON nested too deeply.") from None
    if too_deep(value):
        raise error(f"{where}: JSON nested deeper than {DEEPEST} levels.")
    return value


def read_json_object(
    file: Path, what: str, error: type[SigmergeError] = SigmergeError
) -> dict[str, Any]:
    """The JSON object in a file; another JSON value is an error."""
    content = read_json(file, what, error)
    if not isinstance(content, dict):
        raise error(f"{file}: a JSON object is expected: {what}.")
    return content


def too_deep(value: Any, limit: int = DEEPEST) -> bool:
    """Whether a value of lists and mappings is nested deeper than `limit` levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A name to write under. The file appears when all is written, whoever else writes it too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, content: Any, indent: int | None = 2) -> None:
    with whole(file) as partial:
        partial.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")


def content_key(parts: list[Any]) -> str:
    """A short name for plain content: the same on every machine."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
