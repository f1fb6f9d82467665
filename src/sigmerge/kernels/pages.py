"""Advice to the system about mapped memory, for many ranges in one call without Python's lock."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from sigmerge.kernels.jit import kernel

_madvise = types.ExternalFunction("madvise", types.int32(types.uintp, types.uintp, types.int32))


@kernel
def advise(ranges: np.ndarray[Any, Any], advice: int) -> None:
    """madvise(2) on every (address, length); it is advice, so what it returns does not matter."""
    for i in range(len(ranges)):
        _madvise(ranges[i, 0], ranges[i, 1], np.int32(advice))
