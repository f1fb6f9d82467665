"""A journal keeps whole lines, knows its owner and has one writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sigmerge.errors import OutputError
from sigmerge.files.journal import Journal


def test_records_come_back_exactly(tmp_path: Path) -> None:
    records = [{"genotype": [0.1, 1 / 3, 2.5e-17], "n": i} for i in range(3)]
    with Journal(tmp_path / "j", {"a": (1, 2)}) as journal:
        assert journal.records == []
        for record in records:
            journal.append(record)
    with Journal(tmp_path / "j", {"a": (1, 2)}) as journal:
        assert journal.records == records


@pytest.mark.parametrize("torn", ['{"n": 1', '{"n": 1}', "{", "\x00\x00"])
def test_a_line_without_its_end_is_cut_off(tmp_path: Path, torn: str) -> None:
    with Journal(tmp_path / "j", {}) as journal:
        journal.append({"n": 0})
    with (tmp_path / "j").open("a") as file:
        file.write(torn)
    with Journal(tmp_path / "j", {}) as journal:
        assert journal.records == [{"n": 0}]
        journal.append({"n": 2})
    lines = (tmp_path / "j").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{}, {"n": 0}, {"n": 2}]


def test_a_torn_header_is_a_new_journal(tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"seed')
    with Journal(tmp_path / "j", {"seed": 1}) as journal:
        assert journal.records == []
    assert (tmp_path / "j").read_text() == '{"seed": 1}\n'


def test_another_header_is_refused_by_what_differs(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", {"seed": 1, "scorer": "x"}):
        pass
    with pytest.raises(OutputError, match="another run, which differs in seed; choose"):
        Journal(tmp_path / "j", {"seed": 2, "scorer": "x"})


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "j", {}),
        pytest.raises(OutputError, match="another run is writing it"),
    ):
        Journal(tmp_path / "j", {})


@pytest.mark.parametrize("broken", ["{", "[1]", '{"genotype": []}'])
def test_a_broken_line_in_the_middle_is_told(tmp_path: Path, broken: str) -> None:
    (tmp_path / "j").write_text(f'{{}}\n{{"n": 0}}\n{broken}\n{{"n": 1}}\n')
    with pytest.raises(OutputError, match=r"j, line 3: is no record .* pass --overwrite"):
        Journal(tmp_path / "j", {}, [{"n"}])
