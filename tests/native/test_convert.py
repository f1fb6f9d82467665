"""Stored numbers to float32 and back, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from sigmerge import _native
from sigmerge.core.dtypes import BF16, F16, F32

ALL = np.arange(1 << 16, dtype=np.uint16)
SIZES = (0, 1, 7, 15, 16, 17, 63, 64, 65, 511, 512, 513)


def numbers(seed: int, count: int) -> np.ndarray:
    """Any patterns of float32, half of them in the range where float16 rounds."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    near = rng.integers(0x32000000, 0x48000000, count, dtype=np.uint32) | (bits & 0x80000000)
    return np.where(rng.random(count) < 0.5, bits, near).astype(np.uint32).view(np.float32)


def rounded_bf16(values: np.ndarray) -> np.ndarray:
    """Finite values to the nearest, or the even one, in float64, where both are exact."""
    exact = values.astype(np.float64)
    below = (values.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    step = (values.view(np.uint32) & 0xFFFF0000) + np.uint32(0x10000)
    above = step.view(np.float32).astype(np.float64)
    infinite = np.abs(above) > np.finfo(np.float32).max
    above = np.where(infinite, np.copysign(2.0**128, exact), above)
    up, down = np.abs(above - exact), np.abs(exact - below)
    odd = (values.view(np.uint32) >> 16) & 1 == 1
    take_above = (up < down) | ((up == down) & odd)
    return np.where(take_above, step >> 16, values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kind", [BF16, F16])
def test_every_pattern_widens_as_numpy_does(kind: int) -> None:
    out = np.empty(ALL.size, np.float32)
    assert not _native.widen(kind, ALL, out)
    if kind == BF16:
        expected = (ALL.astype(np.uint32) << 16).view(np.float32)
    else:
        expected = ALL.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out, expected)  # a NaN may have other bits: numpy makes it quiet
    nan = np.isnan(expected)
    assert (out.view(np.uint32)[~nan] == expected.view(np.uint32)[~nan]).all()


@pytest.mark.parametrize("kind", [BF16, F16])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_finite_is_seen_wherever_it_stands(kind: int, size: int) -> None:
    first = 0x7F80 if kind == BF16 else 0x7C00
    raw = np.random.default_rng(size).integers(0, first, size, dtype=np.uint16)
    raw |= np.uint16(0x8000) * (np.arange(size) % 2).astype(np.uint16)
    out = np.empty(size, np.float32)
    assert _native.widen(kind, raw, out) and _native.finite(kind, raw)
    for place in range(size):
        for pattern in (first, first + 1, 0x7FFF, 0x8000 | first):
            damaged = raw.copy()
            damaged[place] = pattern
            assert not _native.widen(kind, damaged, out)
            assert not _native.finite(kind, damaged)


def test_float32_is_copied() -> None:
    values = numbers(1, 1000)
    for kept, fine in (
        (values[np.isfinite(values)], True),
        (values, bool(np.isfinite(values).all())),
    ):
        out = np.empty(kept.size, np.float32)
        assert _native.widen(F32, kept, out) is fine
        assert out.tobytes() == kept.tobytes()
        assert _native.narrow(F32, kept, out) is fine and _native.finite(F32, kept) is fine


def test_narrowing_to_bfloat16_rounds_to_nearest_even() -> None:
    values = numbers(2, 1 << 18)
    values = values[np.isfinite(values)]
    out = np.empty(values.size, np.uint16)
    fine = _native.narrow(BF16, values, out)
    np.testing.assert_array_equal(out, rounded_bf16(values))
    assert fine == bool(((out & 0x7FFF) < 0x7F80).all())


def test_narrowing_to_float16_rounds_as_numpy_does() -> None:
    values = numbers(3, 1 << 18)
    values = values[~np.isnan(values)]
    out = np.empty(values.size, np.uint16)
    fine = _native.narrow(F16, values, out)
    with np.errstate(over="ignore", under="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(out, expected)
    assert fine == bool(((out & 0x7FFF) < 0x7C00).all())


@pytest.mark.parametrize("kind", [BF16, F16, F32])
def test_narrowing_says_what_is_not_finite(kind: int) -> None:
    largest = {BF16: 3.3895e38, F16: 65504.0, F32: 3.4e38}[kind]
    values = np.random.default_rng(4).uniform(-largest, largest, 77).astype(np.float32)
    out = np.empty(77, np.float32 if kind == F32 else np.uint16)
    assert _native.narrow(kind, values, out)
    too_large = {BF16: 3.4e38, F16: 65520.0, F32: np.inf}[kind]
    for place in (0, 31, 64, 76):
        for wrong in (too_large, -too_large, np.inf, np.nan):
            damaged = values.copy()
            damaged[place] = wrong
            assert not _native.narrow(kind, damaged, out)


def test_arrays_that_do_not_fit_are_refused() -> None:
    out = np.empty(8, np.float32)
    with pytest.raises(ValueError, match="as many stored values"):
        _native.widen(BF16, np.zeros(7, np.uint16), out)
    with pytest.raises(ValueError, match="no known type"):
        _native.widen(3, np.zeros(8, np.uint16), out)
    with pytest.raises(TypeError):
        _native.widen(BF16, np.zeros(16, np.uint16)[::2], out)
    out.flags.writeable = False
    with pytest.raises(TypeError):
        _native.widen(BF16, np.zeros(8, np.uint16), out)
