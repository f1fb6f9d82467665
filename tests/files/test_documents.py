"""Remembered files: whole or not there, however many write them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sigmerge.errors import ScoreError
from sigmerge.files import documents
from sigmerge.files.documents import (
    DEEPEST_DOCUMENT,
    read_json,
    read_json_object,
    whole,
    write_json,
)


def test_a_file_that_fails_half_way_does_not_appear(tmp_path: Path) -> None:
    file = tmp_path / "new/note.json"
    with pytest.raises(RuntimeError, match="half"), whole(file) as partial:
        partial.write_text("{")
        raise RuntimeError("half")
    assert list(file.parent.iterdir()) == []


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    file = tmp_path / "note.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: write_json(file, {"content": [n] * 2000}), range(64)))
    content = json.loads(file.read_text())["content"]
    assert len(content) == 2000 and len(set(content)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["note.json"]


def test_a_document_is_read_within_limits(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ScoreError, match=r"a\.json: JSON nested"):
        read_json(file, "a list", ScoreError)
    file.write_text("[" * (DEEPEST_DOCUMENT + 1) + "]" * (DEEPEST_DOCUMENT + 1))
    with pytest.raises(ScoreError, match="nested deeper than 64 levels"):
        read_json(file, "a list", ScoreError)
    file.write_text("[" * DEEPEST_DOCUMENT + "]" * DEEPEST_DOCUMENT)
    read_json(file, "a list", ScoreError)
    file.write_text(json.dumps("x" * 50))
    with pytest.raises(ScoreError, match="too large for a word"):
        read_json(file, "a word", ScoreError, limit=50)
    with pytest.raises(ScoreError, match="a JSON object is expected: scores"):
        read_json_object(file, "scores", ScoreError)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ScoreError, match="pipe: is not a regular file; scores is expected"):
        read_json(tmp_path / "pipe", "scores", ScoreError)
    with pytest.raises(ScoreError, match="is not a regular file"):
        read_json(Path("/dev/zero"), "scores", ScoreError)
    with pytest.raises(ScoreError, match="no such file"):
        read_json(tmp_path / "missing", "scores", ScoreError)


def test_a_name_that_leads_to_a_fifo_by_the_time_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scores.json"
    file.write_text("{}")

    def swapped(name: Path, flags: int, plain: Any = os.open) -> int:
        name.unlink()
        os.mkfifo(name)
        return int(plain(name, flags))

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(ScoreError, match=r"scores\.json: is not a regular file"):
        read_json(file, "scores", ScoreError)


def test_the_name_of_a_durable_file_is_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(
        documents,
        "sync_folder",
        lambda folder: synced.append(os.listdir(folder)),  # noqa: PTH208
    )
    write_json(tmp_path / "lost.json", {}, durable=False)
    assert synced == []
    write_json(tmp_path / "kept.json", {})
    assert [sorted(names) for names in synced] == [["kept.json", "lost.json"]]


def test_a_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"note\xff.json")
    write_json(file, {"n": 1})
    assert read_json(file, "a note") == {"n": 1} and list(tmp_path.iterdir()) == [file]
