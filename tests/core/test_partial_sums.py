"""Sums by part have the order of a loop over the tiles."""

from __future__ import annotations

import numpy as np
import pytest

from sigmerge.core.partial_sums import PartSums


@pytest.mark.parametrize("runs", [(17,), (1,) * 17, (7, 4, 6), (3, 14)])
def test_tiles_are_added_in_order_to_the_parts_where_they_lie(runs: tuple[int, ...]) -> None:
    """Parts of five tiles of ten coordinates, in runs that end within parts and at their ends."""
    tiles = np.random.default_rng(0).normal(size=(17, 2, 3)) ** 9
    expected = np.zeros((4, 2, 3))
    for number, tile in enumerate(tiles):
        expected[number // 5] += tile
    backwards = np.stack([tiles[at : at + 5][::-1].sum(0) for at in range(0, 17, 5)])
    assert (expected != backwards).any()
    found, at = PartSums(np.zeros((4, 2, 3)), 50), 0
    for count in runs:
        found._replace(begin=10 * at).add(tiles[at : at + count], 10)
        at += count
    assert found.sums.tobytes() == expected.tobytes()
