"""Stored numbers to float32 and back, with a finiteness check on the way in and out.

bfloat16 is handled as its uint16 bit pattern, since NumPy has no such type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from sigmerge import _native
from sigmerge.kernels import Array

STORAGE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
"""Safetensors dtype name -> the NumPy type its bytes are viewed as; in the order of their codes."""

WIDEN: dict[str, Callable[[Array, Array], bool]] = {
    name: functools.partial(_native.widen, code) for code, name in enumerate(STORAGE)
}
"""(stored values, float32 values to fill) -> True if every value is finite."""

NARROW: dict[str, Callable[[Array, Array], bool]] = {
    name: functools.partial(_native.narrow, code) for code, name in enumerate(STORAGE)
}
"""(float32 values, stored values to fill) -> True if every stored value is finite."""
