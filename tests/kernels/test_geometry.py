"""Inner products against NumPy, added in the documented order: the same bits."""

import itertools

import numpy as np
import pytest

from sigmerge.kernels import LANES, geometry
from sigmerge.kernels.stored import members
from tests.kernels.test_stored import KINDS, make, spoil

TILE = 700
"""Not a multiple of the strips, so that each tile ends inside one."""


def in_lanes(products: np.ndarray) -> float:
    """Coordinate j goes to lane j mod LANES, in order; then the lanes are added from 0 up."""
    padded = np.concatenate([products, np.zeros(-products.size % LANES)])
    lanes = np.add.accumulate(padded.reshape(-1, LANES), axis=0)[-1]
    return float(np.add.accumulate(lanes)[-1])


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, repeat=1), KINDS])
def test_products_have_one_order_of_addition(kinds, count, vectors):
    made = [make(kinds[d % len(kinds)], d) for d in range(count + vectors)]
    dots = np.zeros((count, count))
    given = members([raw for raw, _ in made])
    assert geometry.gram(*given, 0, made[0][1].size, vectors, TILE, dots)
    rows = [wide - made[-1][1] if vectors else wide for _, wide in made[:count]]
    for a, b in itertools.product(range(count), repeat=2):
        exact = rows[a].astype(np.float64) * rows[b].astype(np.float64)
        assert dots[a, b] == sum(in_lanes(exact[i : i + TILE]) for i in range(0, exact.size, TILE))


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_reported(kind, vectors, value):
    rows = [make(kind, d)[0] for d in range(2 + vectors)]
    for member in range(len(rows)):
        spoiled = [spoil(row, kind, value) if d == member else row for d, row in enumerate(rows)]
        dots = np.zeros((2, 2))
        assert not geometry.gram(*members(spoiled), 0, rows[0].size, vectors, TILE, dots)
