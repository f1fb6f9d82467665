"""Stored numbers to float32 and back, with a finiteness check on the way in and out.

bfloat16 is handled as its uint16 bit pattern, since NumPy has no such type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]


@njit(cache=True, nogil=True)
def widen_bf16(raw: Array, out: Array) -> bool:
    """float32 values of bfloat16 bit patterns; False if any is NaN or infinite."""
    bits = out.view(np.uint32)
    bad = np.uint32(0)
    for i in range(raw.size):
        pattern = np.uint32(raw[i])
        bits[i] = pattern << np.uint32(16)
        bad += np.uint32((pattern & np.uint32(0x7F80)) == np.uint32(0x7F80))
    return bad == 0


@njit(cache=True, nogil=True)
def all_finite(values: Array) -> bool:
    bits = values.view(np.uint32)
    bad = np.uint32(0)
    for i in range(bits.size):
        bad += np.uint32((bits[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    return bad == 0


@njit(cache=True, nogil=True)
def narrow_bf16(values: Array, out: Array) -> bool:
    """bfloat16 bit patterns of float32 values, round to nearest even; False if not all finite."""
    bits = values.view(np.uint32)
    bad = np.uint32(0)
    for i in range(bits.size):
        word = bits[i]
        rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> (
            np.uint32(16)
        )
        out[i] = np.uint16(rounded)
        bad += np.uint32((rounded & np.uint32(0x7F80)) == np.uint32(0x7F80))
        bad += np.uint32((word & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    return bad == 0


def _widen_f32(raw: Array, out: Array) -> bool:
    out[:] = raw
    return bool(all_finite(out))


def _widen_f16(raw: Array, out: Array) -> bool:
    out[:] = raw
    return bool(all_finite(out))


def _narrow_f32(values: Array, out: Array) -> bool:
    out[:] = values
    return bool(all_finite(out))


def _narrow_f16(values: Array, out: Array) -> bool:
    with np.errstate(over="ignore"):
        out[:] = values
    return bool(np.isfinite(out).all())


STORAGE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
"""Safetensors dtype name -> the NumPy type its bytes are viewed as."""

WIDEN: dict[str, Callable[[Array, Array], bool]] = {
    "BF16": widen_bf16,
    "F16": _widen_f16,
    "F32": _widen_f32,
}
"""(raw tile, float32 tile to fill) -> True if every value is finite."""

NARROW: dict[str, Callable[[Array, Array], bool]] = {
    "BF16": narrow_bf16,
    "F16": _narrow_f16,
    "F32": _narrow_f32,
}
"""(float32 tile, raw tile to fill) -> True if every stored value is finite."""
