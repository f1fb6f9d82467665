"""Stored numbers to float32 and back, and values read by address, against NumPy and torch."""

import numpy as np
import pytest
import torch

from sigmerge.core import dtypes

SIZE = 1000
KINDS = ("BF16", "F16", "F32")
EDGES = np.array([65519.99, 65520, 1e-45, -0.0], np.float32)
ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def torch_widen(raw: np.ndarray) -> np.ndarray:
    return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).float().numpy()


def torch_narrow(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def finite_patterns() -> np.ndarray:
    return ALL_PATTERNS[np.isfinite(torch_widen(ALL_PATTERNS))]


def hard_floats() -> np.ndarray:
    """Random bit patterns, every halfway case, and its two neighbours; finite after rounding."""
    rng = np.random.default_rng(0)
    halfway = (finite_patterns().astype(np.uint32) << 16) | 0x8000
    bits = [rng.integers(0, 1 << 32, 200_000, dtype=np.uint32), halfway - 1, halfway, halfway + 1]
    values = np.concatenate(bits).astype(np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    return values[np.isfinite(torch_widen(torch_narrow(values)))]


def test_widen_every_pattern():
    out = np.empty(ALL_PATTERNS.size, np.float32)
    assert not dtypes.WIDEN["BF16"](ALL_PATTERNS, out)
    assert np.array_equal(out.view(np.uint32), torch_widen(ALL_PATTERNS).view(np.uint32))


def test_widen_tells_finite_from_not():
    finite = finite_patterns()
    assert dtypes.WIDEN["BF16"](finite, np.empty(finite.size, np.float32))
    for pattern in np.setdiff1d(ALL_PATTERNS, finite):
        assert not dtypes.WIDEN["BF16"](
            np.array([0, pattern, 0], np.uint16), np.empty(3, np.float32)
        )


def test_narrow_rounds_to_nearest_even():
    values = hard_floats()
    out = np.empty(values.size, np.uint16)
    assert dtypes.NARROW["BF16"](values, out)
    assert np.array_equal(out, torch_narrow(values))


def test_narrow_undoes_widen():
    finite = finite_patterns()
    wide, back = np.empty(finite.size, np.float32), np.empty(finite.size, np.uint16)
    dtypes.WIDEN["BF16"](finite, wide)
    assert dtypes.NARROW["BF16"](wide, back)
    assert np.array_equal(back, finite)


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_narrow_refuses_what_is_not_finite(bits):
    values = np.array([0, bits, 0], np.uint32).view(np.float32)
    assert not dtypes.NARROW["BF16"](values, np.empty(3, np.uint16))


@pytest.mark.parametrize(("kind", "least"), [("BF16", 0x7F7F8000), ("F16", 0x477FF000)])
@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_narrow_refuses_a_number_that_rounds_to_infinity(kind, least, sign):
    """From half a step above the largest number on, and not one pattern before."""
    below, first = np.array([[least - 1], [least]], np.uint32) | np.uint32(sign)
    out = np.empty(1, np.uint16)
    assert dtypes.NARROW[kind](below.view(np.float32), out)
    assert not dtypes.NARROW[kind](first.view(np.float32), out)
    largest = np.array([0x7F7FFFFF], np.uint32).view(np.float32)
    assert not dtypes.NARROW[kind](largest, out)


def test_float16_is_numpys():
    """Every pattern, every halfway case with its neighbours, and random bits."""
    wide, numpys = np.empty(1 << 16, np.float32), ALL_PATTERNS.view(np.float16).astype(np.float32)
    assert not dtypes.WIDEN["F16"](ALL_PATTERNS, wide)
    assert np.array_equal(wide, numpys, equal_nan=True)
    finite = np.unique(numpys[np.isfinite(numpys)])
    halfway = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    some = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    sides = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
    values = np.concatenate([some, finite, halfway, *sides, EDGES])
    values = values[~np.isnan(values)]
    out = np.empty(values.size, np.uint16)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert dtypes.NARROW["F16"](values, out) == np.isfinite(expected).all()
    assert np.array_equal(out, expected.view(np.uint16))
    assert not dtypes.NARROW["F16"](np.array([np.nan], np.float32), out[:1])
    assert np.isnan(out[:1].view(np.float16))


@pytest.mark.parametrize("name", ["BF16", "F16", "F32"])
def test_tables_agree(name):
    values = np.array([0.0, -0.0, 1.5, -2.25, 1e-3], np.float32)
    raw, wide = np.empty(5, dtypes.STORAGE[name]), np.empty(5, np.float32)
    assert dtypes.NARROW[name](values, raw)
    assert dtypes.WIDEN[name](raw, wide)
    assert np.allclose(wide, values, rtol=2**-8)
    values[2] = np.inf
    assert not dtypes.NARROW[name](values, raw)
    assert not dtypes.WIDEN[name](raw, wide)


def make(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Values as stored, and as float32."""
    values = np.random.default_rng(seed).normal(0, 0.02, SIZE).astype(np.float32)
    raw, wide = np.empty(SIZE, dtypes.STORAGE[kind]), np.empty(SIZE, np.float32)
    assert dtypes.NARROW[kind](values, raw)
    assert dtypes.WIDEN[kind](raw, wide)
    return raw, wide


def spoil(raw: np.ndarray, kind: str, value: float) -> np.ndarray:
    bad = raw.copy()
    bad[7] = (np.float32(value).view(np.uint32) >> 16) if kind == "BF16" else value
    return bad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_reported(kind, value):
    raw, _ = make(kind, 0)
    bad = spoil(raw, kind, value)
    out = np.empty((1, SIZE), np.float32)
    assert dtypes.is_finite(raw) and not dtypes.is_finite(bad)
    none = dtypes.table([])
    assert dtypes.load_rows(dtypes.table([raw]), none, out)
    assert not dtypes.load_rows(dtypes.table([bad]), none, out)
    assert not dtypes.load_rows(dtypes.table([raw]), dtypes.table([bad]), out)


@pytest.mark.parametrize("minus", [True, False])
def test_rows(minus):
    rows = [make(kind, i) for i, kind in enumerate(KINDS)]
    table = dtypes.table([raw[50:] for raw, _ in rows])
    out = np.empty((2, 900), np.float32)
    assert dtypes.load_rows(table[:2], table[2 : 2 + minus], out)
    for got, (_, wide) in zip(out, rows, strict=False):
        assert np.array_equal(got, (wide - rows[2][1] if minus else wide)[50:950])


def test_gaps_between_values_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        dtypes.table([np.zeros(10, np.float32)[::2]])
