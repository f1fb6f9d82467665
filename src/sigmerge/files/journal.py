"""An append-only journal of JSON lines beside a partial result or an upload, for resuming it.

Work that is recorded in it is not repeated.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sigmerge.errors import OutputError
from sigmerge.files.checksums import CHECKSUM, sealed
from sigmerge.files.documents import LARGEST_DOCUMENT
from sigmerge.files.locks import only_writer
from sigmerge.files.safe_open import is_regular
from sigmerge.files.system import BYTES
from sigmerge.messages import reason


def continues(file: Path, header: dict[str, Any]) -> bool:
    """Whether the file is a journal with this header."""
    if not is_regular(file):
        return False
    with file.open("rb") as stream:
        line = as_line(header)
        return stream.readline(len(line)) == line


def as_line(record: dict[str, Any]) -> bytes:
    """A record as it is written: with a checksum that detects damage."""
    return (json.dumps(sealed(record)) + "\n").encode()


class Journal:
    """Records in order. The first line is the header, which identifies the work.

    Opening a file with the same header puts the records of an interrupted run into `records`. A
    line that is unfinished or not as it was written is cut off with all that follow it. If `kinds`
    are given, every record must have the keys of one of them. `what` names the work in errors, for
    example "upload". `durable` records survive a power cut; others survive a killed process.
    """

    def __init__(
        self,
        file: Path,
        header: dict[str, Any],
        kinds: Sequence[set[str]] = (),
        what: str = "run",
        *,
        durable: bool = True,
    ) -> None:
        self.file, self._kinds, self._what, self._durable = file, kinds, what, durable
        self._stack = ExitStack()
        try:
            lock = file.with_name(f".{file.name}.lock")
            self._stack.enter_context(only_writer(lock, f"{file}: another {what} is writing it."))
            self._handle = os.open(file, os.O_CREAT | os.O_RDWR | os.O_APPEND | BYTES, 0o644)
            self._stack.callback(os.close, self._handle)
            self.records = self._read(header)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; it is on the disk when this returns."""
        line = as_line(record)
        end = os.fstat(self._handle).st_size
        try:
            if os.write(self._handle, line) < len(line):
                os.ftruncate(self._handle, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._durable:
                os.fsync(self._handle)
        except OSError as error:
            raise OutputError(
                f"{self.file}: cannot be written ({reason(error)}). What is recorded is kept; "
                "run the same command again to continue."
            ) from None

    def _read(self, header: dict[str, Any]) -> list[dict[str, Any]]:
        with self.file.open("rb") as stream:
            first = stream.readline(LARGEST_DOCUMENT)
            if not first.endswith(b"\n"):
                os.ftruncate(self._handle, 0)
                self.append(header)
                return []
            self._check_header(_record(first), json.loads(json.dumps(header)))
            records, end = [], stream.tell()
            while (record := _record(stream.readline(LARGEST_DOCUMENT))) is not None:
                if self._kinds and not any(keys <= record.keys() for keys in self._kinds):
                    break
                records.append(record)
                end = stream.tell()
        os.ftruncate(self._handle, end)
        return records

    def _check_header(self, theirs: dict[str, Any] | None, ours: dict[str, Any]) -> None:
        if theirs is None:
            raise OutputError(
                f"{self.file}: its first line is damaged, or another version wrote it. Delete the "
                "file, or pass --overwrite, to start over."
            )
        if theirs != ours:
            keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
            raise OutputError(
                f"{self.file.parent}: holds another {self._what}, which differs in "
                f"{', '.join(keys)}; choose a new folder, or pass --overwrite to start over."
            )


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    record.pop(CHECKSUM, None)
    return record if as_line(record) == line else None
