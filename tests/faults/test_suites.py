"""A suite whose folder was damaged between two runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import sigmerge
from sigmerge.errors import OutputError, PoolError
from sigmerge.files.locks import only_writer
from sigmerge.files.scratch import remove_stale
from sigmerge.jobs import repair
from sigmerge.lab.experiments import anchors
from sigmerge.lab.experiments.group import UNSCORED
from sigmerge.lab.experiments.runner import DEFINITION
from sigmerge.lab.experiments.store import STORE, open_read_only
from tests.lab.experiments.test_suite import definition, export
from tests.pools import PoolOnDisk, make_pool

SMALL = {"baselines": [], "repairs": {"ablation": ["equal_share"]}}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("suites") / "pool", layers=2, dtype="bf16")


@pytest.fixture(scope="module")
def content(pool: PoolOnDisk) -> dict[str, Any]:
    return definition(pool, **SMALL)


@pytest.fixture(scope="module")
def finished(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished suite. No test changes it."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    sigmerge.suite(content, folder, threads=1)
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "out")


@pytest.mark.parametrize(
    "garbage", ["", "{" * 3000, "\x00", "name: [tiny", "a: &a [*a]", "name: tiny"]
)
def test_a_damaged_definition_is_written_again(
    content: dict[str, Any], out: Path, garbage: str
) -> None:
    file, before = out / DEFINITION, export(out)
    sound = file.read_bytes()
    file.write_text(garbage)
    assert sigmerge.suite(content, out, threads=1).made == 0
    assert file.read_bytes() == sound and export(out) == before


def test_behind_a_damaged_definition_another_suite_is_recognised(
    pool: PoolOnDisk, out: Path
) -> None:
    (out / DEFINITION).write_text("{")
    other = definition(pool, **{**SMALL, "constants": {"c_max": 0.4}})
    with pytest.raises(OutputError, match="another suite"):
        sigmerge.suite(other, out, threads=1)
    assert (out / DEFINITION).read_text() == "{"


def test_a_suite_goes_on_where_its_store_was_just_begun(content: dict[str, Any], out: Path) -> None:
    """A kill, or a full disk, between opening the file and making its tables leaves it empty."""
    before = export(out)
    (out / STORE).write_bytes(b"")
    sigmerge.suite(content, out, threads=1)
    assert export(out) == before


def test_a_pool_is_checked_once_however_many_variants_repair_it(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers of real models take seconds to compare."""
    checked = []
    monkeypatch.setattr(repair, "check_probe", lambda *given: checked.append(given))
    monkeypatch.chdir(tmp_path)
    sigmerge.suite.plan(definition(pool, baselines=[]), tmp_path / "out")
    assert len(checked) == 1


def test_a_pool_that_changes_during_a_suite_stops_it(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=2, dtype="bf16")
    weights, other = (pool.experts[name] / "model.safetensors" for name in ("math", "coding"))

    def exchanged(_: str, done: int, __: int) -> None:
        if done == 4:
            shutil.copyfile(other, weights)

    with pytest.raises(PoolError, match="not the pool any more") as error:
        sigmerge.suite(definition(pool, **SMALL), tmp_path / "out", threads=1, progress=exchanged)
    assert error.value.problems == ("math: changed",)
    with open_read_only(tmp_path / "out" / STORE) as store:
        assert len(store.keys()) == 4


def test_a_recipe_file_that_was_edited_makes_another_suite(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    """Else the runs of both would lie in one store, under one name."""
    file = tmp_path / "own.yaml"
    anchors = [{"name": "own", "recipe": str(file)}]
    for weight in (0.4, 0.5):
        file.write_text(f"merge_method: task_arithmetic\nparameters: {{weight: {weight}}}\n")
        given = definition(pool, **{**SMALL, "anchors": anchors, "variants_on": [], "repairs": {}})
        if weight == 0.4:
            sigmerge.suite(given, tmp_path / "out", threads=1)
    with pytest.raises(OutputError, match="another suite"):
        sigmerge.suite(given, tmp_path / "out", threads=1)


def test_two_suites_at_once(content: dict[str, Any], tmp_path: Path) -> None:
    """The second neither writes nor reads what the first has."""
    out = tmp_path / "out"
    with (
        only_writer(tmp_path / ".out.lock", "held by the first"),
        pytest.raises(OutputError, match="another process is writing this suite"),
    ):
        sigmerge.suite(content, out, threads=1)
    assert list(out.iterdir()) == []


def test_what_killed_anchors_leave_goes_with_the_next_command(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(recipe: Any, folder: Path, options: Any) -> None:
        shutil.copytree(tmp_path, tmp_path / "left", ignore=shutil.ignore_patterns("left"))
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(anchors, "make_anchor", killed)
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(KeyboardInterrupt):
        sigmerge.anchors("suite.yaml")
    left = [entry for entry in (tmp_path / "left").iterdir() if entry.is_dir()]
    assert len(left) == 1
    remove_stale.cache_clear()
    remove_stale(tmp_path / "left")
    assert not left[0].exists()


def test_what_a_killed_suite_had_not_scored_goes(content: dict[str, Any], out: Path) -> None:
    (out / UNSCORED / ("0" * 24) / "merged").mkdir(parents=True)
    sigmerge.suite(content, out, threads=1)
    assert not (out / UNSCORED).exists()
    (out / UNSCORED / "thesis").mkdir(parents=True)
    with pytest.raises(OutputError, match="which no suite wrote"):
        sigmerge.suite(content, out, threads=1)
