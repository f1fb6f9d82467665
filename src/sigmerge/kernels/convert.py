"""Stored numbers to float32 and back, with a finiteness check on the way in and out.

bfloat16 is handled as its uint16 bit pattern, since NumPy has no such type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sigmerge.kernels.jit import kernel

Array = np.ndarray[Any, Any]


@kernel
def widen_bf16(raw: Array, out: Array) -> bool:
    """float32 values of bfloat16 bit patterns; False if any is NaN or infinite."""
    bits = out.view(np.uint32)
    largest = np.uint16(0)
    for i in range(raw.size):
        bits[i] = np.uint32(raw[i]) << np.uint32(16)
        largest = max(largest, np.uint16(np.uint16(raw[i]) & np.uint16(0x7FFF)))
    return bool(largest < np.uint16(0x7F80))


@kernel
def delta_bf16(expert: Array, reference: Array, out: Array) -> bool:
    """float32(expert) − float32(reference) of bfloat16 bit patterns; False if not all are finite.

    One pass instead of two widenings and a subtraction.
    """
    largest = np.uint16(0)
    for i in range(out.size):
        minuend = np.uint32(np.uint32(expert[i]) << np.uint32(16))
        subtrahend = np.uint32(np.uint32(reference[i]) << np.uint32(16))
        out[i] = minuend.view(np.float32) - subtrahend.view(np.float32)
        largest = max(largest, np.uint16(np.uint16(expert[i]) & np.uint16(0x7FFF)))
        largest = max(largest, np.uint16(np.uint16(reference[i]) & np.uint16(0x7FFF)))
    return bool(largest < np.uint16(0x7F80))


@kernel
def all_finite(values: Array) -> bool:
    bits = values.view(np.uint32)
    bad = np.uint32(0)
    for i in range(bits.size):
        bad += np.uint32((bits[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    return bad == 0


@kernel
def narrow_bf16(values: Array, out: Array) -> bool:
    """bfloat16 bit patterns of float32 values, round to nearest even; False if not all finite."""
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
        rounded = np.uint32(bits[i] + np.uint32(np.uint32(0x7FFF) + odd))
        out[i] = np.uint16(rounded >> np.uint32(16))
        # Both, since rounding can carry a large number to infinity and a NaN past the sign.
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
        largest = max(largest, np.uint32(rounded & np.uint32(0x7FFFFFFF)))
    return bool(largest < np.uint32(0x7F800000))


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
