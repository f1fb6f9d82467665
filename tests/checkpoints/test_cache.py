"""Remembered files: whole or not there, however many write them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sigmerge.checkpoints.cache import whole, write_json


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
