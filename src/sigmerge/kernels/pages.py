"""Advice to the system about memory and files: many ranges in one call without Python's lock."""

from __future__ import annotations

from typing import Any

import numpy as np

from sigmerge.kernels.jit import External, kernel

_madvise = External("madvise", "int32", "uintp", "uintp", "int32")
_fadvise = External("posix_fadvise", "int32", "int32", "int64", "int64", "int32")


@kernel
def advise(ranges: np.ndarray[Any, Any], advice: int) -> None:
    """madvise(2) on every (address, length); it is advice, so what it returns does not matter."""
    for i in range(len(ranges)):
        _madvise(ranges[i, 0], ranges[i, 1], np.int32(advice))


@kernel
def advise_file(descriptor: int, begin: int, end: int, step: int, advice: int) -> None:
    """posix_fadvise(2) on every `step` bytes of a file between two positions."""
    for at in range(begin, end, step):
        _fadvise(np.int32(descriptor), at, min(step, end - at), np.int32(advice))
