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
from sigmerge.kernels.jit import kernel, part
from sigmerge.kernels.raw import bits_as


@kernel
def widen_bf16(raw: Array, out: Array) -> bool:
    """float32 values of bfloat16 bit patterns; False if any is NaN or infinite."""
    widen(raw, out)
    return bool(finite_bf16(raw))


@part
def widen(raw: Array, out: Array) -> None:
    bits = bits_as(out, np.uint32)
    for i in range(raw.size):
        bits[i] = np.uint32(raw[i]) << np.uint32(16)


@part
def finite_bf16(raw: Array) -> bool:
    """In a loop of its own, which takes twice as many at a time as one that widens."""
    return bool(_largest_magnitude(raw) < np.uint16(0x7F80))


@part
def finite_f16(raw: Array) -> bool:
    return bool(_largest_magnitude(raw) < np.uint16(0x7C00))


@part
def _largest_magnitude(raw: Array) -> np.uint16:
    largest = np.uint16(0)
    for i in range(raw.size):
        largest = max(largest, np.uint16(np.uint16(raw[i]) & np.uint16(0x7FFF)))
    return largest


@kernel
def all_finite(values: Array) -> bool:
    bits = bits_as(values, np.int32)
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return bool(largest < np.int32(0x7F800000))


@kernel
def narrow_bf16(values: Array, out: Array) -> bool:
    """bfloat16 bit patterns of float32 values, round to nearest even; False if not all finite."""
    bits = bits_as(values, np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
        rounded = np.uint32(bits[i] + np.uint32(np.uint32(0x7FFF) + odd))
        out[i] = np.uint16(rounded >> np.uint32(16))
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    # From here on rounding carries a number to infinity, and a NaN even past the sign.
    return bool(largest < np.uint32(0x7F7F8000))


@kernel
def widen_f16(raw: Array, out: Array) -> bool:
    """float32 values of float16 bit patterns; False if any is NaN or infinite."""
    bits = bits_as(out, np.uint32)
    largest = np.uint16(0)
    for i in range(raw.size):
        magnitude = np.uint16(np.uint16(raw[i]) & np.uint16(0x7FFF))
        sign = np.uint32(np.uint32(np.uint16(raw[i]) & np.uint16(0x8000)) << np.uint32(16))
        shifted = np.uint32(np.uint32(magnitude) << np.uint32(13))
        # Below 2**-14 a number has no leading one: give it one, then take that away again.
        small = np.uint32(shifted + np.uint32(0x38800000)).view(np.float32) - np.float32(2.0**-14)
        moved = np.uint32(shifted + np.uint32(0x38000000))
        special = np.uint32(shifted | np.uint32(0x7F800000))
        wide = moved if magnitude < np.uint16(0x7C00) else special
        wide = np.float32(small).view(np.uint32) if magnitude < np.uint16(0x0400) else wide
        bits[i] = wide | sign
        largest = max(largest, magnitude)
    return bool(largest < np.uint16(0x7C00))


@kernel
def narrow_f16(values: Array, out: Array) -> bool:
    """float16 bit patterns of float32 values, round to nearest even; False if not all finite."""
    bits = bits_as(values, np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
        sign = np.uint32((bits[i] >> np.uint32(16)) & np.uint32(0x8000))
        # From 2**-14 on: rebias the exponent and round away 13 bits, ties to the even one.
        odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
        rounded = np.uint32(magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd)
        large = np.uint32(min(rounded >> np.uint32(13), np.uint32(0x7C00)))
        # Below: adding a half makes the float32 unit round at the last place of float16.
        half = np.float32(magnitude.view(np.float32) + np.float32(0.5))
        small = np.uint32(half.view(np.uint32) - np.uint32(0x3F000000))
        code = large if magnitude >= np.uint32(0x38800000) else small
        code = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else code
        nan = np.uint32(0x7E00) | (magnitude >> np.uint32(13)) & np.uint32(0x3FF)
        code = nan if magnitude > np.uint32(0x7F800000) else code
        out[i] = np.uint16(code | sign)
        largest = max(largest, np.uint32(code))
    return bool(largest < np.uint32(0x7C00))


@kernel
def copy_f32(values: Array, out: Array) -> bool:
    """A loop, since `out[:] = values` compiles an error message, which takes seconds."""
    for i in range(out.size):
        out[i] = values[i]
    return bool(all_finite(values))


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
