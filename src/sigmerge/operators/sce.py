"""SCE: select where experts differ, weigh by their energy, erase minorities (Wan et al., 2024)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sigmerge.core import Array, coordinates, select
from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula
from sigmerge.operators.base import (
    INT8_MASK,
    OUTSIDE,
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
    add,
)
from sigmerge.operators.ties import KEEP_NONE, UNCUT


class Sce(Operator):
    """θ = θ_ref + τ.

    Select: the coordinates of a tensor at which the task vectors vary most. Calculate: an expert's
    weight is the mean square of what it has there. Erase: entries against the sign of their sum.
    """

    name = "sce"
    title = "SCE"
    thins_on_gpu = False
    paper = "Wan et al., FuseChat: knowledge fusion of chat models, 2024 (arXiv:2408.07990)"
    parameters = (
        Parameter("select_topk", float, "share of the varying coordinates that stay", 1.0, 1.0),
        INT8_MASK,
        OUTSIDE,
    )

    def prepare(self, site: Site, survey: Any) -> Passes:
        cuts = yield from _find_cut(site, float(site.settings["select_topk"]))
        squares = yield Pass(lambda chunk: _squares(chunk, cuts), add)
        means = squares / max(site.size, 1)
        even = abs(means.sum()) < 1e-6
        weights = np.full(means.size, 1 / means.size) if even else means / means.sum()
        return cuts, weights.astype(np.float32)

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        cuts, weights = chunk.state
        cut = np.tile(np.array(_cut_of(cuts, chunk), np.int64), (len(weights), 1))
        return loops.formula(weights, thin=loops.SELECT, cuts=cut, combine=loops.AGREEING)


Cuts = dict[int, select.Cut] | None
"""The cut of every chunk, by its start; None if all coordinates stay."""


def _find_cut(site: Site, share: float) -> Passes:
    """Where the top of the variances ends: ⌊share · those not zero⌋, the lowest index first."""
    if share >= 1:
        return None
    high = yield Pass(lambda chunk: _count(chunk, -1, select.HIGH_BINS + 1), add)
    rank = int(np.float32(site.size - int(high[-1])) * np.float32(share))
    if rank <= 0:
        return {}
    upper, left = select.bin_of_rank(high[:-1], rank)
    parts = yield Pass(lambda chunk: (chunk.start, _count(chunk, upper, select.LOW_BINS)))
    lower, ties = select.bin_of_rank(sum(counts for _, counts in parts), left)
    cuts = {}
    for start, counts in parts:
        cuts[start] = select.Cut(upper << select.LOW_BITS | lower, max(0, ties))
        ties -= int(counts[lower])
    return cuts


def _count(chunk: Chunk, upper: int, places: int) -> Array:
    """Variances by the upper 16 bits of their patterns, or the lower 15 of those with `upper`."""
    counts = np.zeros(places, np.int64)
    chunk.read(coordinates.count_variances, upper, counts)
    return counts


def _squares(chunk: Chunk, cuts: Cuts) -> Array:
    """Σ Δ² of every expert over the selected coordinates."""
    total = np.zeros(len(chunk.site.experts))
    chunk.read(coordinates.squares_of_varying, *_cut_of(cuts, chunk), chunk.step, total)
    return total


def _cut_of(cuts: Cuts, chunk: Chunk) -> select.Cut:
    return UNCUT if cuts is None else cuts.get(chunk.start, KEEP_NONE)
