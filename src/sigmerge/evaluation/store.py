"""Per-item results in one SQLite file, so that nothing is scored twice.

A result is keyed by the checkpoint's content, the settings it was scored under, and the item with
its content. Results come in batches; a batch is written whole or not at all, also when the process
is killed. Several evaluations may use one store: a batch waits until another one is written.

To remember is optional. A damaged store is set aside, and what it held is scored again; results
that cannot be written are kept until the process ends. Neither stops an evaluation.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from sigmerge.checkpoints.companions import companion_files
from sigmerge.checkpoints.declared import AROUND
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import OutputError, SigmergeError, SigmergeWarning
from sigmerge.files.checksums import checksum_of
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import parse_json
from sigmerge.files.regular import is_regular
from sigmerge.probing.generate import Usage

MetricValue = float | list[float]
"""A metric of an item; a list is pooled with the lists of other items."""
UNPARSED = "unparsed"
"""Beside the metrics of a judged item: 1 where the judge could not be understood."""

WAIT = 60.0
"""Seconds that a batch waits for another evaluation's; one is written in milliseconds."""

ENDINGS = (".sqlite", ".sqlite3", ".db")
"""A file of another kind is set aside only under such a name: --store may have been misspelt."""

_TABLES = {"batches", "results"}
_PARTS = ("-wal", "-shm", "-journal", "")
LEFT_ALONE = {
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip
"""What SQLite reports of a file that is sound, but cannot be written or read now."""
_OPENING = "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    id INTEGER PRIMARY KEY, calls INTEGER, prompt_tokens INTEGER, generated_tokens INTEGER,
    seconds REAL, written REAL
);
CREATE TABLE IF NOT EXISTS results (
    checkpoint TEXT, settings TEXT, item TEXT, digest TEXT, scores TEXT, output TEXT,
    judge TEXT, batch INTEGER REFERENCES batches, checksum TEXT,
    PRIMARY KEY (checkpoint, settings, item, digest)
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Scored:
    """What an item got: its metrics, the output of the model, and the judge, if there was one."""

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


def checkpoint_key(folder: Path, allow_pickle: bool = False) -> str:
    """A checkpoint by content: weights, configuration, tokenizer and code, wherever it lies."""
    checkpoint = open_checkpoint(folder, allow_pickle=allow_pickle)
    around = [file for ending in AROUND for file in checkpoint.path.glob(ending)]
    around += companion_files(checkpoint.path)
    weights = set(checkpoint.files)
    digests = file_digests({*checkpoint.files, *around})
    lines = sorted(f"{'' if file in weights else file.name} {d}" for file, d in digests.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]


@dataclass
class AnswerStore:
    """Open it with `with`. One that is only `looked_at` is neither made nor set aside."""

    file: Path
    looked_at: bool = False
    _kept: sqlite3.Connection | None = field(init=False, repr=False, default=None)
    _unkept: sqlite3.Connection = field(init=False, repr=False)
    _writable: bool = field(init=False, repr=False, default=False)
    _inode: int | None = field(init=False, repr=False, default=None)
    _replaced: bool = field(init=False, repr=False, default=False)

    def __enter__(self) -> AnswerStore:
        self._unkept = sqlite3.connect(":memory:", isolation_level=None)
        self._unkept.executescript(_SCHEMA)
        try:
            self._open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unkept.close()
        self._close()

    def write(self, key: Key, results: Mapping[tuple[str, str], Scored], usage: Usage) -> None:
        """Add a batch of results, {(item, digest): result}; all of it or nothing."""
        while self._kept is not None and self._writable:
            try:
                return _insert(self._kept, key, results, usage)
            except sqlite3.DatabaseError as error:
                self._trouble(error)
        return _insert(self._unkept, key, results, usage)

    def read(self, key: Key, wanted: Iterable[tuple[str, str]]) -> dict[str, Scored]:
        """The results that are there, by item; a row that cannot be a result is none."""
        asked, found = set(wanted), {}
        for row in self._rows("results.* FROM results", key):
            item, digest, *answer = row[2:7]
            checksum = row[8] if len(row) > 8 else None  # an earlier version's, looked at
            sound = checksum in (None, checksum_of(row[:7]))
            result = _scored(*answer) if sound and (item, digest) in asked else None
            if result is not None:
                found[item] = result
        return found

    def usage(self, key: Key, wanted: Iterable[tuple[str, str]]) -> Usage:
        """What the batches that hold these results cost, whenever they were scored."""
        asked, costs = set(wanted), {}
        columns = (
            "item, digest, id, written, calls, prompt_tokens, generated_tokens, seconds "
            "FROM results JOIN batches ON batch = id"
        )
        for item, digest, batch, written, *cost in self._rows(columns, key):
            if (item, digest) in asked and all(isinstance(value, int | float) for value in cost):
                costs[batch, written] = Usage(*cost)
        return sum(costs.values(), Usage())

    def _rows(self, columns: str, key: Key) -> list[tuple[Any, ...]]:
        """Rows of the store, and of what could not be written into it."""
        query, what = f"SELECT {columns} WHERE checkpoint = ? AND settings = ?", astuple(key)
        kept: list[tuple[Any, ...]] = []
        if self._kept is not None:
            try:
                kept = self._kept.execute(query, what).fetchall()
            except sqlite3.DatabaseError as error:
                self._trouble(error)
        return kept + self._unkept.execute(query, what).fetchall()

    def _open(self) -> None:
        try:
            if self.file.is_dir():
                raise OutputError(f"{self.file}: is a folder; give --store a file.")
            if self.file.exists() and not is_regular(self.file):
                self._forget("is not a regular file")
            elif not self.looked_at:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                _prepare(self._connect("mode=rwc"))
                self._writable = True
            elif self.file.exists():
                self._connect(self._unchanged)
        except OSError as error:
            self._forget(error.strerror or str(error))
        except sqlite3.DatabaseError as error:
            self._trouble(error)

    @property
    def _unchanged(self) -> str:
        """How to read without leaving a file beside the store."""
        return "mode=ro" if Path(f"{self.file}-wal").exists() else "mode=ro&immutable=1"

    def _connect(self, how: str) -> sqlite3.Connection:
        self._close()
        link = f"file:{quote(str(self.file.absolute()))}?{how}"
        self._kept = sqlite3.connect(link, timeout=WAIT, isolation_level=None, uri=True)
        self._kept.text_factory = lambda text: text.decode(errors="replace")
        self._inode = self.file.stat().st_ino if self.file.exists() else None
        names = {str(name) for (name,) in self._kept.execute("SELECT name FROM sqlite_master "
                 "WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")}  # fmt: skip
        if names - _TABLES:
            raise OutputError(f"{self.file}: is a database of something else; give --store a file "
                              "of its own.")  # fmt: skip
        return self._kept

    def _close(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._kept, self._writable = None, False

    def _trouble(self, error: sqlite3.DatabaseError) -> None:
        """A damaged store is replaced, once; one that cannot be used now is left alone."""
        sound = getattr(error, "sqlite_errorcode", 0) & 0xFF in LEFT_ALONE
        if sound or self.looked_at or self._replaced:
            return self._forget(str(error))
        self._replaced = True
        self._close()
        try:
            self._set_aside(error)
        except OSError as problem:
            return self._forget(f"{error}; {problem.strerror}")
        return self._open()

    def _forget(self, why: str) -> None:
        """What is scored from now on is remembered until the end only; reading may go on."""
        if not self.looked_at:
            _warn(f"{self.file}: cannot be written ({why}). The results are not remembered.")
        self._replaced = True
        self._close()
        with suppress(OSError, sqlite3.Error):
            if is_regular(self.file):
                self._connect(self._unchanged)

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        if self._inode not in (None, self.file.stat().st_ino):
            return  # another evaluation has done it
        with self.file.open("rb") as stream:
            known = stream.read(16) == b"SQLite format 3\0"
        if not known and self.file.suffix not in ENDINGS:
            raise OutputError(f"{self.file}: is no store of results; give --store another file.")
        aside = self.file.with_name(f"{self.file.name}.damaged")
        for part in _PARTS:
            with suppress(FileNotFoundError):
                Path(f"{self.file}{part}").replace(f"{aside}{part}")
        _warn(f"{self.file}: is damaged ({error}). It is called {aside.name} now, and what it held "
              "is scored again.")  # fmt: skip


def _warn(text: str) -> None:
    warnings.warn(text, SigmergeWarning, stacklevel=3)


def _prepare(db: sqlite3.Connection) -> None:
    """Make the tables; rows of earlier versions have no checksum, and are believed."""
    db.executescript(_OPENING + _SCHEMA)
    db.execute("BEGIN IMMEDIATE")
    if "checksum" not in {name for _, name, *_ in db.execute("PRAGMA table_info(results)")}:
        db.execute("ALTER TABLE results ADD COLUMN checksum TEXT")
    db.execute("COMMIT")


def _insert(
    db: sqlite3.Connection, key: Key, results: Mapping[tuple[str, str], Scored], usage: Usage
) -> None:
    rows = [
        (*astuple(key), *item, json.dumps(result.scores), json.dumps(result.output, default=str),
         result.judge)
        for item, result in results.items()
    ]  # fmt: skip
    db.execute("BEGIN IMMEDIATE")
    try:
        cost = (*asdict(usage).values(), time.time())
        batch = db.execute("INSERT INTO batches VALUES (NULL, ?, ?, ?, ?, ?)", cost).lastrowid
        db.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                       [(*row, batch, checksum_of(row)) for row in rows])  # fmt: skip
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite has done so itself after some errors
            db.execute("ROLLBACK")
        raise


def _scored(scores: Any, output: Any, judge: Any) -> Scored | None:
    try:
        found, said = parse_json(scores, "a score"), parse_json(output, "an answer")
    except (SigmergeError, TypeError):
        return None
    values = found.values() if isinstance(found, dict) else [None]
    each = [v for value in values for v in (value if isinstance(value, list) else [value])]
    whole = all(isinstance(value, int | float) for value in each)
    return (
        Scored(found, said, judge) if whole and (judge is None or isinstance(judge, str)) else None
    )
