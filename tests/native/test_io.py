"""The checksum against big integers, and faults of the system as what they are."""

from __future__ import annotations

import errno
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
