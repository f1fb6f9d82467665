"""Arcee Fusion: take over the changes that matter most, by size and by what they do to a row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sigmerge.core import Array, coordinates, select
from sigmerge.operators.base import (
    OUTSIDE,
    Chunk,
    Operator,
    Pass,
    Passes,
    Site,
    Tile,
    add,
)


class Fused(NamedTuple):
    """What is known about a tensor: the divergence of every row, and the least score taken."""

    divergences: Array
    least: np.float32


class ArceeFusion(Operator):
    """θ = θ_1 where |Δ| · KL(softmax of the row of θ_1 ‖ that of θ_ref) reaches a threshold.

    It is the median plus 1.5 times the quartiles' distance, of the tensor's scores. Divergences are
    float64 and quartiles exact; mergekit computes in the dtype, where rounding hides divergences of
    small changes, and draws a sample of a million scores.
    """

    name = "arcee_fusion"
    title = "Arcee Fusion"
    paper = "Arcee AI, Arcee Fusion (arcee.ai), 2025"
    most = 1
    parameters = (OUTSIDE,)

    def granule(self, site: Site) -> int:
        return site.shape[-1] if site.shape else 1

    def prepare(self, site: Site, survey: Any) -> Passes:
        parts = yield Pass(_divergences)
        each = np.concatenate(parts)
        high = yield Pass(partial(_count, divergences=each, uppers=(-1,)), add)
        ranks = [(site.size - 1) * quarter // 4 + 1 for quarter in (1, 2, 3)]
        places = [_place(high[0], rank) for rank in ranks]
        uppers = tuple(upper for upper, _ in places)
        low = yield Pass(partial(_count, divergences=each, uppers=uppers), add)
        first, median, third = (
            coordinates.key_value(upper << 16 | _place(counts, left)[0])
            for (upper, left), counts in zip(places, low, strict=True)
        )
        return Fused(each, np.float32(median + np.float32(1.5) * (third - first)))

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        scores = np.empty(chunk.step, np.float32)
        for tile in chunk.tiles("reference"):
            here = scores[: tile.out.size]
            _score(chunk, tile, chunk.state.divergences, here)
            coordinates.keep_from(tile.experts[0], here, chunk.state.least, tile.out)
            yield tile


def _length(site: Site) -> int:
    return site.shape[-1] if site.shape else 1


def _divergences(chunk: Chunk) -> Array:
    """Of every row of a chunk."""
    length = _length(chunk.site)
    found = []
    for tile in chunk.tiles(reference=True):
        each = np.empty(tile.out.size // length)
        coordinates.divergences(tile.experts[0], tile.experts[1], length, each)
        found.append(each)
    return np.concatenate(found)


def _score(chunk: Chunk, tile: Tile, divergences: Array, out: Array) -> None:
    """|Δ| times its row's divergence."""
    length = _length(chunk.site)
    rows = divergences[tile.start // length :][: tile.out.size // length]
    coordinates.scale_rows(tile.experts[0], length, rows, out)


def _count(chunk: Chunk, divergences: Array, uppers: tuple[int, ...]) -> Array:
    """Scores by the upper half of their keys, or by the lower half of those with each of these."""
    counts = np.zeros((len(uppers), select.HIGH_BINS), np.int64)
    for tile in chunk.tiles("reference"):
        _score(chunk, tile, divergences, tile.out)
        for row, upper in enumerate(uppers):
            coordinates.count_keys(tile.out, upper, counts[row])
    return counts


def _place(counts: Array, rank: int) -> tuple[int, int]:
    """The bin of the rank-th smallest entry (from 1), and its rank inside."""
    upto = np.cumsum(counts)
    place = int(np.searchsorted(upto, rank))
    return place, rank - (int(upto[place - 1]) if place else 0)
