"""Faults of the system reach Python as what they are, from every loop that reads or writes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge import _native
from sigmerge.core import claim, merge
from sigmerge.core.dtypes import BF16, F32
from tests.native.pools import Pool, target

SIZE = 100_000
ONE = np.ones(1, np.float32)
FORMULA = merge.formula(ONE, thin=merge.TRIM, cuts=np.array([[1, 5]]))
UPDATE = claim.Admission(claim.ADD, 0.5, np.array([0]), 0, np.array([[3, 4]]))
EDGES = np.array([0, SIZE])


def zeros(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return np.zeros(shape, dtype)


def tile_table(members: np.ndarray) -> claim.TileTable:
    return claim.TileTable(EDGES, members[:1], members[1:2], np.zeros(3, np.int64))


def owner() -> np.ndarray:
    return claim.free_map(SIZE)


def merged(members: np.ndarray, row: np.ndarray) -> Any:
    return merge.merge(FORMULA, members[:2], 0, SIZE, SIZE, 512, row, zeros(1))


def summed(members: np.ndarray, row: np.ndarray) -> Any:
    return _native.weighted_rows(ONE, True, FORMULA.after, members[:2], SIZE, row)


def admitted(members: np.ndarray, row: np.ndarray) -> Any:
    return claim.admit(UPDATE, EDGES, owner(), 0, 1, members[:, None].copy(), row)


WRITING: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "merge": merged, "weighted_rows": summed, "admit": admitted
}  # fmt: skip
OUT = np.empty(SIZE, np.float32)
READING: dict[str, Callable[[np.ndarray], Any]] = {
    "merge": lambda m: merged(m, target(OUT, F32)),
    "weighted_rows": lambda m: summed(m, target(OUT, F32)),
    "admit": lambda m: admitted(m, target(OUT, F32)),
    "load_rows": lambda m: _native.load_rows(m[:2], m[2:], zeros(2, SIZE, dtype=np.float32)),
    "norms_of_thinning": lambda m: merge.norms_of_thinning(
        m[:2], 0, SIZE, FORMULA, SIZE, 512, zeros(2, 1), zeros(0, 1, 0, dtype=np.uint8)
    ),
    "select.count_high": lambda m: _native.count_high(
        m[:2], SIZE, np.zeros(1, np.int64), 1, zeros(1, 2 << 16, dtype=np.uint32)
    ),
    "select.count_inside": lambda m: _native.count_inside(
        m[:2], SIZE, np.zeros(1, np.int64), 1, np.array([[0, 1, 0]]), zeros(1, 1, dtype=np.uint32),
        zeros(1, 1, dtype=np.uint16), zeros(1, dtype=np.int64),
    ),
    "gram": lambda m: _native.gram(m, SIZE, False, SIZE, zeros(3, 3)),
    "signature": lambda m: _native.signature(m, SIZE, SIZE, zeros(2, 2), zeros(2)),
    "count_variances": lambda m: _native.count_variances(
        m, SIZE, 5, zeros(1 << 15, dtype=np.int64)
    ),
    "squares_of_varying": lambda m: _native.squares_of_varying(m, SIZE, 1, 1, SIZE, zeros(2)),
    "claim.count_high": lambda m: claim.count_high(
        tile_table(m), owner(), 0, 1, 1, claim.SETTLED, zeros(2 << 16, dtype=np.uint32)
    ),
    "claim.count_low": lambda m: claim.count_low(
        tile_table(m), owner(), 0, 1, 1, claim.SETTLED, 5, zeros(1 << 15, dtype=np.uint32)
    ),
    "claim.mark": lambda m: claim.mark(
        tile_table(m), owner(), 0, 1, claim.SETTLED, 5, zeros(1, 2, dtype=np.int64), zeros(1)
    ),
    "claim.tally": lambda m: claim.tally(
        tile_table(m), owner(), 0, 1, 0, zeros(1, dtype=np.int64), zeros(1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("loop", READING)
def test_a_file_that_shrank(loop: str, tmp_path: Path) -> None:
    pool = Pool([BF16] * 3, SIZE, tmp_path, (0, 1, 2))
    READING[loop](pool.table)
    left = 13 + 2 * SIZE + 1000  # the first window of the second member is cut
    os.truncate(tmp_path / "members", left)
    with pytest.raises(_native.ReadFailed, match="shrunk") as failed:
        READING[loop](pool.table)
    assert failed.value.shrank and failed.value.descriptor == pool.file.fileno()
    assert failed.value.position == left


@pytest.mark.parametrize("loop", READING)
def test_a_file_that_cannot_be_read(loop: str, tmp_path: Path) -> None:
    pool = Pool([BF16] * 3, SIZE, tmp_path, (0, 1, 2))
    pool.file.close()
    with pytest.raises(_native.ReadFailed) as failed:
        READING[loop](pool.table)
    assert failed.value.errno == errno.EBADF and not failed.value.shrank


@pytest.mark.parametrize("loop", WRITING)
def test_a_full_disk(loop: str, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("a device that is always full")
    pool = Pool([BF16] * 3, SIZE, tmp_path, (0, 1))
    descriptor = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(_native.WriteFailed, match="No space left") as failed:
        WRITING[loop](pool.table, np.array([BF16, descriptor, 0]))
    os.close(descriptor)
    assert failed.value.errno == errno.ENOSPC and failed.value.descriptor == descriptor


NO_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from sigmerge import _native
from sigmerge.core.dtypes import F32
from tests.native.pools import Pool, target

count, size = 1000, 40_000  # windows of 32,768 values of each
pool = Pool([F32], size, Path(sys.argv[1]), (0,))
members = np.repeat(pool.table, count, axis=0)
weights, steps = np.ones(count, np.float32), np.zeros((0, 3), np.float32)
out = np.empty(size, np.float32)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (taken + (32 << 20), before[1]))
for _ in range(3):
    try:
        _native.weighted_rows(weights, False, steps, members, size, target(out, F32))
    except MemoryError:
        print("no memory")
resource.setrlimit(resource.RLIMIT_AS, before)
print(_native.weighted_rows(weights, False, steps, members, size, target(out, F32))[:2])
"""


def test_no_memory_is_a_memory_error_and_the_next_call_works(isa: str, tmp_path: Path) -> None:
    if isa != _native.isas()[-1] or not Path("/proc/self/statm").exists():
        pytest.skip("once, where a process can limit its memory")
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["no memory"] * 3 + ["(True, True)"]
