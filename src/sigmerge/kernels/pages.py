"""Advice to the system about mapped memory, for many ranges in one call without Python's lock."""

from __future__ import annotations

from typing import Any

import numpy as np

from sigmerge.kernels.jit import External, kernel

_madvise = External("madvise", "int32", "uintp", "uintp", "int32")


@kernel
def advise(ranges: np.ndarray[Any, Any], advice: int) -> None:
    """madvise(2) on every (address, length); it is advice, so what it returns does not matter."""
    for i in range(len(ranges)):
        _madvise(ranges[i, 0], ranges[i, 1], np.int32(advice))
