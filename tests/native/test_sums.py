"""Weighted sums against NumPy, which rounds every product and every sum to float32 as they do."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sigmerge import _native
from sigmerge.core.dtypes import BF16, F16, F32
from tests.native.pools import NUMPY, Pool, file_target, target, widened

WEIGHTS = np.array([0.3, -1.7, 0.25], np.float32)
AFTER = np.array([[1.3, 0.7, 0.0], [1, 1, 1.0], [1, 0.5, -0.3]], np.float32)
SIZES = [0, 1, 511, 512, 513, 40_000]


def expected(pool: Pool, vectors: bool, after: np.ndarray) -> np.ndarray:
    *experts, reference = pool.values
    rows = [one - reference if vectors else one for one in experts]
    total = rows[0] * WEIGHTS[0]
    for row, weight in zip(rows[1:], WEIGHTS[1:], strict=True):
        total = total + row * weight
    for divisor, factor, share in after:
        total = total / divisor * factor
        if share != 0:
            total = total + reference * share
    return total


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("kinds", [[BF16] * 4, [F16] * 4, [F32] * 4, [BF16, F32, F16, BF16]])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("filed", [(), (0, 3), (0, 1, 2, 3)])
def test_a_weighted_sum(
    vectors: bool, kinds: list[int], size: int, filed: tuple[int, ...], tmp_path: Path
) -> None:
    pool = Pool(kinds, size, tmp_path, filed, seed=size)
    for kind in (BF16, F16, F32):
        out = np.empty(size, NUMPY[kind])
        given = (WEIGHTS, vectors, AFTER, pool.table, size)
        assert _native.weighted_rows(*given, target(out, kind)) == (True, True, 0)
        rounded = np.empty_like(out)
        _native.narrow(kind, expected(pool, vectors, AFTER), rounded)
        assert out.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("size", [1, 513, 700_001])
@pytest.mark.parametrize("kind", [BF16, F32])
def test_a_result_that_goes_to_a_file(size: int, kind: int, tmp_path: Path) -> None:
    pool = Pool([BF16, BF16, F32, BF16], size, tmp_path, (0, 1), seed=3)
    row, path = file_target(tmp_path, kind, 24)
    given = (WEIGHTS, True, AFTER, pool.table, size)
    fine, stored, checksum = _native.weighted_rows(*given, row)
    os.close(int(row[1]))
    out = np.empty(size, NUMPY[kind])
    _native.weighted_rows(*given, target(out, kind))
    assert fine and stored
    assert path.read_bytes()[24:] == out.tobytes()
    assert checksum == _native.checksum(out)


@pytest.mark.parametrize("place", [0, 600, 999])
@pytest.mark.parametrize("member", [0, 2, 3])
def test_what_is_not_finite(member: int, place: int, tmp_path: Path) -> None:
    pool = Pool([BF16, F32, F16, BF16], 1000, tmp_path)
    pool.raw[member][place] = 0x7F80 if pool.raw[member].dtype == np.uint16 else np.inf
    out = np.empty(1000, np.float32)
    given = (WEIGHTS, True, AFTER, pool.table, 1000)
    assert _native.weighted_rows(*given, target(out, F32))[:2] == (False, False)


def test_a_sum_that_overflows_is_not_the_inputs_fault(tmp_path: Path) -> None:
    pool = Pool([F32, F32, F32, F32], 1000, tmp_path)
    pool.raw[0][700] = 60_000
    pool.raw[1][700] = -60_000
    out = np.empty(1000, np.float16)
    given = (WEIGHTS, False, AFTER[:0], pool.table, 1000)
    assert _native.weighted_rows(*given, target(out, F16))[:2] == (True, False)


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    pool = Pool([BF16] * 4, 100_000, tmp_path, (0, 1, 2, 3))
    os.truncate(tmp_path / "members", 750_000)
    out = np.empty(100_000, np.uint16)
    with pytest.raises(_native.ReadFailed) as failed:
        _native.weighted_rows(WEIGHTS, True, AFTER, pool.table, 100_000, target(out, BF16))
    assert failed.value.shrank and failed.value.descriptor == pool.file.fileno()
    assert failed.value.position == 750_000


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("a device that is always full")
    pool = Pool([BF16] * 4, 1000, tmp_path)
    descriptor = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(_native.WriteFailed, match="No space left"):
        row = np.array([BF16, descriptor, 0], np.int64)
        _native.weighted_rows(WEIGHTS, True, AFTER, pool.table, 1000, row)
    os.close(descriptor)


@pytest.mark.parametrize("kinds", [[BF16, BF16, BF16], [F16, F32, BF16]])
@pytest.mark.parametrize("size", [1, 513, 40_000])
def test_rows_in_float32(kinds: list[int], size: int, tmp_path: Path) -> None:
    pool = Pool(kinds, size, tmp_path, (1, 2))
    rows = np.empty((2, size), np.float32)
    assert _native.load_rows(pool.table[:2], pool.table[2:], rows)
    for d in range(2):
        assert rows[d].tobytes() == (pool.values[d] - pool.values[2]).tobytes()
    assert _native.load_rows(pool.table[:2], pool.table[:0], rows)
    assert rows.tobytes() == np.stack(pool.values[:2]).tobytes()
    pool.raw[0][-1] = np.inf if kinds[0] == F16 else 0xFF80
    assert not _native.load_rows(pool.table[:2], pool.table[:0], rows)


def test_values_are_widened_exactly() -> None:
    assert widened(BF16, np.array([0x3F80], np.uint16))[0] == 1
