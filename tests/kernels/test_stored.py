"""Values read by address, in every stored type, against NumPy."""

import itertools

import numpy as np
import pytest

from sigmerge.kernels import convert, stored

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


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)))
@pytest.mark.parametrize("begin", [0, 13])
def test_differences_are_those_of_float32(kinds, begin):
    (raw, wide), (base, wide_base) = make(kinds[0], 0), make(kinds[1], 1)
    (a, b), (ka, kb), _ = stored.members([raw, base])
    out, room = np.empty(SIZE - begin, np.float32), np.empty(SIZE, np.float32)
    assert stored.load(a, ka, begin, out)
    assert np.array_equal(out, wide[begin:])
    assert stored.load_less(a, ka, begin, wide_base[begin:], out)
    assert np.array_equal(out, (wide - wide_base)[begin:])
    out[:] = 0
    assert stored.load_difference(a, ka, b, kb, begin, room, out)
    assert np.array_equal(out, (wide - wide_base)[begin:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_reported(kind, value):
    raw, wide = make(kind, 0)
    bad = spoil(raw, kind, value)
    (good_at, bad_at), (code, _), _ = stored.members([raw, bad])
    out, room = np.empty(SIZE, np.float32), np.empty(SIZE, np.float32)
    assert stored.is_finite(raw) and not stored.is_finite(bad)
    assert not stored.load(bad_at, code, 0, out)
    assert not stored.load_less(bad_at, code, 0, wide, out)
    assert not stored.load_difference(bad_at, code, good_at, code, 0, room, out)
    assert not stored.load_difference(good_at, code, bad_at, code, 0, room, out)
    assert stored.load(bad_at, code, 8, out[8:])


@pytest.mark.parametrize("kind", KINDS)
def test_saving_undoes_loading(kind):
    raw, wide = make(kind, 0)
    out = np.zeros_like(raw)
    address, code = np.uint64(stored.address_of(out)), stored.CODE[out.dtype]
    assert stored.save(wide[5:], address, code, 5)
    assert np.array_equal(out[5:], raw[5:]) and not out[:5].any()
    wide[9] = np.inf
    assert not stored.save(wide, address, code, 0)


@pytest.mark.parametrize("minus", [True, False])
def test_rows(minus):
    rows = [make(kind, i) for i, kind in enumerate(KINDS)]
    table = stored.table([raw[50:] for raw, _ in rows])
    out = np.empty((2, 900), np.float32)
    assert stored.load_rows(table[:2], table[2 : 2 + minus], out)
    for got, (_, wide) in zip(out, rows, strict=False):
        assert np.array_equal(got, (wide - rows[2][1] if minus else wide)[50:950])


def test_gaps_between_values_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        stored.table([np.zeros(10, np.float32)[::2]])
