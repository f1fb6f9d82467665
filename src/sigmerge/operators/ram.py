"""Reinforced Agent Merging: keep alone what one expert changed, average what several did.

RAM and its tensor-local RAM+ (arXiv:2601.13572).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from sigmerge.core import Array, coordinates
from sigmerge.operators.base import (
    OUTSIDE,
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
    Tile,
    add,
)

UNCHANGED = Parameter("epsilon", float, "entries up to this do not count as changed", 1e-5, 1e-5)


class Ram(Operator):
    """θ = θ_ref + τ: at a coordinate the entry of its only expert, or the mean of those changed."""

    name = "ram"
    title = "RAM"
    paper = "Reinforced Agent Merging, 2026 (arXiv:2601.13572)"
    parameters: tuple[Parameter, ...] = (UNCHANGED, OUTSIDE)

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        epsilon = float(chunk.site.settings["epsilon"])
        factors = chunk.state
        if factors is None:
            factors = np.ones(len(chunk.site.experts), np.float32)
        for tile in chunk.tiles("reference"):
            coordinates.reinforce(tile.experts, epsilon, factors, tile.out)
            yield tile


class RamPlus(Ram):
    """RAM whose unshared entries grow by 1 + r · min(shared / unshared, alpha), per tensor."""

    name = "ramplus_tl"
    title = "RAM+ (tensor-local)"
    parameters = (
        Parameter("r", float, "how much unshared entries grow", 0.1, 0.1),
        Parameter("alpha", float, "bound of shared / unshared", 0.2, 0.2),
        UNCHANGED,
        OUTSIDE,
    )

    def prepare(self, site: Site, survey: Any) -> Passes:
        epsilon = float(site.settings["epsilon"])
        alone, shared = yield Pass(partial(_counts, epsilon=epsilon), add)
        least = epsilon if epsilon > 0 else 1  # where nothing stands alone, nothing grows
        ratio = np.clip(shared / np.maximum(alone, least), 0, site.settings["alpha"])
        return (1 + site.settings["r"] * ratio).astype(np.float32)


def _counts(chunk: Chunk, epsilon: float) -> Array:
    counts = np.zeros((2, len(chunk.site.experts)), np.int64)
    for tile in chunk.tiles("reference"):
        coordinates.count_changes(tile.experts, epsilon, counts[0], counts[1])
    return counts
