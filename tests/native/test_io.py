"""The checksum against big integers, and faults of the system as what they are."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from sigmerge import _native
from sigmerge.core import claim, merge
from sigmerge.core.dtypes import BF16, F32

WORD = 0xFFFFFFFF


def nh(data: bytes, position: int, before: int) -> int:
    total = before
    for number, begin in enumerate(range(0, len(data), 8), position // 8 + 1):
        word = int.from_bytes(data[begin : begin + 8], "little")
        low = (word + number * 0x9E3779B1) & WORD
        total += low * (((word >> 32) + number * 0x85EBCA77 + 0x9E3779B1) & WORD)
    return total & (1 << 64) - 1


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 511, 512, 513, 1031, 4097])
def test_the_checksum_of_bytes_that_begin_anywhere(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 8, dtype=np.uint8)
    for skip in range(8):
        piece = data[skip : skip + size]
        assert _native.checksum(piece, 64, 99) == nh(piece.tobytes(), 64, 99)


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)))
    with (tmp_path / "file").open("rb") as file:
        out = np.empty(50, np.uint8)
        _native.read(file.fileno(), 150, out)
        assert out.tobytes() == bytes(range(150, 200))
        with pytest.raises(_native.ReadFailed, match="shrunk") as failed:
            _native.read(file.fileno(), 151, out)
        assert failed.value.shrank and failed.value.position == 200
        assert failed.value.descriptor == file.fileno()


def test_an_error_of_the_system_keeps_its_number(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(_native.ReadFailed) as failed:
            _native.read(descriptor, 0, np.empty(1, np.uint8))
    finally:
        os.close(descriptor)
    assert failed.value.errno == errno.EISDIR and not failed.value.shrank
    assert os.strerror(errno.EISDIR) in str(failed.value)


@pytest.mark.parametrize("size", [0, 7, 8, 1000, 4099])
def test_the_checksum_of_a_whole_from_those_of_its_parts(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    for cut in (0, 8, 64, size // 16 * 8):
        first = _native.checksum(memoryview(data)[:cut])
        assert _native.checksum(memoryview(data)[cut:], cut, first) == nh(data, 0, 0)


def test_every_bit_and_every_swap_counts() -> None:
    data = bytearray(np.random.default_rng(0).bytes(256))
    sums = {_native.checksum(memoryview(data))}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(_native.checksum(memoryview(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * len(data)
    words = np.frombuffer(bytes(data), np.uint64)
    for i in range(0, 31):
        swapped = words.copy()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        assert _native.checksum(swapped) not in sums


def test_zeros_of_another_length_differ() -> None:
    assert len({_native.checksum(bytes(8 * n)) for n in range(200)}) == 200


@pytest.mark.parametrize("seed", range(8))
def test_checksums_of_a_file_are_those_of_its_pieces(tmp_path: Path, seed: int) -> None:
    """Pieces begin anywhere, and what is read at a time ends anywhere."""
    rng, file = np.random.default_rng(seed), tmp_path / "bytes"
    content = rng.bytes((3 << 18) + 5)
    file.write_bytes(content)
    ends = np.sort(rng.integers(0, len(content) + 1, 8)).reshape(-1, 2)
    ends[1, 0] -= ends[1, 0] % 8  # one has its words where words lie, the others mostly not
    cuts = [0, *np.sort(rng.integers(0, len(content), 6)).tolist(), len(content)]
    totals, handle = np.zeros(len(ends), np.uint64), os.open(file, os.O_RDONLY)
    for begin, end in itertools.pairwise(cuts):
        held = np.empty(8 + end - begin, np.uint8)
        _native.read_summed(handle, begin, held, ends, totals)
        assert held[8:].tobytes() == content[begin:end]
    assert totals.tolist() == [nh(content[first:last], 0, 0) for first, last in ends]
    longer = np.empty(8 + len(content) + 1, np.uint8)
    with pytest.raises(_native.ReadFailed):
        _native.read_summed(handle, 0, longer, ends, totals)
    os.close(handle)
    with file.open("ab") as stream, pytest.raises(_native.ReadFailed):  # which cannot be read
        _native.read_summed(stream.fileno(), 0, longer[:9], ends, totals)


@pytest.mark.parametrize("loop", ["weighted_rows", "merge", "admit"])
def test_a_place_that_32_bits_do_not_hold(tmp_path: Path, loop: str) -> None:
    """Members and result lie behind 4 GiB of a file that is mostly a hole."""
    size, far = 40_000, (4 << 30) + 6
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    expected = 2 * (raw.astype(np.uint32) << 16).view(np.float32)
    handle = os.open(tmp_path / "long", os.O_RDWR | os.O_CREAT)
    os.pwrite(handle, raw.tobytes(), far)
    out = np.array([F32, handle, far + 2 * size])
    one, row = np.full(1, 2, np.float32), np.array([[BF16, handle, far]])
    if loop == "weighted_rows":
        _native.weighted_rows(one, False, np.zeros((0, 3), np.float32), row, size, out)
    elif loop == "merge":
        formula = merge.formula(one, vectors=False, combine=merge.DISJOINT)
        merge.merge(formula, row, 0, size, size, 512, out, np.zeros(1))
    else:
        zeros = np.zeros(size, np.uint16)
        nothing = [BF16, -1, zeros.ctypes.data]
        members = np.array([row[0], nothing, nothing])[:, None].copy()
        update = claim.Admission(claim.ADD, 2.0, np.array([0]), 0, np.zeros((1, 2), np.int64))
        owner = np.zeros(size, np.uint8)
        claim.admit(update, np.array([0, size]), owner, 0, 1, members, out)
    found = np.empty(size, np.float32)
    _native.read(handle, far + 2 * size, found)
    os.close(handle)
    assert np.array_equal(found, expected)
