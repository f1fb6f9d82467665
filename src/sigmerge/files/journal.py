"""A file of JSON lines that survives a kill: what is recorded in it is not done again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sigmerge.errors import OutputError
from sigmerge.files.locks import only_writer
from sigmerge.files.regular import is_regular


def continues(file: Path, header: dict[str, Any]) -> bool:
    """Whether the file is a journal with this header."""
    if not is_regular(file):
        return False
    with file.open("rb") as stream:
        return stream.readline().rstrip(b"\n") == json.dumps(header).encode()


class Journal:
    """Records in order. The first line is the header, which identifies the work.

    Opening a file with the same header puts the records of an interrupted run into `records`. An
    unfinished last line is cut off. If `kinds` are given, every record must have the keys of one of
    them. `what` names the work in errors, for example "search". Records survive a power cut if they
    are `durable`; without that they survive the end of the process.
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
            self._handle = os.open(file, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
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
        line = (json.dumps(record) + "\n").encode()
        end = os.fstat(self._handle).st_size
        try:
            if os.write(self._handle, line) < len(line):
                os.ftruncate(self._handle, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._durable:
                os.fsync(self._handle)
        except OSError as error:
            raise OutputError(
                f"{self.file}: cannot be written ({error.strerror}). What is recorded is kept; "
                "run the same command again to continue."
            ) from None

    def _read(self, header: dict[str, Any]) -> list[dict[str, Any]]:
        content = self.file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        os.ftruncate(self._handle, len(whole))
        lines = [self._record(*pair) for pair in enumerate(whole.splitlines(), start=1)]
        if not lines:
            self.append(header)
        elif lines[0] != json.loads(json.dumps(header)):
            ours, theirs = json.loads(json.dumps(header)), lines[0]
            keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
            raise OutputError(
                f"{self.file.parent}: holds another {self._what}, which differs in "
                f"{', '.join(keys)}; choose a new folder, or pass --overwrite to start over."
            )
        return lines[1:]

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        wanted = self._kinds if number > 1 and self._kinds else [set()]
        if not isinstance(record, dict) or not any(keys <= record.keys() for keys in wanted):
            raise OutputError(
                f"{self.file}, line {number}: is no record of a {self._what}. Delete this line and "
                "those after it to go on from there, or pass --overwrite to start over."
            )
        return record
