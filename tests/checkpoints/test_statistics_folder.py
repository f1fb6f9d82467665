"""A folder of statistics is a stranger's until its list of files was checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sigmerge.checkpoints.statistics import (
    DONE,
    Entry,
    StatisticsFolders,
    block_file,
    damage,
    discard_damaged,
    finish,
    write_block,
)
from sigmerge.errors import PoolError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "features-0"
    for block in (0, None):
        arrays = {"a": np.arange(6.0), "b": np.ones(3, np.float32)}
        write_block(block_file(made, block), {f"{block}.w": Entry("gram", "a", 7)}, arrays)
    finish(made, {"kind": "features"})
    return made


def test_the_files_are_safetensors(folder: Path) -> None:
    found = load_file(block_file(folder, 0))
    np.testing.assert_array_equal(found["a"], np.arange(6.0))
    assert found["b"].dtype == np.float32
    assert damage(folder) is None
    assert StatisticsFolders({"math": folder}).rows("math", "0.w") == 7


WRITE = """
import resource, sys
from pathlib import Path
import numpy as np
import safetensors.numpy
from sigmerge.checkpoints.statistics import Entry, write_block

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

gram = np.ones(16_000_000)
before = peak()
write_block(Path(sys.argv[1]), {"w": Entry("gram", "w", 1)}, {"w": gram})
print((peak() - before) // 1024)
"""


def test_writing_takes_no_copy_of_the_statistics(tmp_path: Path) -> None:
    """128 MB are written; the check of finiteness holds a byte for each of 16 million numbers."""
    file = tmp_path / "layer-00000.safetensors"
    ran = subprocess.run(
        [sys.executable, "-c", WRITE, str(file)], capture_output=True, text=True, check=True
    )
    assert file.stat().st_size > 128_000_000 and int(ran.stdout) < 40


def test_a_list_cannot_name_a_file_elsewhere(folder: Path) -> None:
    """Files that are listed and wrong are deleted before a capture goes on."""
    precious = folder.parent / "precious.safetensors"
    precious.write_text("years of work")
    listed = json.loads((folder / DONE).read_text())
    listed["files"]["../precious.safetensors"] = {"size": 1, "sha256": "0" * 64}
    (folder / DONE).write_text(json.dumps(listed))
    assert damage(folder) == "capture.json cannot be read"
    discard_damaged(folder)
    assert precious.read_text() == "years of work"


def test_a_list_with_a_wrong_digit_is_damage(folder: Path) -> None:
    """Of a Fisher capture it says by which number gradients are divided."""
    finish(folder, {"kind": "fisher", "norm": 2.5})
    text = (folder / DONE).read_text()
    (folder / DONE).write_text(text.replace("2.5", "2.4"))
    assert damage(folder) == "capture.json cannot be read"
    (folder / DONE).write_text(text)
    assert not damage(folder.rename(folder.with_name("moved")))


def test_only_whole_files_of_an_unfinished_capture_stay(folder: Path) -> None:
    """Numbers with a wrong bit, or of another block, would go into the statistics."""
    first, other, flipped = (block_file(folder, block) for block in (0, 1, 2))
    other.write_bytes(first.read_bytes())
    write_block(flipped, {"2.w": Entry("gram", "a", 7)}, {"a": np.arange(6.0)})
    content = bytearray(flipped.read_bytes())
    content[-3] ^= 1
    flipped.write_bytes(content)
    (folder / DONE).unlink()
    discard_damaged(folder)
    assert sorted(folder.iterdir()) == [first, block_file(folder, None)]


def test_what_a_killed_capture_was_writing_goes_when_it_is_old(folder: Path) -> None:
    """One that was just written may be another process's, which captures the same expert."""
    old, new = (folder / f".layer-00001.safetensors.{pid}-1.partial" for pid in (1, 2))
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, time.time() - 7200))
    discard_damaged(folder)
    assert new.exists() and not old.exists()


def test_links_and_pipes_are_damage(folder: Path) -> None:
    file = block_file(folder, 0)
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(elsewhere)
    assert damage(folder) == f"{file.name} is missing or has changed"
    file.unlink()
    os.mkfifo(file)
    assert damage(folder) == f"{file.name} is missing or has changed"
    with pytest.raises(PoolError, match="run `sigmerge capture` again"):
        StatisticsFolders({"math": folder})
    discard_damaged(folder)
    assert not file.exists() and elsewhere.exists()


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_a_garbled_list_is_damage(folder: Path, content: bytes) -> None:
    (folder / DONE).write_bytes(content)
    assert damage(folder) == "capture.json cannot be read"
    discard_damaged(folder)
    assert not (folder / DONE).exists()


@pytest.mark.parametrize(
    "table", ["5", "[]", '{"w": 5}', '{"w": {"kind": "gram"}}', "[" * 90,
              '{"w": {"kind": "gram", "stored": "gone", "rows": 1}}'],
)  # fmt: skip
def test_a_file_that_lists_no_statistics(tmp_path: Path, table: str) -> None:
    folder = tmp_path / "features-1"
    folder.mkdir()
    for block in (0, None):
        save_file({"a": np.ones(3)}, block_file(folder, block), {"statistics": table})
    finish(folder, {})
    with pytest.raises(PoolError, match=r"layer-00000.safetensors: "):
        StatisticsFolders({"math": folder})
