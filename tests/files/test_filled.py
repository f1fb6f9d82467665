from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from sigmerge.files import filled
from sigmerge.files.filled import MAPPED_FROM, FilledFile

SIZE = 50_000


@contextmanager
def opened(file: Path, size: int, threads: int) -> Iterator[FilledFile]:
    handle = os.open(file, os.O_CREAT | os.O_RDWR)
    os.ftruncate(handle, size)
    one = FilledFile(handle, size, threads)
    try:
        yield one
    finally:
        one.close()
        os.close(handle)


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(0).bytes(SIZE)


@pytest.mark.parametrize("threads", [1, MAPPED_FROM])
def test_threads_fill_pieces_that_share_pages(tmp_path: Path, data: bytes, threads: int) -> None:
    with opened(tmp_path / "file", SIZE, threads) as file, ThreadPoolExecutor(8) as pool:
        pieces = [data[at : at + 777] for at in range(0, SIZE, 777)]
        places = range(0, SIZE, 777)
        list(pool.map(lambda piece, at: file.write(memoryview(piece), at), pieces, places))
    assert (tmp_path / "file").read_bytes() == data


def test_many_threads_write_through_a_map(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", None)
    with opened(tmp_path / "file", SIZE, MAPPED_FROM) as file:
        if not _populates(tmp_path):
            pytest.skip("this system does not populate maps")
        file.write(memoryview(data), 0)
    assert (tmp_path / "file").read_bytes() == data


def test_a_system_that_cannot_populate_maps_is_written_by_calls(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filled, "POPULATE_WRITE", 9999)
    with opened(tmp_path / "file", SIZE, MAPPED_FROM) as file:
        file.write(memoryview(data), 0)
    assert (tmp_path / "file").read_bytes() == data


def test_an_empty_file_is_not_mapped(tmp_path: Path) -> None:
    with opened(tmp_path / "file", 0, MAPPED_FROM) as file:
        file.write(memoryview(b""), 0)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """The file is longer than its file system; a write to a page that is not there would kill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=False
    ).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with opened(disk / "file", 1 << 20, MAPPED_FROM) as file:
                    file.write(memoryview(bytes(4096)), 0)
                    file.write(memoryview(bytes(1 << 19)), 4096)
            except OSError as error:
                code = 7 if error.errno == errno.ENOSPC else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        subprocess.run(["umount", disk], check=True)


def _populates(folder: Path) -> bool:
    with (folder / "probe").open("w+b") as stream:
        stream.truncate(4096)
        with mmap.mmap(stream.fileno(), 4096) as room:
            try:
                room.madvise(filled.POPULATE_WRITE)
            except OSError:
                return False
    return True
