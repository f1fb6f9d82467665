"""Advice about a file reaches the system."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from sigmerge.kernels.pages import advise_file

PAGES = 6 << 10


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
def test_bytes_that_are_asked_for_are_read(tmp_path: Path) -> None:
    """All between two positions, and nothing before. Every disk takes such a request whole."""
    file = tmp_path / "file"
    file.write_bytes(bytes(PAGES * mmap.PAGESIZE))
    with file.open("rb") as stream:
        handle = stream.fileno()
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        if resident(handle).any():
            pytest.skip("this file system keeps files in memory")
        begin, end = 1000 * mmap.PAGESIZE, 5000 * mmap.PAGESIZE - 1
        advise_file(handle, begin, end, 7 * mmap.PAGESIZE, os.POSIX_FADV_WILLNEED)
        until = time.monotonic() + 20
        while not resident(handle)[1000:5000].all() and time.monotonic() < until:
            time.sleep(0.01)
        found = resident(handle)
    assert found[1000:5000].all() and not found[:1000].any() and not found[-1]


def resident(handle: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which pages of a file are in memory, by mincore(2)."""
    with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as mapped:
        there = (ctypes.c_ubyte * PAGES)()
        view = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(view.__array_interface__["data"][0])
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), there) == 0
        del view
    return (np.frombuffer(there, np.uint8) & 1).astype(bool)
