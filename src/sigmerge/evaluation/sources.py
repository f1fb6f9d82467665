"""Sources of a benchmark's records: a local data folder, or the hub if that is allowed."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sigmerge.errors import MissingExtra, ScoreError
from sigmerge.files.documents import expanded, parse_json, parse_json_lines, read_bytes

SHIPPED_BENCHMARKS = Path(__file__).parent / "suites"
"""The folder of the shipped suites; no records lie beside them."""
WHOLE = "all"
"""The part's name of a benchmark that is not cut by language."""


LARGEST_RECORDS = 1 << 30
"""Bytes of the largest file of records that is read, and of what a compressed one expands to."""


class StrictSection(BaseModel):
    """A section of a suite: unknown keys are errors, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class File(StrictSection):
    """A file of records below the data folder: JSONL, JSON or CSV, plain or gzipped.

    `rows` is the key of the list in a JSON object; `columns` renames, {new: old.dotted.path}.
    """

    path: str
    rows: str | None = None
    columns: dict[str, str] = Field(default_factory=dict)


class Hub(StrictSection):
    path: str
    name: str | None = None
    split: str = "test"


@dataclass(frozen=True)
class Item:
    """A record with its place: the part (a language, or all) and its index there.

    `split` is set where the source itself says to which split the record belongs.
    """

    part: str
    index: int
    record: dict[str, Any]
    split: str | None = None

    @cached_property
    def id(self) -> str:
        return f"{self.part}/{self.index}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the record's content."""
        text = json.dumps(self.record, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Data:
    """`folder` holds the files that suites name; the hub is used only when `hub` is true.

    `told`: the folder was named for this evaluation, and not by the environment for all.
    """

    folder: Path | None = None
    hub: bool = False
    told: bool = False

    @classmethod
    def default(cls, folder: Path | None = None, hub: bool = False) -> Data:
        """The given folder, or the environment's SIGMERGE_DATA."""
        named = os.environ.get("SIGMERGE_DATA")
        return cls(folder or (Path(named) if named else None), hub, told=folder is not None)


class NoSource(ScoreError):
    """Raised if a benchmark's records are not available."""


def find_rows(
    name: str, files: Sequence[File], hub: Hub | None, part: str, data: Data, suite_folder: Path
) -> list[dict[str, Any]]:
    """The records of a benchmark's part: the first of its files that is here, else the hub."""
    tried = []
    beside = None if suite_folder == SHIPPED_BENCHMARKS else suite_folder
    roots = [root for root in (data.folder, beside) if root is not None]
    for file in files:
        path = Path(file.path.replace("{language}", part)).expanduser()
        for place in dict.fromkeys(root / path for root in roots):
            for candidate in (place, place.with_name(place.name + ".gz")):
                if candidate.is_file():
                    return read_rows(candidate, file)
            tried.append(str(place))
    if data.hub and hub is not None:
        return _hub_rows(hub, part)
    where = f"looked for {', '.join(tried)}" if tried else "it names no file"
    hint = f"; --hub reads {hub.path} from the hub" if hub else ""
    raise NoSource(f"{name}: its records are not here ({where}). Give --data FOLDER{hint}.")


def read_rows(path: Path, file: File) -> list[dict[str, Any]]:
    """The records of one file, columns renamed."""
    name, content = path.name, read_bytes(path, "a file of records", ScoreError, LARGEST_RECORDS)
    try:
        if name.endswith(".gz"):
            content = expanded(content, path, "records", ScoreError, LARGEST_RECORDS)
            name = name.removesuffix(".gz")
        if name.endswith(".jsonl"):
            rows: Any = [row for _, row in parse_json_lines(content, str(path), ScoreError)]
        elif name.endswith(".csv"):
            rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"))))
        else:
            rows = parse_json(content.decode("utf-8-sig"), str(path), ScoreError)
            rows = rows[file.rows] if file.rows else rows
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ScoreError(f"{path}: cannot be read ({error!r}).") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ScoreError(f"{path}: a list of JSON objects is expected; rows: names its key.")
    return [_renamed(row, file.columns, path) for row in rows]


def _renamed(row: dict[str, Any], columns: dict[str, str], path: Path) -> dict[str, Any]:
    if not columns:
        return row
    old = {dotted.partition(".")[0] for dotted in columns.values()}
    new = {key: value for key, value in row.items() if key not in old}
    for name, dotted in columns.items():
        value: Any = row
        for key in dotted.split("."):
            if not isinstance(value, dict) or key not in value:
                raise ScoreError(f"{path}: a record has no {dotted}, which is to be {name}.")
            value = value[key]
        new[name] = value
    return new


def _hub_rows(hub: Hub, part: str) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingExtra("Reading benchmarks from the hub", ["datasets"], ["eval"]) from None
    name = hub.name.replace("{language}", part) if hub.name else None
    return [dict(row) for row in load_dataset(hub.path, name, split=hub.split)]
