"""Updates of low rank against plain loops in Python, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from sigmerge.core.low_rank import add_low_rank, add_squares, multiply_along

RUNS = [(0, 0), (0, 1), (5, 30), (36, 40), (37, 200), (0, 37 * 9), (36 + 37 * 3, 38)]
"""(first, how many) of a matrix with 37 columns and 9 rows."""


def factors(rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-3, 3, rank)
    left = (rng.standard_normal((9, rank)) * scale).astype(np.float32)
    return left.astype(np.float64), rng.standard_normal((rank, 37)).astype(np.float32).astype(float)


@pytest.mark.parametrize("rank", [1, 3, 4, 5, 8, 33])
@pytest.mark.parametrize(("first", "count"), RUNS)
def test_an_update_is_added_in_the_order_of_the_rank(rank: int, first: int, count: int) -> None:
    left, right = factors(rank)
    before = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    out = before.copy()
    add_low_rank(left, right, 0.37, first, out)
    for i in range(count):
        row, column = divmod(first + i, 37)
        total = 0.0
        for k in range(rank):
            total += left[row, k] * right[k, column]
        assert out[i] == before[i] + np.float32(0.37 * total)


def test_a_wide_row_is_the_same_in_pieces() -> None:
    """A row of more columns than have sums at a time."""
    rng = np.random.default_rng(2)
    left, right = rng.standard_normal((2, 6)), rng.standard_normal((6, 5000))
    left, right = (np.float64(np.float32(one)) for one in (left, right))
    whole = np.zeros(10_000, np.float32)
    add_low_rank(left, right, 1.0, 0, whole)
    pieces = np.zeros(10_000, np.float32)
    for begin in range(0, 10_000, 777):
        add_low_rank(left, right, 1.0, begin, pieces[begin : begin + 777])
    assert whole.tobytes() == pieces.tobytes()
    np.testing.assert_allclose(whole.reshape(2, -1), left @ right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize(("first", "count"), RUNS)
def test_squares_and_factors_of_rows_and_columns(by_row: bool, first: int, count: int) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal(count).astype(np.float32)
    sums, expected = np.ones(9 if by_row else 37), np.ones(9 if by_row else 37)
    add_squares(values, 37, first, by_row, sums)
    multipliers, scaled = rng.standard_normal(sums.size), values.copy()
    multiply_along(scaled, 37, first, by_row, multipliers)
    for i in range(count):
        place = (first + i) // 37 if by_row else (first + i) % 37
        expected[place] += float(values[i]) * float(values[i])
        assert scaled[i] == np.float32(float(values[i]) * multipliers[place])
    assert sums.tobytes() == expected.tobytes()


def test_what_does_not_fit_is_refused() -> None:
    left, right = factors(3)
    with pytest.raises(ValueError, match="a row of the left factor"):
        add_low_rank(left, right, 1.0, 0, np.zeros(9 * 37 + 1, np.float32))
    with pytest.raises(ValueError, match="as many factors"):
        add_low_rank(left[:, :2].copy(), right, 1.0, 0, np.zeros(37, np.float32))
    with pytest.raises(ValueError, match="a sum for each"):
        add_squares(np.zeros(38, np.float32), 37, 0, True, np.zeros(1))
