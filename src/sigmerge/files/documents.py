"""JSON files: read within limits, written whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sigmerge.errors import SigmergeError
from sigmerge.files.safe_open import open_regular, sync_folder
from sigmerge.messages import shown, size

LARGEST_DOCUMENT = 64 << 20
"""Bytes of the largest document that is read."""
DEEPEST_DOCUMENT = 64
"""Levels of nesting that a document may have."""
POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer."""


def read_bytes(
    file: Path, what: str, error: type[SigmergeError] = SigmergeError, limit: int = LARGEST_DOCUMENT
) -> bytes:
    """The content of a regular file of at most `limit` bytes; `what` names it in the error."""
    with open_regular(file, what, error) as stream:
        content = bytearray()
        while len(content) <= limit and (piece := stream.read(min(limit + 1, 1 << 20))):
            content += piece
    if len(content) > limit:
        raise error(f"{file}: is larger than {size(limit)}, too large for {what}.")
    return bytes(content)


def expanded(
    content: bytes, file: Path, what: str, error: type[SigmergeError], limit: int
) -> bytes:
    """What the content of a .gz file expands to: at most `limit` bytes."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            found = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise error(f"{file}: cannot be unpacked ({problem}).") from None
    if len(found) > limit:
        raise error(f"{file}: expands to more than {size(limit)}, too large for {what}.")
    return found


def read_json(
    file: Path,
    what: str,
    error: type[SigmergeError] = SigmergeError,
    limit: int = LARGEST_DOCUMENT,
    *,
    unique: bool = False,
) -> Any:
    """The JSON value in a file."""
    content = read_bytes(file, what, error, limit)
    if content.startswith(POINTER):
        raise error(f"{file}: is a Git LFS pointer, not {what}; run `git lfs pull`.")
    if content.lstrip()[:1] == b"<":
        raise error(f"{file}: is a web page, not {what}; download the file itself.")
    return parse_json(content, str(file), error, unique=unique)


def parse_json(
    text: str | bytes,
    where: str,
    error: type[SigmergeError] = SigmergeError,
    *,
    unique: bool = False,
) -> Any:
    """A JSON value; `where` names the text in the error.

    If a key occurs twice, the last value counts; with `unique` it is an error.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise error(f"{where}: the key {shown(key)} is given twice in one object.")
            found[key] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=once if unique else None)
    except (ValueError, UnicodeDecodeError) as problem:
        raise error(f"{where}: not valid JSON ({problem}).") from None
    except RecursionError:
        raise error(f"{where}: JSON nested too deeply.") from None
    if too_deep(value):
        raise error(f"{where}: JSON nested deeper than {DEEPEST_DOCUMENT} levels.")
    return value


def read_json_lines(
    file: Path, what: str, error: type[SigmergeError] = SigmergeError, limit: int = LARGEST_DOCUMENT
) -> Iterator[tuple[int, Any]]:
    """Line number and value of every line that is not blank."""
    return parse_json_lines(read_bytes(file, what, error, limit), str(file), error)


def parse_json_lines(
    content: bytes, where: str, error: type[SigmergeError] = SigmergeError
) -> Iterator[tuple[int, Any]]:
    """As `read_json_lines`, of content that was read already; `where` names it in the error."""
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, parse_json(line, f"{where}, line {number}", error)


def read_json_object(
    file: Path, what: str, error: type[SigmergeError] = SigmergeError, *, unique: bool = False
) -> dict[str, Any]:
    """The JSON object in a file; another JSON value is an error."""
    content = read_json(file, what, error, unique=unique)
    if not isinstance(content, dict):
        raise error(f"{file}: a JSON object is expected: {what}.")
    return content


def too_deep(value: Any, limit: int = DEEPEST_DOCUMENT) -> bool:
    """Whether a value of lists and mappings is nested deeper than `limit` levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


@contextmanager
def whole(file: Path, *, durable: bool = True, place: Path | None = None) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to `file` at the end.

    With `durable` the file is synced to disk; without, its reader must check it, as a power cut can
    truncate it. The temporary path lies beside the file, or in `place` where an interrupted write
    must leave nothing in the file's own folder.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    name = f".{_stem(file.name)}.{os.getpid()}-{threading.get_ident()}.partial"
    partial = (place or file.parent) / name
    try:
        yield partial
        if durable:
            with partial.open("rb") as stream:
                os.fsync(stream.fileno())
        partial.replace(file)
        if durable:
            sync_folder(file.parent)
    except OSError as error:
        error.filename = error.filename or str(file)  # a full disk names none
        raise
    finally:
        partial.unlink(missing_ok=True)


def _stem(name: str) -> str:
    """The start of a name: short enough to append process and thread."""
    return os.fsencode(name)[:200].decode(errors="ignore")


def write_json(file: Path, content: Any, indent: int | None = 2, *, durable: bool = True) -> None:
    with whole(file, durable=durable) as partial:
        partial.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")


def write_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    with whole(file) as partial:
        lines = [json.dumps(record) + "\n" for record in records]
        partial.write_text("".join(lines), encoding="utf-8")


def content_key(parts: list[Any]) -> str:
    """A short digest of plain content: the same on every machine."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
