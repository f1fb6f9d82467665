"""The store of an experiment: every scored checkpoint in one SQLite file.

One row per run, and one row per run, split, benchmark and metric. Runs are inserted, never changed
or deleted (triggers refuse it), and a run, its scores and the checksum of these rows enter in one
transaction, so a killed experiment leaves whole runs only. A run is known by its content key;
inserting it again with the same content does nothing. `export` lists the content without costs, in
an order that does not depend on the order of insertion: two stores with the same export hold the
same results.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from sigmerge.errors import MissingExtra, OutputError, ScoreError, SigmergeError
from sigmerge.files.checksums import checksum_of
from sigmerge.files.documents import content_key

if TYPE_CHECKING:
    import polars as pl

STORE = "results.sqlite"
"""The name of the store in the folder of a suite."""
LEFT_ALONE = {
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip
"""SQLite errors of an intact file that cannot be written or read now."""
ANALYSIS = "analysis"
"""The name of the folder beside a store that its analysis is written to."""
SCHEMA = 3
"""Version of the tables. A store of another version is refused."""
SAME_MEAN = 1e-6
"""How far a score may be from the mean of its items' scores: they are of one benchmark."""

RunKind = Literal[
    "expert",  # an expert of the pool
    "anchor",  # a dense merge
    "default",  # the repair of an anchor with the paper's constants
    "ablation",  # a part of the repair is removed
    "control",  # a signal is inverted or randomized
    "view",  # capacity from a single view
    "order",  # another claim order
    "sweep",  # another value of one constant
    "ours",  # a setting beyond the paper
    "baseline",  # another method
    "partition",  # deficits under another split; nothing is merged or scored
]
Split = Literal["evaluation", "calibration", "full"]


class StoreError(SigmergeError):
    """The file is not a store of results, or a run does not fit into it."""

    exit_code = 5


@dataclass(frozen=True)
class StoredPool:
    """A pool and its domains, in the order of tables and figures."""

    name: str
    key: str
    domains: tuple[str, ...]


@dataclass(frozen=True)
class StoredScore:
    """One metric of one benchmark, as a fraction; higher is better.

    The domain's score is the mean over its benchmarks of the metric marked `headline`. A
    headline has the items' own scores beside it where a suite measured them.
    """

    domain: str
    benchmark: str
    metric: str
    value: float
    headline: bool
    items: int
    split: Split = "evaluation"
    item_scores: Sequence[float] = ()


@dataclass(frozen=True)
class BuildCost:
    """What it takes to build the checkpoint from nothing, beyond the anchor where there is one.

    As the paper counts (ruling 25): a repair is the pool's profile, one scoring of the anchor and
    the claims; the experts' own scores are there. What begins with `spent` counts those too, and
    every candidate. Work that an earlier run left is counted as if it were done now. `gpu_seconds`
    are those in which models answered or were captured on a GPU. None: not measured, since an
    interrupted run did a part of it, or since no GPU is there.
    """

    wall_seconds: float | None = None
    gpu_seconds: float | None = None
    spent_seconds: float | None = None
    forward_calls: int = 0
    evaluation_calls: int = 0
    labelled: int = 0
    unlabelled: int = 0
    iterations: int = 0
    spent_calls: int = 0
    spent_labelled: int = 0


@dataclass(frozen=True)
class Signals:
    """Measurements of a repair: lists over layers, mappings over domains."""

    views: Mapping[str, Sequence[float]] = field(default_factory=dict)
    conflict: Sequence[float] = ()
    capacity: Sequence[float] = ()
    deficit: Mapping[str, float] = field(default_factory=dict)
    share: Mapping[str, float] = field(default_factory=dict)
    claim_order: Sequence[str] = ()


@dataclass(frozen=True)
class StoredRun:
    """One checkpoint with its scores, or (kind `partition`) one measurement of deficits.

    method       the expert's domain, the operator, the baseline, or `sigmerge`
    anchor       name of the anchor: of an anchor itself, and of whatever is built on one
    anchor_seed  its seed; `seed` is that of the run
    setting      the variant or sweep point, `default` for the paper's own
    constants    c_min, c_max and scale that were used, and any other number that was set
    position     place of the run in the suite; the order of rows in tables
    """

    kind: RunKind
    pool: StoredPool
    method: str
    suite_key: str
    recipe_key: str
    position: int
    anchor: str = ""
    anchor_key: str = ""
    anchor_seed: int = 0
    setting: str = ""
    seed: int = 0
    constants: Mapping[str, float] = field(default_factory=dict)
    scores: tuple[StoredScore, ...] = ()
    signals: Signals = Signals()
    cost: BuildCost = BuildCost()

    @property
    def key(self) -> str:
        """The run's name in the store: equal where everything that determines it is equal."""
        return content_key(
            [
                self.kind,
                self.pool.key,
                self.method,
                self.anchor_key,
                self.anchor,
                self.anchor_seed,
                self.setting,
                self.seed,
                self.recipe_key,
                self.suite_key,
            ]
        )


class Frames(NamedTuple):
    """The store as polars frames, in the order of `position`. Lists and mappings are JSON text."""

    pools: pl.DataFrame
    runs: pl.DataFrame
    scores: pl.DataFrame


_TEXT = ("kind", "method", "anchor", "anchor_key", "setting", "suite_key", "recipe_key")
_WHOLE = ("anchor_seed", "seed", "position")
_JSON = ("constants", *(f.name for f in fields(Signals)))
_COSTS = tuple(f.name for f in fields(BuildCost))
_RUN = ("key", "pool_key", *_TEXT, *_WHOLE, *_JSON, *_COSTS)
_SCORE = ("split", "domain", "benchmark", "metric", "value", "headline", "items", "item_scores")

_TABLES = f"""
CREATE TABLE pools (key TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, domains TEXT NOT NULL);
CREATE TABLE runs (
    key TEXT PRIMARY KEY,
    pool_key TEXT NOT NULL REFERENCES pools (key),
    {", ".join(f"{name} TEXT NOT NULL" for name in _TEXT)},
    {", ".join(f"{name} INTEGER NOT NULL" for name in _WHOLE)},
    {", ".join(f"{name} TEXT NOT NULL" for name in _JSON)},
    {", ".join(f"{name} REAL" for name in _COSTS)}
);
CREATE TABLE scores (
    run TEXT NOT NULL REFERENCES runs (key),
    split TEXT NOT NULL, domain TEXT NOT NULL, benchmark TEXT NOT NULL, metric TEXT NOT NULL,
    value REAL NOT NULL, headline INTEGER NOT NULL, items INTEGER NOT NULL,
    item_scores BLOB NOT NULL,  -- float32, little-endian
    PRIMARY KEY (run, split, benchmark, metric)
);
CREATE TABLE checksums (run TEXT PRIMARY KEY, checksum TEXT NOT NULL);
PRAGMA user_version = {SCHEMA};
"""
_APPEND_ONLY = "".join(
    f"CREATE TRIGGER {table}_{act} BEFORE {act} ON {table} "
    f"BEGIN SELECT RAISE (ABORT, 'the store is append-only'); END;\n"
    for table in ("pools", "runs", "scores")
    for act in ("update", "delete")
)


class RunStore:
    """A store opened by `create` to append, or by `open_read_only` to read."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self.path = connection, path

    def add_pools(self, pools: Sequence[StoredPool]) -> None:
        """Name pools before their runs come: tables have pools in the order of this list."""
        with _told(self.path), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for pool in pools:
                self._add_pool(pool)

    def _add_pool(self, pool: StoredPool) -> None:
        """A pool that is known by its content keeps the name it has here."""
        if self._one("SELECT 1 FROM pools WHERE key = ?", (pool.key,)):
            return
        if self._one("SELECT 1 FROM pools WHERE name = ?", (pool.name,)):
            raise StoreError(f"{self.path}: another pool is called {pool.name!r}.")
        row = (pool.key, pool.name, json.dumps(pool.domains))
        self._connection.execute("INSERT INTO pools VALUES (?, ?, ?)", row)

    def append(self, record: StoredRun) -> bool:
        """Insert a run with its scores in one transaction; False if it was there already."""
        _check(record)
        run, scores = _rows(record)
        with _told(self.path), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._add_pool(record.pool)
            if self._one("SELECT 1 FROM runs WHERE key = ?", (record.key,)):
                self._check_equal(record, run, scores)
                return False
            marks = ", ".join("?" * len(_RUN))
            self._connection.execute(f"INSERT INTO runs VALUES ({marks})", run)
            marks = ", ".join("?" * (1 + len(_SCORE)))
            self._connection.executemany(f"INSERT INTO scores VALUES ({marks})", scores)
            row = (record.key, self._checksum(run, scores))
            self._connection.execute("INSERT INTO checksums VALUES (?, ?)", row)
        return True

    def _checksum(self, run: tuple[Any, ...], scores: Sequence[tuple[Any, ...]]) -> str:
        """Checksum of a run's rows and of its pool's."""
        pool = self._one("SELECT * FROM pools WHERE key = ?", (run[1],))
        return checksum_of([pool, run, sorted(map(_short, scores))])

    def check(self) -> None:
        """Raise StoreError if what is here is not what was stored."""
        with self._snapshot():
            found = [text for (text,) in self._connection.execute("PRAGMA integrity_check (1)")]
            problems = [] if found == ["ok"] else found
            problems += self._changed()
        if problems:
            raise _damaged(self.path, problems[0])

    def _changed(self) -> Iterator[str]:
        """Runs whose checksum does not match."""
        scores: dict[str, list[tuple[Any, ...]]] = {}
        for row in self._connection.execute(f"SELECT run, {', '.join(_SCORE)} FROM scores"):
            scores.setdefault(row[0], []).append(row)
        rows = self._connection.execute(f"SELECT {', '.join(_RUN)} FROM runs")
        runs = {row[0]: row for row in rows}
        stored = dict(self._connection.execute("SELECT * FROM checksums").fetchall())
        for key in sorted({*runs, *scores, *stored}):
            known = key in runs and key in stored
            if not known or self._checksum(runs[key], scores.get(key, [])) != stored[key]:
                yield f"the run {key} is not what was stored"

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Read a consistent snapshot, though an experiment may add runs meanwhile."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")

    def suites(self) -> frozenset[str]:
        """Keys of the suites whose runs are here."""
        return frozenset(r[0] for r in self._connection.execute("SELECT suite_key FROM runs"))

    def keys(self) -> frozenset[str]:
        """Keys of all runs: what a resumed experiment leaves out."""
        with _told(self.path):
            return frozenset(row[0] for row in self._connection.execute("SELECT key FROM runs"))

    def export(self) -> Iterator[str]:
        """Every row without its costs as a JSON line, in canonical order; items as a sum."""
        kept = [name for name in _RUN if name not in _COSTS]
        queries = {
            "pool": "SELECT key, name, domains FROM pools ORDER BY key",
            "run": f"SELECT {', '.join(kept)} FROM runs ORDER BY key",
            "score": f"SELECT run, {', '.join(_SCORE)} FROM scores"
            " ORDER BY run, split, benchmark, metric",
        }
        for table, query in queries.items():
            for row in self._connection.execute(query):
                yield json.dumps([table, *_short(row)], ensure_ascii=False)

    def frames(self) -> Frames:
        """The whole store for analysis."""
        try:
            import polars as pl
        except ImportError as error:
            raise MissingExtra("Reading a store of results", ["polars"], ["lab"]) from error
        with self._snapshot():
            return self._frames(pl)

    def _frames(self, pl: Any) -> Frames:
        def frame(query: str) -> pl.DataFrame:
            cursor = self._connection.execute(query)
            names = [column[0] for column in cursor.description]
            return pl.DataFrame(
                cursor.fetchall(), schema=names, orient="row", infer_schema_length=None
            )

        # Everything follows the pools in the order in which they came into the store.
        order = "pools.rowid, position, runs.key"
        pools = frame(
            "SELECT pools.* FROM pools JOIN runs ON pool_key = pools.key"
            " GROUP BY pools.key ORDER BY pools.rowid"
        )
        runs = frame(
            "SELECT runs.*, name AS pool FROM runs JOIN pools ON pool_key = pools.key"
            f" ORDER BY {order}"
        )
        scores = frame(
            "SELECT scores.* FROM scores JOIN runs ON run = runs.key"
            " JOIN pools ON pool_key = pools.key"
            f" ORDER BY {order}, split, scores.rowid"
        )
        runs = runs.with_columns(pl.col(*_COSTS).cast(pl.Float64))
        return Frames(pools, runs, scores.with_columns(pl.col("headline").cast(pl.Boolean)))

    def _one(self, query: str, values: Sequence[Any]) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self._connection.execute(query, values).fetchone()
        return found

    def _check_equal(
        self, record: StoredRun, run: tuple[Any, ...], scores: list[tuple[Any, ...]]
    ) -> None:
        """A run that is inserted again must have its old content; costs and place may differ."""
        held = self._one("SELECT * FROM runs WHERE key = ?", (record.key,))
        rows = self._connection.execute("SELECT * FROM scores WHERE run = ?", (record.key,))
        assert held is not None
        free = {*_COSTS, "position"}
        changed = [n for n, a, b in zip(_RUN, held, run, strict=True) if a != b and n not in free]
        if sorted(rows) != sorted(scores):
            changed.append("scores")
        if changed:
            raise StoreError(
                f"{self.path}: the run {record.key} ({record.pool.name}, {record.kind} "
                f"{record.method} {record.anchor} {record.setting}, seed {record.seed}) is stored "
                f"with other {', '.join(changed)}. Results are never replaced; use a new store."
            )


@contextmanager
def create(path: Path) -> Iterator[RunStore]:
    """Open a store to append to, or make an empty one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _told(path):
        connection = _connected(path, "rwc")
    with closing(connection):
        with _told(path):
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            if not _tables(connection):
                connection.executescript(f"BEGIN IMMEDIATE;{_TABLES}{_APPEND_ONLY}COMMIT;")
            _check_schema(connection, path)
        yield RunStore(connection, path)  # what a suite does meanwhile is told by itself


@contextmanager
def open_read_only(path: Path) -> Iterator[RunStore]:
    """Open a store to read. The experiment that fills it may still run, or may have been killed."""
    if not path.is_file():
        raise StoreError(f"{path}: no such store of results; `sigmerge suite` makes one.")
    with _told(path), closing(_connected(path, _reading(path))) as connection:
        connection.execute("PRAGMA query_only = ON")
        _check_schema(connection, path)
        store = RunStore(connection, path)
        store.check()
        yield store


def is_begun(path: Path) -> bool:
    """Whether a store is there, and not only the empty file of one that could not be made."""
    if not path.exists():
        return False
    with _told(path), closing(_connected(path, _reading(path))) as connection:
        return bool(_tables(connection))


def _reading(path: Path) -> str:
    """A killed writer leaves a journal that only a connection which may write can roll back."""
    return "rw" if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "ro"


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Convert SQLite errors: the message names the store and says what to do."""
    try:
        yield
    except sqlite3.DatabaseError as problem:
        code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
        if code in LEFT_ALONE:
            raise OutputError(
                f"{path}: cannot be used now ({problem}). The runs in it are kept; run the same "
                "command again to continue."
            ) from None
        if code == sqlite3.SQLITE_NOTADB:
            raise StoreError(f"{path}: is not a store of results ({problem}).") from None
        raise _damaged(path, str(problem)) from None
    except UnicodeDecodeError as problem:
        raise _damaged(path, f"{problem.object!r}"[:100]) from None


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(
        f"{path}: is damaged ({why}). Put a copy of it back; or remove it and run the suite again, "
        "which scores no item twice."
    )


def _tables(connection: sqlite3.Connection) -> set[str]:
    """A view in the place of a table is none: it may compute without end."""
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {row[0] for row in names}


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not {"pools", "runs", "scores", "checksums"} <= _tables(connection):
        raise StoreError(f"{path}: is not a store of results (a table is missing).")
    if version != SCHEMA:
        raise StoreError(
            f"{path}: has schema {version}; this version reads schema {SCHEMA}. Run the suite "
            "again in a new folder, or use the version of sigmerge that made the store."
        )


def _rows(record: StoredRun) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """A record as its rows of runs and scores."""
    content = {
        "key": record.key,
        "pool_key": record.pool.key,
        **{name: getattr(record, name) for name in (*_TEXT, *_WHOLE)},
        "constants": _plain(record.constants),
        **{f.name: _plain(getattr(record.signals, f.name)) for f in fields(Signals)},
        **{name: None if v is None else float(v) for name, v in asdict(record.cost).items()},
    }
    run = tuple(content[name] for name in _RUN)
    scores = [
        (
            record.key,
            s.split,
            s.domain,
            s.benchmark,
            s.metric,
            float(s.value),
            int(s.headline),
            s.items,
            struct.pack(f"<{len(s.item_scores)}f", *s.item_scores),
        )
        for s in record.scores
    ]
    return run, scores


def _short(row: Sequence[Any]) -> list[Any]:
    """A row with the items' scores as a sum."""
    return [sha256(value).hexdigest() if isinstance(value, bytes) else value for value in row]


def _plain(value: Any) -> str:
    """Mappings keep the order of their keys out of the text: equal content, equal text."""

    def simple(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: simple(part[key]) for key in sorted(part)}
        if isinstance(part, str):
            return part
        return [simple(x) for x in part] if isinstance(part, Sequence) else float(part)

    return json.dumps(simple(value), ensure_ascii=False, allow_nan=False)


def _check(record: StoredRun) -> None:
    """Report everything that is wrong with a record at once."""
    problems = []
    if record.kind not in get_args(RunKind):
        problems.append(f"kind {record.kind!r} is unknown")
    if not record.scores and record.kind != "partition":
        problems.append("it has no scores")
    for score in record.scores:
        place = f"{score.benchmark} {score.metric} ({score.split})"
        if score.domain not in record.pool.domains:
            problems.append(f"{place}: the pool has no domain {score.domain!r}")
        if not (math.isfinite(score.value) and 0 <= score.value <= 1):
            problems.append(f"{place}: {score.value!r} is not a fraction between 0 and 1")
        if score.items < 1:
            problems.append(f"{place}: {score.items} items")
        if score.item_scores and len(score.item_scores) != score.items:
            problems.append(f"{place}: {len(score.item_scores)} scores of {score.items} items")
        elif score.item_scores and abs(fmean(score.item_scores) - score.value) > SAME_MEAN:
            mean = fmean(score.item_scores)
            problems.append(f"{place}: {score.value!r} is not the mean of its items, {mean!r}")
    if problems:
        raise ScoreError(f"A run of the pool {record.pool.name} cannot be stored.", problems)
