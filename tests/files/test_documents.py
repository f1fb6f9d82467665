"""Remembered files: whole or not there, however many write them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sigmerge.errors import ScoreError
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
