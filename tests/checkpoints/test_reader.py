"""Reading ahead: every byte that comes next is asked for; a file that is gone is no matter."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge.checkpoints import reader
from sigmerge.checkpoints.header import Tensor, read_header
from sigmerge.core.dtypes import MEMORY, load_rows, table
from sigmerge.errors import PoolError
from sigmerge.files.opened import OpenFile, named_reads
from tests.pools import make_pool


def test_all_bytes_of_a_tensor_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_pool(tmp_path / "pool").reference
    tensor = max(read_header(folder / "model.safetensors").values(), key=lambda t: t.nbytes)
    gone = Tensor(**{**vars(tensor), "file": folder / "gone.safetensors"})
    asked: list[tuple[int, ...]] = []
    done = threading.Event()

    def advise(_: int, *given: int) -> None:
        asked.append(given)
        done.set()

    def failed(arguments: Any) -> None:
        raise AssertionError(f"the thread ended: {arguments.exc_value}")

    monkeypatch.setattr(reader, "advise_file", advise)
    monkeypatch.setattr(threading, "excepthook", failed)
    with reader.Reader() as ahead:
        ahead.prefetch([[gone], [tensor]])
        assert done.wait(20)
    assert asked == [(tensor.begin, tensor.end, reader.AHEAD, os.POSIX_FADV_WILLNEED)]


def test_a_closed_reader_leaves_no_thread(tmp_path: Path) -> None:
    folder = make_pool(tmp_path / "pool").reference
    tensors = read_header(folder / "model.safetensors").values()
    before = threading.active_count()
    for _ in range(5):
        with reader.Reader() as some:
            for tensor in tensors:
                some.prefetch([[tensor]])
            values = some.raw(next(iter(tensors)))
            assert threading.active_count() <= before + 1
    assert threading.active_count() == before
    assert np.isfinite(values).all()  # what was handed out stays readable


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_became_shorter_before_it_is_read_is_named(tmp_path: Path, size: int) -> None:
    file = tmp_path / "some.safetensors"
    file.write_bytes(bytes(size))
    tensor = Tensor("w", "F32", (20,), file, 40, 120)
    with reader.Reader() as opened:
        for read in (opened.raw, opened.bytes):
            with pytest.raises(PoolError, match=r"some\.safetensors: became shorter"):
                read(tensor)


@pytest.fixture
def tensor(tmp_path: Path) -> Tensor:
    file = tmp_path / "some.safetensors"
    file.write_bytes(bytes(range(200)))
    return Tensor("w", "F32", (20,), file, 41, 121)  # where no float32 may lie in memory


def test_a_span_keeps_its_file_open(tensor: Tensor) -> None:
    with reader.Reader() as some:
        span = some.span(tensor, 2, 7).part(1, 3)
    tensor.file.unlink()
    descriptor = span.descriptor
    assert os.pread(descriptor, span.nbytes, span.position) == bytes(range(53, 61))
    assert span.array().tobytes() == bytes(range(53, 61))
    del span
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_spans_of_a_file_share_its_descriptor(tensor: Tensor) -> None:
    with reader.Reader() as some:
        assert some.span(tensor).descriptor == some.span(tensor, 3).descriptor


def test_of_too_many_open_files_values_are_read_at_once(
    tensor: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenFile, "may_stay", False)
    with reader.Reader() as some:
        before = len(list(Path("/proc/self/fd").iterdir()))
        span = some.span(tensor, 2, 4)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert span.descriptor == MEMORY and span.array().tobytes() == bytes(range(49, 57))


def test_a_file_that_becomes_shorter_later_is_named(tensor: Tensor) -> None:
    with reader.Reader() as some:
        span = some.span(tensor)
        os.truncate(tensor.file, 60)
        said = r"some\.safetensors: became shorter while it was read"
        with pytest.raises(PoolError, match=said):
            some.raw(tensor)
        with pytest.raises(PoolError, match=said), named_reads():
            load_rows(table([span]), table([]), np.empty((1, 20), np.float32))


def test_bytes_of_a_tensor_end_with_it(tensor: Tensor) -> None:
    with reader.Reader() as some:
        assert some.bytes(tensor) == bytes(range(41, 121))
        assert some.bytes(tensor, 70, 99) == bytes(range(111, 121))
        assert some.bytes(tensor, 90, 99) == b""
