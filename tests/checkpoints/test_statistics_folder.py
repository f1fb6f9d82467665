"""Statistics on disk: what is written is read, and a stranger's file is one error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sigmerge.checkpoints.statistics import (
    Entry,
    StatisticsFolders,
    block_file,
    write_block,
)
from sigmerge.errors import PoolError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "features"
    made.mkdir()
    for block in (0, None):
        arrays = {"a": np.arange(6.0), "b": np.ones(3, np.float32)}
        write_block(block_file(made, block), {f"{block}.w": Entry("gram", "a", 7)}, arrays)
    return made


def test_the_files_are_safetensors(folder: Path) -> None:
    found = load_file(block_file(folder, 0))
    np.testing.assert_array_equal(found["a"], np.arange(6.0))
    assert found["b"].dtype == np.float32
    assert StatisticsFolders({"math": folder}, {}).rows("math", "0.w") == 7


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


@pytest.mark.parametrize(
    "table", ["5", "[]", '{"w": 5}', '{"w": {"kind": "gram"}}', "[" * 90,
              '{"w": {"kind": "gram", "stored": "gone", "rows": 1}}'],
)  # fmt: skip
def test_a_file_that_lists_no_statistics(tmp_path: Path, table: str) -> None:
    folder = tmp_path / "features-1"
    folder.mkdir()
    for block in (0, None):
        save_file({"a": np.ones(3)}, block_file(folder, block), {"statistics": table})
    with pytest.raises(PoolError, match=r"layer-00000.safetensors: "):
        StatisticsFolders({"math": folder}, {})
