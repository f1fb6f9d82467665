import numpy as np
import pytest

from sigmerge.kernels import claim, select

SIZES = [1, 2, 63, 64, 65, 1000, claim.STRIP + 1, 3 * claim.STRIP - 1]


def tile(size: int, seed: int = 0) -> np.ndarray:
    """Few distinct values, zeros of both signs and denormals, as differences of bfloat16 give."""
    rng = np.random.default_rng(seed)
    values = (rng.integers(-5, 6, size) * 2.0**-13).astype(np.float32)
    rare = rng.random(size)
    values[rare < 0.1] = -0.0
    values[rare > 0.95] = 1e-42
    return values


def owners(size: int, seed: int = 1) -> np.ndarray:
    codes = np.array([0, 1, claim.ABOVE, claim.TIED, claim.FREE], np.uint8)
    return np.random.default_rng(seed).choice(codes, size)


def zeros(score: np.ndarray) -> np.ndarray:
    """A reference that leaves the expert's values as the task vector."""
    return np.zeros_like(score)


def pattern(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize("size", SIZES)
def test_histograms_count_free_coordinates_only(size):
    score, owner = tile(size), owners(size)
    free = score[owner >= claim.ABOVE]
    for high in (0, pattern(2.0**-13) >> select.LOW_BITS):
        counted = np.zeros(select.HIGH_BINS, np.int64), np.zeros(select.LOW_BINS, np.int64)
        expected = np.zeros(select.HIGH_BINS, np.int64), np.zeros(select.LOW_BINS, np.int64)
        claim.count_high(score, zeros(score), owner, counted[0], 1)
        claim.count_low(score, zeros(score), owner, counted[1], 1, high)
        select.count_high(free, expected[0])
        select.count_low(free, high, expected[1])
        assert np.array_equal(counted[0], expected[0])
        assert np.array_equal(counted[1], expected[1])


def test_a_sample_counts_one_strip_in_so_many():
    strip = claim.STRIP
    score, owner = tile(7 * strip - 9), owners(7 * strip - 9)
    seen = np.zeros(score.size, bool)
    for first in (0, 3, 6):
        seen[first * strip : (first + 1) * strip] = True
    counted, expected = np.zeros((2, select.HIGH_BINS), np.int64)
    claim.count_high(score, zeros(score), owner, counted, 3)
    select.count_high(score[seen & (owner >= claim.ABOVE)], expected)
    assert np.array_equal(counted, expected)


def test_random_bits_are_taken_as_they_are():
    """Also those that as a float32 are not a number."""
    draws = np.array([0x7FC00001, 0xFFFFFFFF, 0x7F800001, 5, 0], np.uint32)
    out = np.empty(5, np.float32)
    assert claim.score(draws.view(np.float32), np.empty(0, np.float32), out)
    assert out.view(np.uint32).tolist() == draws.tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 1e-42, 2.0**-13, 1.0])
def test_mark(size, threshold):
    score, owner = tile(size), owners(size)
    before = owner.copy()
    above, tied, mass, finite = claim.mark(score, zeros(score), owner, pattern(threshold))
    assert finite
    free, magnitude = before >= claim.ABOVE, np.abs(score)
    is_above = free & (magnitude > np.float32(threshold))
    is_tied = free & (magnitude == np.float32(threshold))
    assert np.array_equal(owner == claim.ABOVE, is_above)
    assert np.array_equal(owner == claim.TIED, is_tied)
    assert np.array_equal(owner == claim.FREE, free & ~is_above & ~is_tied)
    assert np.array_equal(owner[~free], before[~free])
    assert (above, tied) == (is_above.sum(), is_tied.sum())
    assert mass == pytest.approx(magnitude[is_above].astype(np.float64).sum(), rel=1e-15)


def test_mass_is_added_in_lanes():
    """Sixty-four float64 lanes, then lane by lane: the order is part of the result."""
    score = np.random.default_rng(0).lognormal(0, 20, 1000).astype(np.float32)
    _, _, mass, _ = claim.mark(score, zeros(score), np.full(1000, claim.FREE), 0)
    padded = np.concatenate([score, np.zeros(24, np.float32)]).reshape(-1, 64).astype(np.float64)
    lanes = np.zeros(64)
    for row in padded:
        lanes += row
    total = 0.0
    for lane in lanes:
        total += float(lane)
    assert mass == total


@pytest.mark.parametrize("ties", range(5))
def test_settle_admits_the_first_ties(ties):
    a, t, f = claim.ABOVE, claim.TIED, claim.FREE
    owner = np.array([t, 0, a, t, f, t, 1, a, t], np.uint8)
    claim.settle(owner, 7, ties, 4)
    tied = [7] * ties + [255] * (4 - ties)
    assert owner.tolist() == [tied[0], 0, 7, tied[1], 255, tied[2], 1, 7, tied[3]]


@pytest.mark.parametrize("size", SIZES)
def test_tally(size):
    delta, owner = tile(size), owners(size)
    support, mass, finite = claim.tally(delta, zeros(delta), owner, 1)
    assert finite
    assert support == np.count_nonzero(delta[owner == 1])
    assert mass == pytest.approx(np.abs(delta[owner == 1]).astype(np.float64).sum(), rel=1e-15)


@pytest.mark.parametrize("size", SIZES)
def test_add_rounds_product_and_sum_in_float32(size):
    delta, owner = tile(size), owners(size)
    anchor = np.random.default_rng(2).normal(0, 0.02, size).astype(np.float32)
    anchor[0] = -0.0
    values = anchor.copy()
    claim.add(values, owner, 1, delta, zeros(delta), 0.6)
    expected = np.where(owner == 1, anchor + np.float32(0.6) * delta, anchor)
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("size", SIZES)
def test_add_sparse(size):
    delta, owner = tile(size), owners(size)
    draws = np.random.default_rng(3).integers(0, 1 << 32, size, dtype=np.uint32)
    anchor = np.full(size, 0.25, np.float32)
    for below in (0, 1 << 31, 1 << 32):
        values = anchor.copy()
        claim.add_sparse(values, owner, 1, delta, zeros(delta), 6.0, draws, below)
        kept = (owner == 1) & (draws.astype(np.int64) >= below)
        assert np.array_equal(values, np.where(kept, anchor + np.float32(6) * delta, anchor))


def test_replace_takes_the_experts_value_at_scale_one():
    anchor, expert = np.full(2, 1.0, np.float32), np.full(2, 1e-9, np.float32)
    owner = np.array([0, claim.FREE], np.uint8)
    values = anchor.copy()
    claim.replace(values, owner, 0, expert, 1.0)
    assert values.tolist() == [expert[0], anchor[1]]
    values = anchor.copy()
    claim.replace(values, owner, 0, expert, 0.5)
    assert values[0] == anchor[0] + np.float32(0.5) * (expert[0] - anchor[0])
