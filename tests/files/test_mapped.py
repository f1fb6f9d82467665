"""Files by the address at which they are mapped."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.reader import Reader
from sigmerge.files.mapped import mapped_at


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "some.bin"
    file.write_bytes(bytes(range(200)))
    return file


def read(address: int, count: int) -> bytes | None:
    """The bytes at an address as the file there has them; None if it cannot be read."""
    room = (ctypes.c_char * count)()
    found = mapped_at(address)
    return room.raw if found and found.read(address, room) else None


def test_bytes_of_a_map_are_read_from_its_file(file: Path) -> None:
    with Reader() as reader, Reader() as other:
        for each in (other, reader):
            first = each.address(Tensor("w", "F32", (20,), file, 40, 120))
            assert read(first, 80) == bytes(range(40, 120))
        assert read(first - 40, 200) == bytes(range(200))
        assert mapped_at(first + 159) is mapped_at(first)
        assert mapped_at(first + 160) is not mapped_at(first)
    assert mapped_at(first) is None


def test_a_file_that_was_replaced_or_cut_short_is_not_read(file: Path) -> None:
    tensor = Tensor("w", "F32", (20,), file, 40, 120)
    with Reader() as reader:
        first = reader.address(tensor)
        new = file.with_name("new.bin")
        new.write_bytes(bytes(200))
        new.replace(file)
        assert read(first, 80) is None
        assert reader.raw(tensor).tobytes() == bytes(range(40, 120))
    with Reader() as reader:
        first = reader.address(tensor)
        assert read(first, 80) == bytes(80)
        with file.open("r+b") as stream:
            stream.truncate(100)
        assert read(first, 80) is None
        assert read(first, 60) == bytes(60)


def test_maps_that_nobody_closes_are_not_noted(file: Path) -> None:
    """They go when their last array does, and other memory may lie there then."""
    reader = Reader()
    first = reader.address(Tensor("w", "F32", (20,), file, 40, 120))
    assert mapped_at(first) is None
    reader.close()
