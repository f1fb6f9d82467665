"""Loops that read their members from files and write their results there."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from sigmerge.kernels import STRIP, TILE, merge, window
from sigmerge.kernels.checksum import checksum
from sigmerge.kernels.stored import BF16, CODE, Members, address_of, members
from sigmerge.kernels.window import (
    DRAINED,
    WINDOW_SIZE,
    Drain,
    FilePlace,
    read_summed,
)

WEIGHTS = np.array([0.5, -0.25], np.float32)


def rows_of(size: int, dtype: str) -> list[np.ndarray]:
    values = np.random.default_rng(size).normal(0, 1, (3, size)).astype(np.float32)
    if dtype == "bf16":
        return list((values.view(np.uint32) >> 16).astype(np.uint16))
    return list(values.astype(dtype))


class InFile:
    """Rows one behind the other in a file, from an odd position on."""

    def __init__(self, file: Path, rows: list[np.ndarray]) -> None:
        file.write_bytes(b"odd" + b"".join(row.tobytes() for row in rows))
        self.descriptor = os.open(file, os.O_RDWR)
        starts = np.cumsum([3, *(row.nbytes for row in rows)])
        self.places = [
            FilePlace(self.descriptor, int(start), row.itemsize)
            for start, row in zip(starts, rows, strict=False)
        ]
        self.nowhere = [np.zeros_like(row) for row in rows]

    def table(self, strip: int = STRIP) -> Members:
        """Members whose memory has nothing of theirs."""
        return members(self.nowhere, self.places, strip)


FORMULAS = {
    "sum": merge.formula(WEIGHTS).plus_reference(1.0),
    "values": merge.formula(WEIGHTS, vectors=False).plus_reference(0.5),
    "drop": merge.formula(
        WEIGHTS, thin=merge.DROP, draws=np.array([[1, 2, 1 << 31], [3, 4, 1 << 30]])
    ).plus_reference(1.0),
    "elect": merge.formula(WEIGHTS, combine=merge.DISJOINT, normalize=True).plus_reference(1.0),
}
SIZES = [1, 3, STRIP + 5, WINDOW_SIZE, 2 * WINDOW_SIZE + 77, DRAINED + WINDOW_SIZE + 3]


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", ["bf16", "<f2", "<f4"])
@pytest.mark.parametrize("size", SIZES)
def test_a_merge_from_a_file_into_a_file_is_the_one_in_memory(tmp_path, formula, dtype, size):
    rows, way = rows_of(size, dtype), FORMULAS[formula]
    kind, width = CODE[rows[0].dtype], rows[0].itemsize
    wanted = np.empty(size, rows[0].dtype)
    how = (0, size, TILE, STRIP)
    given = (np.uint64(address_of(wanted)), kind, np.zeros(1))
    assert merge.merge(way, *members(rows), *how, *given) == (True, True)

    lying = InFile(tmp_path / "in", rows)
    target = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    room, sums = np.empty(min(size, DRAINED), rows[0].dtype), np.zeros(1, np.uint64)
    drain = Drain(target, 5, width, DRAINED, sums)
    given = (np.uint64(address_of(room)), kind, np.zeros(1), drain)
    assert merge.merge(way, *lying.table(), *how, *given) == (True, True)
    found = (tmp_path / "out").read_bytes()
    assert found[5:] == wanted.tobytes()
    assert int(sums[0]) == checksum(memoryview(wanted.view(np.uint8)))


def test_what_a_file_does_not_have_is_not_finite(tmp_path):
    rows = rows_of(2 * WINDOW_SIZE, "bf16")
    lying = InFile(tmp_path / "in", rows)
    os.truncate(tmp_path / "in", (tmp_path / "in").stat().st_size - 2)  # of the reference
    out = np.empty(rows[0].size, np.uint16)
    given = (0, out.size, TILE, STRIP, np.uint64(address_of(out)), BF16, np.zeros(1))
    fine, _ = merge.merge(FORMULAS["sum"], *lying.table(), *given)
    assert not fine
    fine, _ = merge.merge(FORMULAS["elect"], *lying.table(), *given)
    assert not fine


def test_a_result_that_cannot_be_written_is_not_stored(tmp_path):
    rows = rows_of(STRIP, "<f4")
    room, width = np.empty(STRIP, np.float32), 4
    target = os.open(tmp_path, os.O_RDONLY)
    drain = Drain(target, 0, width, DRAINED, np.zeros(1, np.uint64))
    given = (0, STRIP, TILE, STRIP, np.uint64(address_of(room)), 2, np.zeros(1), drain)
    for name in ("sum", "elect"):
        assert merge.merge(FORMULAS[name], *members(rows), *given) == (True, False)


def test_a_value_that_is_not_finite_is_not_written(tmp_path):
    rows = rows_of(2 * DRAINED, "<f4")
    rows[0][3] = np.inf
    target = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    room = np.empty(DRAINED, np.float32)
    drain = Drain(target, 0, 4, DRAINED, np.zeros(1, np.uint64))
    given = (0, 2 * DRAINED, TILE, STRIP, np.uint64(address_of(room)), 2, np.zeros(1), drain)
    for name in ("sum", "elect"):
        assert merge.merge(FORMULAS[name], *members(rows), *given) == (False, False)
        assert (tmp_path / "out").stat().st_size == 0


def test_a_loop_of_long_strips_reads_memory():
    place = FilePlace(7, 0, 2)
    assert window.window([place], window.LONGEST_WINDOW + 1) is window.IN_MEMORY
    assert window.window([None], STRIP) is window.IN_MEMORY
    assert window.window([None, place], 3000).files[:, :4].tolist() == [[1, 7, 0, 2]]
    assert window.window([place], 3000).length % 3000 == 0


def test_a_file_that_cannot_be_read_is_noted(tmp_path):
    """Also where what is read may be NaN."""
    lying = InFile(tmp_path / "in", rows_of(STRIP, "bf16"))
    table = lying.table()
    out = np.empty(STRIP, np.uint16)
    given = (0, STRIP, TILE, STRIP, np.uint64(address_of(out)), BF16, np.zeros(1))
    merge.merge(FORMULAS["sum"], *table, *given)
    window.check_read(table.window.failed)
    os.truncate(tmp_path / "in", 7)
    merge.merge(FORMULAS["sum"], *table, *given)
    with pytest.raises(window.ReadFailed) as failure:
        window.check_read(table.window.failed)
    assert failure.value.descriptor == lying.descriptor


@pytest.mark.parametrize("seed", range(8))
def test_checksums_of_a_file_are_those_of_its_pieces(tmp_path: Path, seed: int) -> None:
    """Pieces begin anywhere, and what is read at a time ends anywhere."""
    rng, file = np.random.default_rng(seed), tmp_path / "bytes"
    content = rng.bytes(3 * window._IN_CACHE + 5)
    file.write_bytes(content)
    ends = np.sort(rng.integers(0, len(content) + 1, 8)).reshape(-1, 2)
    ends[1, 0] -= ends[1, 0] % 8  # one has its words where words lie, the others mostly not
    cuts = [0, *np.sort(rng.integers(0, len(content), 6)).tolist(), len(content)]
    totals, handle = np.zeros(len(ends), np.uint64), os.open(file, os.O_RDONLY)
    for begin, end in itertools.pairwise(cuts):
        assert read_summed(handle, begin, end - begin, ends, totals).tobytes() == content[begin:end]
    wanted = [checksum(memoryview(content)[first:last]) for first, last in ends]
    assert totals.tolist() == wanted
    with pytest.raises(window.ReadFailed):
        read_summed(handle, 0, len(content) + 1, ends, totals)
    os.close(handle)
    with file.open("ab") as stream, pytest.raises(window.ReadFailed):  # which cannot be read
        read_summed(stream.fileno(), 0, 1, ends, totals)
