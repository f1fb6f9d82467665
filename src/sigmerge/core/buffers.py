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

from sigmerge.core import Array

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


def blank(shape: tuple[int, ...], dtype: Any, purpose: str) -> Array:
    """Zeros, which are the calling thread's own. Whoever clears them again calls `keep_blank`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    held: Array | None = _local.__dict__.pop(f"blank {purpose}", None)
    if held is None or held.nbytes < size:
        held = np.zeros(size, np.uint8)
    _local.__dict__[f"lent {purpose}"] = held
    return np.asarray(held[:size].view(dtype).reshape(shape))


def keep_blank(values: Array, purpose: str) -> None:
    """What `blank` gave last is zeros again, and is given once more. Other arrays are not kept."""
    lent = _local.__dict__.pop(f"lent {purpose}", None)
    owned = values.base
    if owned is not None and owned is lent and owned.nbytes <= KEPT:
        _local.__dict__[f"blank {purpose}"] = owned
