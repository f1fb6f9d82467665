"""A folder of public data: JSON, JSON lines, CSV and plain lines, as they are or gzipped."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sigmerge.errors import ScoreError
from sigmerge.files.documents import expanded, parse_json, parse_json_lines, read_bytes

LARGEST_UNPACKED = 1 << 30
"""Bytes of the largest file of records when it is unpacked."""


class PublicData:
    """Files by their names below a folder, read once; `sums` has what was read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sums: dict[str, str] = {}
        self._latest = root

    def check(self, names: Iterable[str]) -> None:
        """ScoreError with every file that is not there."""
        missing = [name for name in sorted(set(names)) if self._place(name) is None]
        if missing:
            raise ScoreError(
                f"{self.root}: these files are missing, plain and with .gz; put them there:",
                missing,
            )

    @contextmanager
    def understood(self) -> Iterator[None]:
        """In this context content of another form is ScoreError with the file that was read last.

        Readers take columns and numbers as the data set has them; what they stumble over is said.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            found = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ScoreError(
                f"{self._latest}: is not as its data set has it ({found}); download it again."
            ) from error

    def _place(self, name: str) -> Path | None:
        places = (self.root / name, self.root / f"{name}.gz")
        return next((place for place in places if place.is_file()), None)

    def content(self, name: str) -> bytes:
        """A file's bytes, unpacked; the name may say .gz itself."""
        place = self._place(name)
        if place is None:
            raise ScoreError(f"{self.root / name}: no such file, plain or with .gz.")
        self._latest = place
        packed = read_bytes(place, "a file of records", ScoreError)
        content = packed
        if place.suffix == ".gz":
            content = expanded(packed, place, "records", ScoreError, LARGEST_UNPACKED)
        self.sums[name] = hashlib.sha256(content).hexdigest()
        return content

    def records(self, name: str, rows: str | None = None) -> list[dict[str, Any]]:
        """The records of JSON, JSON lines or CSV; `rows` is the key of a JSON object's list."""
        found = self._parsed(name, rows)
        if not found or not all(isinstance(record, dict) for record in found):
            raise ScoreError(f"{self._latest}: holds no records; download it again.")
        return found

    def _parsed(self, name: str, rows: str | None) -> list[dict[str, Any]]:
        content, kind = self.content(name), Path(name.removesuffix(".gz")).suffix
        where = str(self.root / name)
        if kind == ".jsonl":
            return [record for _, record in parse_json_lines(content, where, ScoreError)]
        if kind == ".csv":
            return list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")))
        found = parse_json(content.decode("utf-8-sig"), where, ScoreError)
        return found[rows] if rows else found

    def lines(self, name: str) -> list[str]:
        """The lines of a text, without the space around them."""
        return [line.strip() for line in self.content(name).decode().rstrip("\n").split("\n")]
