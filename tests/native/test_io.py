"""The checksum against big integers, and faults of the system as what they are."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from sigmerge import _native

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
