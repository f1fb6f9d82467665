"""Values read by address, in every stored type, against NumPy."""

import numpy as np
import pytest

from sigmerge.kernels import convert, dtypes

SIZE = 1000
KINDS = ("BF16", "F16", "F32")


def make(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Values as stored, and as float32."""
    values = np.random.default_rng(seed).normal(0, 0.02, SIZE).astype(np.float32)
    raw, wide = np.empty(SIZE, convert.STORAGE[kind]), np.empty(SIZE, np.float32)
    assert convert.NARROW[kind](values, raw)
    assert convert.WIDEN[kind](raw, wide)
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
