import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.kernels import select

NASTY = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.0, -1.0, 1.0000001, 2.0**-13, -(2.0**-13), 3e38]


def cut_of(tiles: list[np.ndarray], k: int) -> select.Cut:
    high = np.zeros(select.HIGH_BINS, np.int64)
    for tile in tiles:
        select.count_high(tile, high)
    upper, rank = select.bin_of_rank(high, k)
    low = np.zeros(select.LOW_BINS, np.int64)
    for tile in tiles:
        select.count_low(tile, upper, low)
    lower, ties = select.bin_of_rank(low, rank)
    return select.Cut(select.threshold_of(upper, lower), ties)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(
        st.sampled_from(NASTY) | st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=1,
        max_size=60,
    ),
    data=st.data(),
)
def test_cut_is_that_of_a_sort(values, data):
    array = np.array(values, np.float32)
    k = data.draw(st.integers(1, array.size))
    split = data.draw(st.integers(0, array.size))
    cut = cut_of([array[:split], array[split:]], k)
    magnitude = np.sort(np.abs(array.astype(np.float64)))[::-1]
    threshold = np.uint32(cut.threshold).view(np.float32)
    assert threshold == magnitude[k - 1]
    assert cut.ties == k - int(np.sum(magnitude > magnitude[k - 1]))


@pytest.mark.parametrize("k", [1, 1000, 30_000, 65_536])
def test_a_tile_with_massive_ties(k):
    rng = np.random.default_rng(0)
    values = (rng.integers(-6, 7, 1 << 16) * 2.0**-13).astype(np.float32)
    cut = cut_of([values], k)
    magnitude = np.abs(values)
    threshold = np.uint32(cut.threshold).view(np.float32)
    assert np.sum(magnitude > threshold) + cut.ties == k
    assert 1 <= cut.ties <= np.sum(magnitude == threshold)
