"""Bytes on their way to a device, beside a driver whose copies happen as late as they may."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sigmerge._native import ReadFailed, checksum
from sigmerge.core.dtypes import MEMORY
from sigmerge.gpu import staging
from sigmerge.gpu.staging import Drain

SLOT, STREAM = 64, 77


class Driver:
    """CUDA's functions for memory of this process: a copy happens when its event is waited for."""

    def __init__(self) -> None:
        self.queued: list[tuple[int, int, int]] = []
        self.until: dict[int, int] = {}
        self.done, self.streams = 0, set[int]()
        self.copying = self.waiting = 0  # what these functions return
        word = ctypes.c_size_t
        self.functions = [
            ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, word)(self.copy),
            ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, word)(self.copy),
            ctypes.CFUNCTYPE(ctypes.c_int, word, word)(self.record),
            ctypes.CFUNCTYPE(ctypes.c_int, word)(self.wait),
        ]

    def copy(self, target: int, source: int, count: int, stream: int) -> int:
        self.queued.append((target, source, count))
        self.streams.add(stream)
        return self.copying

    def record(self, event: int, stream: int) -> int:
        self.until[event] = len(self.queued)
        return 0

    def wait(self, event: int) -> int:
        for span in self.queued[self.done : self.until.get(event, 0)]:
            ctypes.memmove(*span)
        self.done = max(self.done, self.until.get(event, 0))
        return self.waiting


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(staging, "driver", lambda: staging.addresses_of(made.functions))
    return made


@pytest.mark.parametrize(("name", "said"), [("libnone.so", "libnone"), ("libc.so.6", "cuMemcpy")])
def test_a_driver_that_is_not_there_or_another(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr(staging, "_DRIVER", name)
    staging.driver.cache_clear()
    with pytest.raises(RuntimeError, match=f"cannot be used: .*{said}"):
        staging.driver()


def ring(slots: Any) -> Any:
    """Slots, and the names of their events."""
    return np.array([(slot.ctypes.data, 1 + n) for n, slot in enumerate(slots)], np.int64)


def sent(rows: list[tuple[int, ...]], size: int) -> bytes:
    """What a device has after some spans were sent to it through three slots."""
    there, slots = np.zeros(size, np.uint8), np.full((3, SLOT), 9, np.uint8)
    table, place = np.array(rows, np.int64), there.ctypes.data
    staging.send(table, place, ring(slots), SLOT, STREAM)
    return there.tobytes()


def test_all_bytes_are_there_when_it_returns(driver: Driver, tmp_path: Path) -> None:
    """More slots than the ring has: one that is filled again before its copy is done shows."""
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    handle = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        rows = [
            (handle, 3, 0, 500),
            (MEMORY, data.ctypes.data + 600, 512, 333),
            (handle, 999, 900, 1),
        ]
        found = sent(rows, 1000)
    finally:
        os.close(handle)
    expected = np.zeros(1000, np.uint8)
    expected[:500], expected[512:845], expected[900] = data[3:503], data[600:933], data[999]
    assert found == expected.tobytes()
    assert driver.streams == {STREAM} and max(count for *_, count in driver.queued) == SLOT


def test_a_file_that_ends_too_early_is_an_error(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    handle = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(ReadFailed, match="shrunk") as failed:
            sent([(handle, 0, 0, 101)], 200)
        assert failed.value.descriptor == handle
    finally:
        os.close(handle)


@pytest.mark.parametrize("what", ["copying", "waiting"])
def test_what_the_driver_refuses_is_an_error(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nothing is written of a slot whose copy failed: its checksum would not show it."""
    monkeypatch.setattr(driver, what, 201)
    data, slots = np.zeros(10, np.uint8), np.zeros((3, SLOT), np.uint8)
    with pytest.raises(RuntimeError, match="error 201"):
        sent([(MEMORY, data.ctypes.data, 0, 10)], 10)
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        target = Drain(handle, 0, 1, np.zeros(1, np.uint64))
        with pytest.raises(RuntimeError, match="error 201"):
            staging.drain(data.ctypes.data, 10, ring(slots), SLOT, STREAM, 0, target)
    finally:
        os.close(handle)
    assert not (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("size", [0, 5, SLOT, 3 * SLOT, 1000])
def test_results_are_written_in_their_order(driver: Driver, tmp_path: Path, size: int) -> None:
    """Through three slots; none is written before its copy is done, or copied to before that."""
    made = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    slots, sums = np.zeros((3, SLOT), np.uint8), np.zeros(1, np.uint64)
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        target = Drain(handle, 10, 1, sums)
        given = made.ctypes.data, size, ring(slots), SLOT, STREAM, 16, target
        assert staging.drain(*given)
    finally:
        os.close(handle)
    written = (tmp_path / "file").read_bytes()
    assert written[26:] == made.tobytes() and not any(written[:26])
    assert int(sums[0]) == checksum(memoryview(made.tobytes()), 16)


def test_a_result_that_cannot_be_written_is_told(driver: Driver, tmp_path: Path) -> None:
    made, slots = np.zeros(100, np.uint8), np.zeros((3, SLOT), np.uint8)
    (tmp_path / "file").touch()
    handle = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        target = Drain(handle, 0, 1, np.zeros(1, np.uint64))
        given = made.ctypes.data, 100, ring(slots), SLOT, STREAM, 0, target
        assert not staging.drain(*given)
    finally:
        os.close(handle)
