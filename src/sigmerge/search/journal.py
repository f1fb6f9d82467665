"""A file of JSON lines that survives a kill: what is in it was done and is not done again."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigmerge.errors import OutputError


def continues(file: Path, header: dict[str, Any]) -> bool:
    """Whether a journal is there that was begun under this header."""
    if not file.exists():
        return False
    first = file.read_bytes().partition(b"\n")[0]
    return first == json.dumps(header).encode()


class Journal:
    """Records in their order; the first is the header, which says whose records they are.

    Opened on a file with the same header, `records` holds what an interrupted run left. A line
    that was not finished when the run ended is cut off. Every record has the keys of one of the
    `kinds`, if there are any.
    """

    def __init__(self, file: Path, header: dict[str, Any], kinds: Sequence[set[str]] = ()) -> None:
        self.file, self._kinds = file, kinds
        self._handle = os.open(file, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
        try:
            self._lock()
            self.records = self._read(header)
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def append(self, record: dict[str, Any]) -> None:
        os.write(self._handle, (json.dumps(record) + "\n").encode())
        os.fsync(self._handle)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(f"{self.file}: another search is writing it.") from None

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
                f"{self.file.parent}: holds another search, which differs in {', '.join(keys)}; "
                "choose a new folder, or pass --overwrite to start over."
            )
        return lines[1:]

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        wanted = self._kinds if number > 1 and self._kinds else [set()]
        if not isinstance(record, dict) or not any(keys <= record.keys() for keys in wanted):
            raise OutputError(
                f"{self.file}, line {number}: is no record of a search. Delete this line and those "
                "after it to go on from there, or pass --overwrite to start over."
            )
        return record
