"""Inner products and signatures against NumPy, added in the documented order: the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sigmerge import _native
from sigmerge.core import LANES
from sigmerge.core.dtypes import BF16, F16, F32
from tests.native.pools import Pool
from tests.oracles import oracle_conflict

TILE = 700
"""Not a multiple of the strips, so that each tile ends inside one."""
SIZES = [1, 63, 64, 65, 511, 512, 513, 2100, 40_000]
KINDS = [[BF16], [F16], [F32], [BF16, F16, F32]]


def in_lanes(terms: np.ndarray) -> float:
    """Coordinate j goes to lane j mod LANES, in order; then the lanes are added from 0 up."""
    padded = np.concatenate([terms, np.zeros(-terms.size % LANES)])
    lanes = np.add.accumulate(padded.reshape(-1, LANES), axis=0)[-1]
    return float(np.add.accumulate(lanes)[-1])


def by_tile(terms: np.ndarray) -> float:
    total = 0.0
    for begin in range(0, terms.size, TILE):
        total += in_lanes(terms[begin : begin + TILE])
    return total


def members(kinds: list[int], count: int, size: int, folder: Path, filed: bool = False) -> Pool:
    some = [kinds[d % len(kinds)] for d in range(count)]
    return Pool(some, size, folder, tuple(range(count)) if filed else (), seed=size + count)


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("filed", [False, True])
def test_inner_products(
    kinds: list[int], count: int, vectors: bool, filed: bool, tmp_path: Path
) -> None:
    pool = members(kinds, count + vectors, 2100, tmp_path, filed)
    dots = np.ones((count, count))  # what was there before stays
    assert _native.gram(pool.table, 2100, vectors, TILE, dots)
    rows = [one - pool.values[-1] if vectors else one for one in pool.values[:count]]
    for a, b in itertools.product(range(count), repeat=2):
        exact = rows[a].astype(np.float64) * rows[b].astype(np.float64)
        expected = 1.0
        for begin in range(0, 2100, TILE):
            expected += in_lanes(exact[begin : begin + TILE])
        assert dots[a, b] == expected


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("kind", [BF16, F16, F32])
@pytest.mark.parametrize("place", [0, 600, 999])
def test_squares_show_what_is_not_finite(
    kind: int, vectors: bool, place: int, tmp_path: Path
) -> None:
    for member in range(2 + vectors):
        for pattern in (0x7F80, 0xFF80, 0x7FC0) if kind == BF16 else (np.inf, -np.inf, np.nan):
            pool = members([kind], 2 + vectors, 1000, tmp_path)
            pool.raw[member][place] = pattern
            assert not _native.gram(pool.table, 1000, vectors, TILE, np.zeros((2, 2)))


@pytest.mark.parametrize("experts", [1, 2, 5, 20])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kinds", KINDS)
def test_signatures(experts: int, size: int, kinds: list[int], tmp_path: Path) -> None:
    pool = members(kinds, experts + 1, size, tmp_path, filed=experts == 2)
    dots, mass = np.zeros((experts, experts)), np.zeros(2)
    assert _native.signature(pool.table, size, TILE, dots, mass)
    wide = np.stack([one - pool.values[-1] for one in pool.values[:-1]]).astype(np.float64)
    for a, b in itertools.product(range(min(experts, 5)), repeat=2):
        assert dots[a, b] == by_tile(wide[a] * wide[b])
    largest = np.abs(wide).max(axis=0)
    opposed = (wide > 0).any(axis=0) & (wide < 0).any(axis=0)
    assert mass.tolist() == [by_tile(np.where(opposed, largest, 0.0)), by_tile(largest)]


@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.integers(1, 6),
    size=st.integers(1, 700),
    zeros=st.floats(0, 1),
)
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whole_numbers_give_exact_sums(seed: int, experts: int, size: int, zeros: float) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.integers(-9, 10, (experts, size)) * (rng.random((experts, size)) >= zeros)
    dots, mass = signature(whole.astype(np.float32))
    assert np.array_equal(dots, whole @ whole.T)
    assert tuple(mass) == oracle_conflict.masses(whole)


def signature(deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of experts whose task vectors are these, and a reference of zeros."""
    rows = np.vstack([deltas, np.zeros_like(deltas[:1])])
    table = np.array([(F32, -1, row.ctypes.data) for row in rows], np.int64)
    dots, mass = np.zeros((len(deltas), len(deltas))), np.zeros(2)
    assert _native.signature(table, deltas.shape[1], max(1, deltas.shape[1]), dots, mass)
    return dots, mass


def test_zeros_of_either_sign_never_conflict() -> None:
    deltas = np.array([[1, -1, 0.0, -0.0, 1], [0.0, -0.0, -0.0, 0.0, -2]], dtype=np.float32)
    assert signature(deltas)[1].tolist() == [2.0, 4.0]


def test_denormals_are_counted() -> None:
    tiny = np.float32(1e-45)
    dots, mass = signature(np.array([[tiny], [-tiny]], dtype=np.float32))
    exact = float(tiny)
    assert dots[0, 1] == -exact * exact != 0.0
    assert mass.tolist() == [exact, exact]


@pytest.mark.parametrize("member", [0, 2])
def test_a_signature_of_what_is_not_finite(member: int, tmp_path: Path) -> None:
    pool = members([F32], 3, 1000, tmp_path)
    pool.raw[member][700] = np.nan
    assert not _native.signature(pool.table, 1000, TILE, np.zeros((2, 2)), np.zeros(2))


@pytest.mark.parametrize("inner", [1, 3, 16])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_along_an_axis(inner: int, rows: int) -> None:
    outer, length = 5, 37
    rng = np.random.default_rng(inner)
    values = rng.standard_normal((rows, outer * length * inner)).astype(np.float32)
    vectors = values.reshape(rows, outer, length, inner).transpose(1, 3, 0, 2)
    vectors = vectors.reshape(outer * inner, rows, length)
    dots = np.full((outer * inner, rows, rows), np.nan)
    _native.grams_along(values, length, inner, dots)
    for found, vector in zip(dots, vectors.astype(np.float64), strict=True):
        for a, b in itertools.product(range(rows), repeat=2):
            assert found[a, b] == np.add.accumulate(vector[a] * vector[b])[-1]
    coefficients = rng.standard_normal((outer * inner, rows)).astype(np.float32)
    out = np.full(values.shape[1], np.nan, np.float32)
    _native.combine_along(values, length, inner, coefficients, out)
    expected = np.zeros((outer * inner, length), np.float32)
    for d in range(rows):
        expected = expected + vectors[:, d] * coefficients[:, d, None]
    expected = expected.reshape(outer, inner, length).transpose(0, 2, 1)
    assert out.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    pool = members([F32], 3, 10, tmp_path)
    with pytest.raises(ValueError, match="a sum for each pair"):
        _native.gram(pool.table, 10, True, TILE, np.zeros((3, 3)))
    with pytest.raises(ValueError, match="whole vectors"):
        _native.grams_along(np.zeros((2, 10), np.float32), 3, 1, np.zeros((3, 2, 2)))
