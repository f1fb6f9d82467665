"""Files by the address at which they are mapped."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.reader import Reader
from sigmerge.files.mapped import MappedFile, mapped_at


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


def test_descriptors_are_left_for_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped values need none; a process that has half of its descriptors opens no more."""
    least = os.open(file, os.O_RDONLY)
    os.close(least)
    for limit, opened in ((2 * least, False), (2 * least + 2, True)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        mapped = MappedFile(0, file, file.stat())
        assert (mapped.descriptor() is not None) == opened


def test_a_descriptor_that_is_not_kept_is_given_to_nobody(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread would read by its number what is opened next: values of another model."""
    mapped, seen = MappedFile(0, file, file.stat()), []

    def full(_: int) -> tuple[int, int]:
        seen.extend(number for number in range(64) if mapped.has(number))
        return 0, 0

    monkeypatch.setattr("resource.getrlimit", full)
    assert mapped.descriptor() is None
    assert not seen


@pytest.mark.filterwarnings("error")
def test_a_file_is_closed_when_its_map_is_forgotten(file: Path) -> None:
    with Reader() as reader:
        mapped = mapped_at(reader.address(Tensor("w", "F32", (20,), file, 40, 120)))
        assert mapped is not None
        number = mapped.descriptor()
        assert number is not None
    assert mapped.descriptor() is None
    with pytest.raises(OSError):
        os.fstat(number)


def test_a_command_may_open_as_many_files_as_the_system_lets_it() -> None:
    told = "import resource; from sigmerge.cli.main import _allow_many_files as allow; allow(); "
    told += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = f"ulimit -Sn 64 && exec {sys.executable} -c '{told}'"
    assert subprocess.check_output(["sh", "-c", command], text=True).split() == [str(hard)] * 2
