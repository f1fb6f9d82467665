"""The store: whole runs only, never changed, the same content however often it was killed."""

from __future__ import annotations

import pickle
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from sigmerge.errors import OutputError, ScoreError
from sigmerge.lab.experiments.analyze import AnalyzeJob
from sigmerge.lab.experiments.store import (
    BuildCost,
    Signals,
    StoredPool,
    StoredRun,
    StoredScore,
    StoreError,
    create,
    open_read_only,
)
from tests.lab.analysis import experiment

POOL = StoredPool("tiny", "key of tiny", ("math", "coding"))
RECORD = StoredRun(
    kind="default",
    pool=POOL,
    method="sigmerge",
    suite_key="suite",
    recipe_key="recipe",
    position=3,
    anchor="TIES",
    anchor_key="ties",
    setting="default",
    constants={"scale": 0.6, "c_min": 0.1},
    scores=(
        StoredScore("math", "GSM8K", "flex", 0.5, True, 80),
        StoredScore("math", "GSM8K", "strict", 0.4, False, 80),
        StoredScore("coding", "MBPP+", "pass@1", 0.25, True, 30),
    ),
    signals=Signals(views={"sign": [0.1, 0.2]}, share={"math": 0.25, "coding": 0.75}),
    cost=BuildCost(wall_seconds=2.0, evaluation_calls=5),
)


def export(path: Path) -> list[str]:
    with open_read_only(path) as store:
        return list(store.export())


def test_a_run_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    with create(tmp_path / "s.sqlite") as store:
        assert store.append(RECORD)
    with open_read_only(tmp_path / "s.sqlite") as store:
        pools, runs, scores = store.frames()
        assert store.keys() == {RECORD.key}
    assert pools.to_dicts() == [
        {"key": "key of tiny", "name": "tiny", "domains": '["math", "coding"]'}
    ]
    (run,) = runs.to_dicts()
    assert (run["pool"], run["anchor"], run["setting"], run["position"]) == (
        "tiny",
        "TIES",
        "default",
        3,
    )
    assert run["views"] == '{"sign": [0.1, 0.2]}'
    assert (run["wall_seconds"], run["evaluation_calls"]) == (2.0, 5.0)
    rows = scores.select("benchmark", "metric", "value", "headline", "items").rows()
    assert rows == [
        ("GSM8K", "flex", 0.5, True, 80),
        ("GSM8K", "strict", 0.4, False, 80),
        ("MBPP+", "pass@1", 0.25, True, 30),
    ]


def test_the_same_run_again_changes_nothing(tmp_path: Path) -> None:
    again = replace(
        RECORD, cost=BuildCost(wall_seconds=9.0), constants={"c_min": 0.1, "scale": 0.6}
    )
    with create(tmp_path / "s.sqlite") as store:
        store.append(RECORD)
        assert not store.append(again)
    assert len(export(tmp_path / "s.sqlite")) == 1 + 1 + 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"scores": RECORD.scores[:2]}, "scores"),
        ({"constants": {"scale": 0.7}}, "constants"),
        ({"signals": Signals()}, "views, share"),
    ],
)
def test_another_content_under_the_same_key_is_refused(
    tmp_path: Path, change: dict, what: str
) -> None:
    with create(tmp_path / "s.sqlite") as store:
        store.append(RECORD)
        before = list(store.export())
        with pytest.raises(StoreError, match=f"stored with other {what}"):
            store.append(replace(RECORD, **change))
        assert list(store.export()) == before


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"setting": "equal_share"},
        {"recipe_key": "r2"},
        {"suite_key": "s2"},
        {"anchor_key": "a2"},
        {"anchor_seed": 1},
        {"kind": "control"},
        {"method": "m2"},
    ],
)
def test_whatever_determines_a_run_is_in_its_key(change: dict) -> None:
    assert replace(RECORD, **change).key != RECORD.key
    assert replace(RECORD, position=9, cost=BuildCost()).key == RECORD.key


def test_two_pools_cannot_share_a_name(tmp_path: Path) -> None:
    with create(tmp_path / "s.sqlite") as store:
        store.append(RECORD)
        with pytest.raises(StoreError, match="another pool is called 'tiny'"):
            store.append(replace(RECORD, pool=replace(POOL, key="other")))


@pytest.mark.parametrize("statement", ["UPDATE scores SET value = 1", "DELETE FROM runs"])
def test_rows_cannot_be_changed_or_deleted(tmp_path: Path, statement: str) -> None:
    with create(tmp_path / "s.sqlite") as store:
        store.append(RECORD)
    connection = sqlite3.connect(tmp_path / "s.sqlite")
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(statement)
    connection.close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    with create(tmp_path / "s.sqlite"):
        pass
    with open_read_only(tmp_path / "s.sqlite") as store, pytest.raises(OutputError):
        store.append(RECORD)


def test_all_problems_of_a_record_are_reported_together(tmp_path: Path) -> None:
    wrong = replace(
        RECORD,
        scores=(
            StoredScore("math", "GSM8K", "flex", 52.1, True, 80),
            StoredScore("safety", "XSTest", "accuracy", float("nan"), True, 0),
        ),
    )
    with create(tmp_path / "s.sqlite") as store, pytest.raises(ScoreError) as caught:
        store.append(wrong)
    text = str(caught.value)
    assert "52.1 is not a fraction" in text and "no domain 'safety'" in text
    assert "nan is not a fraction" in text and "0 items" in text
    with create(tmp_path / "s.sqlite") as store, pytest.raises(ScoreError, match="no scores"):
        store.append(replace(RECORD, scores=()))


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such store"), open_read_only(tmp_path / "none"):
        pass
    (tmp_path / "text").write_text("not a database, " * 100)
    for opened in (create, open_read_only):
        with pytest.raises(StoreError, match="not a store"), opened(tmp_path / "text"):
            pass
    with create(tmp_path / "new.sqlite"):
        pass
    connection = sqlite3.connect(tmp_path / "new.sqlite")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    again = "schema 2; this version reads schema 3. Run the suite again"
    with pytest.raises(StoreError, match=again), open_read_only(tmp_path / "new.sqlite"):
        pass


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE scores SET value = 0.75 WHERE metric = 'flex'",
        "UPDATE runs SET setting = 'defaulu'",
        "UPDATE runs SET key = 'another'",
        "UPDATE pools SET name = 'tinx'",
        "DELETE FROM scores WHERE metric = 'flex'",
        "ALTER TABLE runs RENAME COLUMN setting TO settinf",
    ],
)
def test_rows_that_were_damaged_are_not_believed(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "s.sqlite"
    with create(file) as store:
        store.append(RECORD)
    with closing(sqlite3.connect(file)) as db, db:
        for table, act in product(("pools", "runs", "scores"), ("update", "delete")):
            db.execute(f"DROP TRIGGER {table}_{act}")
        db.execute(damage)
    with pytest.raises(StoreError, match="is damaged"), open_read_only(file):
        pass


def test_what_fails_while_a_store_is_open_is_no_damage_of_it(tmp_path: Path) -> None:
    """Its user would be told to remove the store."""
    with pytest.raises(UnicodeDecodeError), create(tmp_path / "s.sqlite"):
        b"\xff".decode()


def test_a_full_disk_is_told_and_the_runs_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite"
    told = pytest.raises(OutputError, match=r"cannot be used now \(database or disk is full\)")
    with told, create(file) as store:
        store.append(RECORD)
        (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        for seed in range(1, 999):
            store.append(replace(RECORD, seed=seed))
    assert len(export(file)) > 4


def test_items_of_another_benchmark_are_refused(tmp_path: Path) -> None:
    """Scores of items come with the score that is their mean."""
    (math, *others) = RECORD.scores
    swapped = replace(math, items=4, item_scores=(1.0, 0.0, 0.0, 0.0))
    with create(tmp_path / "s.sqlite") as store:
        with pytest.raises(ScoreError, match="not the mean") as caught:
            store.append(replace(RECORD, scores=(swapped, *others)))
        assert "GSM8K flex (evaluation): 0.5 is not the mean of its items, 0.25" in str(
            caught.value
        )
        store.append(replace(RECORD, scores=(replace(swapped, value=0.25), *others)))


def test_the_export_has_what_the_items_scored(tmp_path: Path) -> None:
    """Two stores whose scores are equal and whose items are not hold other results."""
    (math, *others) = RECORD.scores
    exports = []
    for k, items in enumerate([(1.0, 0.0), (0.0, 1.0)]):
        record = replace(RECORD, scores=(replace(math, items=2, item_scores=items), *others))
        with create(tmp_path / f"{k}.sqlite") as store:
            store.append(record)
        exports.append(export(tmp_path / f"{k}.sqlite"))
    assert exports[0] != exports[1]


def test_the_export_does_not_depend_on_the_order_of_runs(tmp_path: Path) -> None:
    records = experiment.records(1)[:40]
    shuffled = random.Random(3).sample(records, len(records))
    for name, order in (("a", records), ("b", shuffled)):
        with create(tmp_path / name) as store:
            for record in order:
                store.append(replace(record, cost=BuildCost(wall_seconds=len(name))))
    assert export(tmp_path / "a") == export(tmp_path / "b")


FILL = """
import os, pickle, signal, sys, threading
from pathlib import Path
from sigmerge.lab.experiments.store import create
wanted = pickle.loads(Path(sys.argv[2]).read_bytes())
delay = float(sys.argv[3])
if delay:
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
with create(Path(sys.argv[1])) as store:
    for record in wanted:
        if record.key not in store.keys():
            store.append(record)
print(len(wanted))
"""


@pytest.mark.campaign
def test_killed_and_resumed_it_ends_in_the_same_content(tmp_path: Path) -> None:
    """Killed by SIGKILL at random moments, resumed each time."""

    wanted = tmp_path / "wanted"
    wanted.write_bytes(pickle.dumps(experiment.records(1)))

    def fill(path: Path, delay: float) -> int:
        command = [sys.executable, "-c", FILL, str(path), str(wanted), str(delay)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert fill(tmp_path / "whole", 0) == 0
    moments = random.Random(11)
    killed = sum(fill(tmp_path / "killed", moments.uniform(0.001, 0.15)) != 0 for _ in range(6))
    assert killed > 0
    with create(tmp_path / "killed") as store:
        partial = set(store.export())
    assert partial <= set(export(tmp_path / "whole"))
    assert fill(tmp_path / "killed", 0) == 0
    assert export(tmp_path / "killed") == export(tmp_path / "whole")


ENDLESS = """DROP TABLE scores; CREATE VIEW scores AS WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL
SELECT x + 1 FROM r) SELECT x FROM r"""
TRIGGERS = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
DAMAGED = {
    "no JSON": ("UPDATE pools SET domains = 'x'", "is damaged"),
    "nested": (f"UPDATE pools SET domains = '{'[' * 9000}'", "is damaged"),
    "a number": ("UPDATE pools SET domains = '5'", "is damaged"),
    "no column": ("ALTER TABLE scores DROP COLUMN items", "is damaged"),
    "an endless view": (ENDLESS, "a table is missing"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_the_analysis_of_a_damaged_store_is_one_error(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "s.sqlite"
    with create(file) as store:
        store.append(RECORD)
    statements, told = DAMAGED[damage]
    with closing(sqlite3.connect(file)) as connection:
        for (name,) in connection.execute(TRIGGERS).fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.executescript(statements)
    with pytest.raises(StoreError, match=told):
        AnalyzeJob(file, tmp_path / "out").run()
