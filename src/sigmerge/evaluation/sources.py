"""Where a benchmark's records come from: a local data folder, or the hub where that is allowed."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge.errors import MissingExtra, ScoreError
from sigmerge.evaluation.suite import (
    SHIPPED,
    Benchmark,
    Code,
    File,
    Hub,
    Jsonl,
    LmEval,
    Nano,
    Safety,
)

WHOLE = "all"
"""The part's name of a benchmark that is not cut by language."""


@dataclass(frozen=True)
class Item:
    """A record with its place: the part (a language, or all) and its index there.

    `split` is set where the source itself says to which split the record belongs.
    """

    part: str
    index: int
    record: dict[str, Any]
    split: str | None = None

    @property
    def id(self) -> str:
        return f"{self.part}/{self.index}"

    @property
    def digest(self) -> str:
        """SHA-256 of the record's content."""
        text = json.dumps(self.record, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Data:
    """`folder` holds the files that suites name; the hub is asked only when `hub` is true."""

    folder: Path | None = None
    hub: bool = False

    @classmethod
    def default(cls, folder: Path | None = None, hub: bool = False) -> Data:
        """The given folder, or the environment's SIGMERGE_DATA."""
        named = os.environ.get("SIGMERGE_DATA")
        return cls(folder or (Path(named) if named else None), hub)


class NoSource(ScoreError):
    """A benchmark's records are not here."""


def load_items(name: str, mark: Benchmark, data: Data, suite_folder: Path) -> list[Item]:
    """All records of a benchmark, parts in the suite's order; NoSource if one part is missing."""
    if isinstance(mark, Nano):
        return list(_nano_items(mark))
    items: list[Item] = []
    for part in mark.languages or [WHOLE]:
        rows = _rows(name, mark, part, data, suite_folder)
        kept = [row for row in rows if _kept(row, mark)]
        columns = {column: None for row in kept for column in row}
        items += [Item(part, i, {**columns, **row}) for i, row in enumerate(kept)]
    if not items:
        raise ScoreError(f"{name}: its source holds no record that is kept.")
    if not isinstance(mark, Code):  # whether programs may run at all is asked first
        check_records(name, mark, items)
    return items


def check_records(name: str, mark: Benchmark, items: Sequence[Item]) -> None:
    """Every record must have what the benchmark asks of it."""
    if not isinstance(mark, Code | Jsonl | Safety):
        return
    for item in items:
        if lacking := [column for column in mark.columns if item.record.get(column) is None]:
            known = ", ".join(column for column, v in item.record.items() if v is not None)
            raise ScoreError(f"{name}: the record {item.id} has no {lacking[0]!r}; it has {known}.")
        if isinstance(mark, Jsonl) and mark.matcher == "regex":
            pattern = str(item.record[mark.answer])
            try:
                re.compile(pattern)
            except re.error as error:
                raise ScoreError(
                    f"{name}: the answer {pattern!r} of the record {item.id} is no regular "
                    f"expression ({error})."
                ) from None


def _nano_items(mark: Nano) -> Iterator[Item]:
    from dataclasses import asdict

    from sigmerge.nano.files import SPLITS, load_items

    for split in SPLITS:
        for i, fact in enumerate(load_items(split, mark.domain)):
            yield Item(split, i, asdict(fact), split)


def _kept(row: dict[str, Any], mark: Benchmark) -> bool:
    if any(row.get(column) is None for column in mark.present):
        return False
    return all(row.get(column) == value for column, value in mark.keep.items())


def _rows(
    name: str, mark: Benchmark, part: str, data: Data, suite_folder: Path
) -> list[dict[str, Any]]:
    if isinstance(mark, LmEval) and not mark.sourced:
        from sigmerge.evaluation.harness import task_records

        return task_records(name, mark, part, mark.tasks_folder(suite_folder), data.hub)
    tried = []
    beside = None if suite_folder == SHIPPED else suite_folder
    roots = [root for root in (data.folder, beside) if root is not None]
    for file in mark.files:
        path = Path(file.path.replace("{language}", part)).expanduser()
        for place in dict.fromkeys(root / path for root in roots):
            for candidate in (place, place.with_name(place.name + ".gz")):
                if candidate.is_file():
                    return read_rows(candidate, file)
            tried.append(str(place))
    if data.hub and mark.hub is not None:
        return _hub_rows(mark.hub, part)
    where = f"looked for {', '.join(tried)}" if tried else "it names no file"
    hub = f"; --hub reads {mark.hub.path} from the hub" if mark.hub else ""
    raise NoSource(f"{name}: its records are not here ({where}). Give --data FOLDER{hub}.")


def read_rows(path: Path, file: File) -> list[dict[str, Any]]:
    """The records of one file, columns renamed."""
    name = path.name
    try:
        raw = path.read_bytes()
        if name.endswith(".gz"):
            raw, name = gzip.decompress(raw), name.removesuffix(".gz")
        text = raw.decode("utf-8-sig")
        if name.endswith(".csv"):
            rows: Any = list(csv.DictReader(io.StringIO(text)))
        elif name.endswith(".jsonl"):
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            rows = json.loads(text)
            rows = rows[file.rows] if file.rows else rows
    except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error, csv.Error) as error:
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
        raise MissingExtra("datasets", "eval", "Reading benchmarks from the hub") from None
    name = hub.name.replace("{language}", part) if hub.name else None
    return [dict(row) for row in load_dataset(hub.path, name, split=hub.split)]
