"""Memory that a thread uses again.

A fresh array of a megabyte comes from the system and goes back there, each time under the lock of
the process's memory, for which the page faults of all other threads wait. A loop over thousands of
chunks therefore keeps its arrays.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import kernel

KEPT = 16 << 20
"""Bytes of one array at most that a thread keeps."""

_local = threading.local()


def room(shape: int | tuple[int, ...], dtype: Any, purpose: str) -> Array:
    """The calling thread's own array for a purpose, with any content; valid until the next."""
    kind = np.dtype(dtype)
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    held: dict[str, Array] = _local.__dict__
    if size * kind.itemsize > KEPT:
        return np.empty(shape, kind)
    if purpose not in held or held[purpose].nbytes < size * kind.itemsize:
        held[purpose] = np.empty(size * kind.itemsize, np.uint8)
    return held[purpose][: size * kind.itemsize].view(kind).reshape(shape)


def zeros(shape: int | tuple[int, ...], dtype: Any, purpose: str) -> Array:
    """As `room`, filled with zeros."""
    made = room(shape, dtype, purpose)
    _clear(made.reshape(-1).view(np.uint8))
    return made


@kernel
def _clear(values: Array) -> None:
    values[:] = np.uint8(0)
