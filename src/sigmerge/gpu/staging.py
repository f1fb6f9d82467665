"""Bytes from files to a GPU, and from there into files (native/device.cpp)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from sigmerge import _native
from sigmerge.core import Array
from sigmerge.core.dtypes import FilePlace

_DRIVER: Final = {"win32": "nvcuda.dll"}.get(sys.platform, "libcuda.so.1")
_NAMES: Final = (
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuEventRecord",
    "cuEventSynchronize",
)


class Drain(NamedTuple):
    """An open file that results are written to: where the first value goes, and the bytes of one;
    the checksum of what was written.
    """

    descriptor: int
    position: int
    width: int
    checksum: Array


def drain_from(place: FilePlace, start: int) -> Drain:
    """What writes a tensor that begins at a place, from the coordinate `start` on."""
    position = place.position + start * place.width
    return Drain(place.descriptor, position, place.width, np.zeros(1, np.uint64))


@cache
def driver() -> Array:
    """The addresses of the functions of CUDA's driver that copy and wait."""
    try:
        library = ctypes.CDLL(_DRIVER)
        functions = [library[name] for name in _NAMES]
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"CUDA's driver ({_DRIVER}) cannot be used: {error}") from None
    return addresses_of(functions)


def addresses_of(functions: Sequence[Any]) -> Array:
    """Where some functions of C lie."""
    return np.array([ctypes.cast(one, ctypes.c_void_p).value for one in functions], np.int64)


def send(spans: Array, there: int, ring: Array, slot: int, stream: int) -> None:
    """Copy spans of files or memory to a GPU, where they are when this returns.

    A row of `spans` is int64: descriptor, position (of MEMORY the address), the place after
    `there`, and how many bytes. A row of `ring` is the address of a slot, and its event, which
    shows that its copy is done. ReadFailed if a file cannot be read.
    """
    _check(_native.send(driver(), spans, there, ring, slot, stream))


def drain(
    there: int, count: int, ring: Array, slot: int, stream: int, begun: int, target: Drain
) -> bool:
    """Write bytes of a GPU, which are those from `begun` on of a target of bytes; False if it
    failed. A slot has a whole number of a checksum's words.
    """
    place = target.descriptor, target.position, int(target.checksum[0])
    try:
        status, found = _native.drain(driver(), there, count, ring, slot, stream, begun, *place)
    except _native.WriteFailed:
        return False
    _check(status)
    target.checksum[0] = found
    return True


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA's driver could not copy (error {status})")


def write_memory(target: Drain, values: Array, begun: int) -> bool:
    """As `drain`, of bytes in memory."""
    try:
        _native.write(target.descriptor, target.position + begun, values)
    except _native.WriteFailed:
        return False
    target.checksum[0] = _native.checksum(values, begun, int(target.checksum[0]))
    return True
