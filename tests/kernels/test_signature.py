import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.kernels import signature as kernels
from sigmerge.kernels.stored import members
from tests.oracles import oracle_conflict

LANES = 64


def signature(deltas):
    return signature_of_tiles(deltas, max(1, deltas.shape[1]))


def signature_of_tiles(deltas, tile):
    """Experts whose task vectors are these, and a reference of zeros."""
    rows = [*np.ascontiguousarray(deltas, np.float32), np.zeros(deltas.shape[1], np.float32)]
    dots, mass = np.zeros((len(deltas), len(deltas))), np.zeros(2)
    assert kernels.signature(*members(rows), 0, deltas.shape[1], tile, dots, mass)
    return dots, mass


def in_lanes(terms):
    """The documented order of addition: lane j mod 64 in increasing j, then the lanes in order."""
    padded = np.zeros(-(-terms.size // LANES) * LANES)
    padded[: terms.size] = terms
    total = 0.0
    for lane in padded.reshape(-1, LANES).T:
        partial = 0.0
        for term in lane:
            partial += term
        total += partial
    return total


@pytest.mark.parametrize("experts", [1, 2, 5, 20])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 511, 512, 513, 1500])
def test_bits_follow_the_documented_order_of_addition(experts, size):
    rng = np.random.default_rng(size * 31 + experts)
    deltas = (rng.standard_normal((experts, size)) * 10.0 ** rng.integers(-6, 3, size)).astype(
        np.float32
    )
    dots, mass = signature(deltas)
    wide = deltas.astype(np.float64)
    for a in range(experts):
        for b in range(experts):
            assert dots[a, b] == in_lanes(wide[a] * wide[b])
    largest = np.abs(wide).max(axis=0)
    opposed = (wide > 0).any(axis=0) & (wide < 0).any(axis=0)
    assert mass[0] == in_lanes(np.where(opposed, largest, 0.0))
    assert mass[1] == in_lanes(largest)


@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.integers(1, 6),
    size=st.integers(1, 700),
    zeros=st.floats(0, 1),
)
@settings(deadline=None, max_examples=40)
def test_whole_numbers_give_exact_sums(seed, experts, size, zeros):
    rng = np.random.default_rng(seed)
    whole = rng.integers(-9, 10, (experts, size)) * (rng.random((experts, size)) >= zeros)
    dots, mass = signature(whole.astype(np.float32))
    assert np.array_equal(dots, whole @ whole.T)
    assert tuple(mass) == oracle_conflict.masses(whole)


def test_zeros_of_either_sign_never_conflict():
    deltas = np.array([[1, -1, 0.0, -0.0, 1], [0.0, -0.0, -0.0, 0.0, -2]], dtype=np.float32)
    _, mass = signature(deltas)
    assert tuple(mass) == (2.0, 4.0)


def test_denormals_are_counted():
    tiny = np.float32(1e-45)
    dots, mass = signature(np.array([[tiny], [-tiny]], dtype=np.float32))
    exact = float(tiny)
    assert dots[0, 1] == -exact * exact != 0.0
    assert tuple(mass) == (exact, exact)


def test_tiles_are_added_one_after_the_other():
    rng = np.random.default_rng(7)
    first, second = rng.standard_normal((2, 3, 1000)).astype(np.float32)
    dots, mass = signature_of_tiles(np.concatenate([first, second], axis=1), 1000)
    (dots1, mass1), (dots2, mass2) = signature(first), signature(second)
    assert np.array_equal(dots, dots1 + dots2)
    assert np.array_equal(mass, mass1 + mass2)
