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
from sigmerge.errors import PoolError
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


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    folder = make_pool(tmp_path / "pool").reference
    with reader.Reader() as some:
        for tensor in read_header(folder / "model.safetensors").values():
            values = some.raw(tensor).copy()
            some.release([(tensor, 0, tensor.size)])
            assert np.array_equal(some.raw(tensor), values)


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_became_shorter_before_it_is_mapped_is_named(tmp_path: Path, size: int) -> None:
    file = tmp_path / "some.safetensors"
    file.write_bytes(bytes(size))
    tensor = Tensor("w", "F32", (20,), file, 40, 120)
    with reader.Reader() as opened:
        for read in (opened.raw, opened.bytes):
            with pytest.raises(PoolError, match=r"some\.safetensors became shorter"):
                read(tensor)
