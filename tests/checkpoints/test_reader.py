"""Reading ahead: every byte that comes next is asked for; a file that is gone is no matter."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sigmerge.checkpoints import reader
from sigmerge.checkpoints.header import Tensor, read_header
from tests.pools import make_pool


def test_all_bytes_of_a_tensor_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_pool(tmp_path / "pool").reference
    tensor = max(read_header(folder / "model.safetensors").values(), key=lambda t: t.nbytes)
    gone = Tensor(**{**vars(tensor), "file": folder / "gone.safetensors"})
    asked: list[tuple[int, int]] = []
    done = threading.Event()

    def advise(_: int, begin: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((begin, length))
        if begin + length == tensor.end:
            done.set()

    def failed(arguments: Any) -> None:
        raise AssertionError(f"the thread ended: {arguments.exc_value}")

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(threading, "excepthook", failed)
    monkeypatch.setattr(reader, "AHEAD", 100)
    ahead = reader.Reader()
    ahead.prefetch(gone)
    ahead.prefetch(tensor)
    assert done.wait(20)
    ends = [tensor.begin, *(begin + length for begin, length in asked)]
    assert [begin for begin, _ in asked] == ends[:-1] and len(asked) > 1
