"""Per-item results in one SQLite file, so that nothing is scored twice.

A result is keyed by the checkpoint's content, the settings it was scored under, and the item with
its content. Results come in batches; a batch is written whole or not at all, also when the process
is killed. Several evaluations may use one store: a batch waits until another one is written.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import OutputError
from sigmerge.files.digests import sha256
from sigmerge.probing.generate import Usage

MetricValue = float | list[float]
"""A metric of an item; a list is pooled with the lists of other items."""
UNPARSED = "unparsed"
"""Beside the metrics of a judged item: 1 where the judge could not be understood."""

WAIT = 60.0
"""Seconds that a batch waits for another evaluation's; one is written in milliseconds."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    id INTEGER PRIMARY KEY, calls INTEGER, prompt_tokens INTEGER, generated_tokens INTEGER,
    seconds REAL, written REAL
);
CREATE TABLE IF NOT EXISTS results (
    checkpoint TEXT, settings TEXT, item TEXT, digest TEXT, scores TEXT, output TEXT,
    judge TEXT, batch INTEGER REFERENCES batches,
    PRIMARY KEY (checkpoint, settings, item, digest)
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Scored:
    """What an item got: its metrics, what the model said, and who judged it, if anyone."""

    scores: dict[str, MetricValue]
    output: Any = None
    judge: str | None = None


@dataclass(frozen=True)
class Key:
    """Under which results of one benchmark on one checkpoint are kept."""

    checkpoint: str
    settings: str


def settings_key(settings: Mapping[str, Any]) -> str:
    """A short name for everything a score depends on besides the checkpoint and the item."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


AROUND = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py")
"""What decides, besides the weights, what a checkpoint answers; *.txt are vocabularies too."""


def checkpoint_key(folder: Path, allow_pickle: bool = False) -> str:
    """A checkpoint by content: weights, configuration, tokenizer and code, wherever it lies."""
    checkpoint = open_checkpoint(folder, allow_pickle=allow_pickle)
    around = [file for ending in AROUND for file in folder.glob(ending)]
    weights = set(checkpoint.files)
    digests = sha256({*checkpoint.files, *around})
    lines = sorted(f"{'' if file in weights else file.name} {d}" for file, d in digests.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]


@dataclass
class AnswerStore:
    """Open it with `with`."""

    file: Path
    _connection: sqlite3.Connection = field(init=False, repr=False)

    def __enter__(self) -> AnswerStore:
        if self.file.is_dir():
            raise OutputError(f"{self.file}: is a folder; give --store a file.")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(self.file, timeout=WAIT, isolation_level=None)
        try:
            with self._readable():
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                self._connection.executescript(_SCHEMA)
        except OutputError:
            self.__exit__(None, None, None)
            raise
        return self

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Report what SQLite or JSON finds wrong with a damaged file."""
        try:
            yield
        except (sqlite3.DatabaseError, json.JSONDecodeError) as error:
            raise OutputError(
                f"{self.file}: cannot be used as a store of results ({error}). If it is damaged, "
                "move it away; what it held is scored again."
            ) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def write(self, key: Key, results: Mapping[tuple[str, str], Scored], usage: Usage) -> None:
        """Add a batch of results, {(item, digest): result}; all of it or nothing."""
        with self._readable():
            self._write(key, results, usage)

    def _write(self, key: Key, results: Mapping[tuple[str, str], Scored], usage: Usage) -> None:
        db = self._connection
        db.execute("BEGIN IMMEDIATE")
        try:
            cost = (*asdict(usage).values(), time.time())
            batch = db.execute("INSERT INTO batches VALUES (NULL, ?, ?, ?, ?, ?)", cost).lastrowid
            db.executemany(
                "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (key.checkpoint, key.settings, *item, json.dumps(result.scores),
                     json.dumps(result.output, default=str), result.judge, batch)
                    for item, result in results.items()
                ],
            )  # fmt: skip
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise

    def read(self, key: Key, wanted: Iterable[tuple[str, str]]) -> dict[str, Scored]:
        """The results that are there, by item."""
        asked = set(wanted)
        with self._readable():
            rows = self._connection.execute(
                "SELECT item, digest, scores, output, judge FROM results "
                "WHERE checkpoint = ? AND settings = ?",
                (key.checkpoint, key.settings),
            )
            return {
                item: Scored(json.loads(scores), json.loads(output), judge)
                for item, digest, scores, output, judge in rows
                if (item, digest) in asked
            }

    def usage(self, key: Key, wanted: Iterable[tuple[str, str]]) -> Usage:
        """What the batches that hold these results cost, whenever they were scored."""
        asked, costs = set(wanted), {}
        with self._readable():
            rows = self._connection.execute(
                "SELECT item, digest, id, calls, prompt_tokens, generated_tokens, seconds "
                "FROM results JOIN batches ON batch = id WHERE checkpoint = ? AND settings = ?",
                (key.checkpoint, key.settings),
            )
            for item, digest, batch, *cost in rows:
                if (item, digest) in asked:
                    costs[batch] = Usage(*cost)
        return sum(costs.values(), Usage())
