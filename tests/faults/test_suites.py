"""A suite whose folder was damaged between two runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import sigmerge
from sigmerge.errors import OutputError
from sigmerge.experiments.group import UNSCORED
from sigmerge.experiments.runner import DEFINITION
from sigmerge.files.locks import only_writer
from tests.experiments.test_suite import definition, export
from tests.pools import PoolOnDisk, make_pool

SMALL = {"baselines": [], "repairs": {"ablation": ["equal_share"]}}


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", layers=2, dtype="bf16")


@pytest.mark.parametrize(
    "garbage", ["", "{" * 3000, "\x00", "name: [tiny", "a: &a [*a]", "name: tiny"]
)
def test_a_damaged_definition_is_written_again(
    pool: PoolOnDisk, tmp_path: Path, garbage: str
) -> None:
    out, content = tmp_path / "out", definition(pool, **SMALL)
    sigmerge.suite(content, out, threads=1)
    file, before = out / DEFINITION, export(out)
    sound = file.read_bytes()
    file.write_text(garbage)
    assert sigmerge.suite(content, out, threads=1).made == 0
    assert file.read_bytes() == sound and export(out) == before


def test_behind_a_damaged_definition_another_suite_is_recognised(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    sigmerge.suite(definition(pool, **SMALL), out, threads=1)
    (out / DEFINITION).write_text("{")
    other = definition(pool, **{**SMALL, "constants": {"c_max": 0.4}})
    with pytest.raises(OutputError, match="another suite"):
        sigmerge.suite(other, out, threads=1)
    assert (out / DEFINITION).read_text() == "{"


def test_two_suites_at_once(pool: PoolOnDisk, tmp_path: Path) -> None:
    """The second neither writes nor reads what the first has."""
    out = tmp_path / "out"
    with (
        only_writer(tmp_path / ".out.lock", "held by the first"),
        pytest.raises(OutputError, match="another process is writing this suite"),
    ):
        sigmerge.suite(definition(pool, **SMALL), out, threads=1)
    assert list(out.iterdir()) == []


def test_what_a_killed_suite_had_not_scored_goes(pool: PoolOnDisk, tmp_path: Path) -> None:
    out, content = tmp_path / "out", definition(pool, **SMALL)
    sigmerge.suite(content, out, threads=1)
    (out / UNSCORED / ("0" * 24) / "merged").mkdir(parents=True)
    sigmerge.suite(content, out, threads=1)
    assert not (out / UNSCORED).exists()
    (out / UNSCORED / "thesis").mkdir(parents=True)
    with pytest.raises(OutputError, match="which no suite wrote"):
        sigmerge.suite(content, out, threads=1)
