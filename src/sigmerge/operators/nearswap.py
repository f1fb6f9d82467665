"""NearSwap: take the other model's value where it is near the base's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sigmerge.core import coordinates
from sigmerge.operators.base import OUTSIDE, Chunk, Operator, Parameter, Tile


class NearSwap(Operator):
    """θ = w θ_1 + (1 − w) θ_ref, w = min(1, t / |θ_ref − θ_1|): at most a step of t."""

    name = "nearswap"
    title = "NearSwap"
    paper = "alchemonaut, QuartetAnemoi-70B-t0.0001 (model card), 2024"
    gives_vector = False
    most = 1
    parameters = (
        Parameter("t", float, "how far a value may move", None, None),
        OUTSIDE,
    )

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        for tile in chunk.tiles(reference=True):
            t = float(chunk.site.settings["t"])
            coordinates.swap_near(tile.experts[0], tile.experts[1], t, tile.out)
            yield tile
