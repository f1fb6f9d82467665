"""Bytes from files to a GPU, and from there into files, without Python's lock.

They pass through a ring of small slots of pinned memory: the processor's caches hold a slot from
when it is filled to when it is copied, and while one is copied the next is filled. The functions
that copy are those of CUDA's driver.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache
from typing import Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import External, kernel
from sigmerge.kernels.raw import array_at
from sigmerge.kernels.window import MEMORY, Drain, read, write

_DRIVER: Final = {"win32": "nvcuda.dll"}.get(sys.platform, "libcuda.so.1")
_NAMES: Final = (
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuEventRecord",
    "cuEventSynchronize",
)
_copy_there = External(_NAMES[0], "int32", "uintp", "uintp", "uintp", "uintp")
_copy_here = External(_NAMES[1], "int32", "uintp", "uintp", "uintp", "uintp")
_record = External(_NAMES[2], "int32", "uintp", "uintp")
_wait_for = External(_NAMES[3], "int32", "uintp")
WRITE_FAILED: Final = -1


@cache
def load_driver() -> None:
    """Make the driver's functions known to compiled code, which must not run without them."""
    from llvmlite import binding

    with suppress(RuntimeError):
        binding.load_library_permanently(_DRIVER)
    missing = [name for name in _NAMES if not binding.address_of_symbol(name)]
    if missing:
        raise RuntimeError(f"CUDA's driver ({_DRIVER}) has no {missing[0]}")


def send(spans: Array, there: int, ring: Array, slot: int, stream: int, failed: Array) -> None:
    """Copy spans of files or memory to a GPU, where they are when this returns.

    A row of `spans` is int64: descriptor, position (of MEMORY the address), the place after
    `there`, and how many bytes. A row of `ring` is the address of a slot, and its event, which
    shows that its copy is done. `failed` is as that of a window.
    """
    load_driver()
    _check(_send(spans, there, ring, slot, stream, failed))


def drain(
    there: int, count: int, ring: Array, slot: int, stream: int, begun: int, target: Drain
) -> bool:
    """Write bytes of a GPU, which are those from `begun` on of a target of bytes; False if it
    failed. A slot has a whole number of a checksum's words.
    """
    load_driver()
    status = _drain(there, count, ring, slot, stream, begun, target)
    if status == WRITE_FAILED:
        return False
    _check(status)
    return True


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA's driver could not copy (error {status})")


@kernel
def _send(spans: Array, there: int, ring: Array, slot: int, stream: int, failed: Array) -> np.int32:
    turn, status = 0, np.int32(0)
    for i in range(len(spans)):
        descriptor, position, place, count = spans[i, 0], spans[i, 1], spans[i, 2], spans[i, 3]
        for done in range(0, count, slot):
            length = min(slot, count - done)
            room, event = ring[turn, 0], np.uint64(ring[turn, 1])
            turn = (turn + 1) % len(ring)
            status |= _wait_for(event)
            if descriptor == MEMORY:
                source = array_at(np.uint64(position + done), length, np.uint8)
                array_at(np.uint64(room), length, np.uint8)[:] = source
            else:
                read(descriptor, position + done, room, length, failed)
            to = np.uint64(there + place + done)
            status |= _copy_there(to, np.uint64(room), np.uint64(length), np.uint64(stream))
            status |= _record(event, np.uint64(stream))
    for i in range(len(ring)):
        status |= _wait_for(np.uint64(ring[i, 1]))
    return status


@kernel
def _drain(
    there: int, count: int, ring: Array, slot: int, stream: int, begun: int, target: Drain
) -> np.int32:
    under_way, status = 0, np.int32(0)
    for done in range(0, count, slot):
        while under_way < min(count, done + slot * len(ring)):
            turn = under_way // slot % len(ring)
            length, at = min(slot, count - under_way), np.uint64(there + under_way)
            room, event = np.uint64(ring[turn, 0]), np.uint64(ring[turn, 1])
            status |= _copy_here(room, at, np.uint64(length), np.uint64(stream))
            status |= _record(event, np.uint64(stream))
            under_way += length
        turn, end = done // slot % len(ring), min(done + slot, count)
        status |= _wait_for(np.uint64(ring[turn, 1]))
        if status != 0:
            return status
        if not write(target, np.uint64(ring[turn, 0]), begun + done, begun + end):
            return np.int32(WRITE_FAILED)
    return status


@kernel
def write_memory(target: Drain, address: int, begun: int, end: int) -> bool:
    """As `drain`, of bytes in memory."""
    return write(target, np.uint64(address), begun, end)
