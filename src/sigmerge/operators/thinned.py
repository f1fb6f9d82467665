"""Operators that thin every task vector out, tensor by tensor, and combine what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels import merge as kernels
from sigmerge.operators.base import (
    ELECT,
    INT8_MASK,
    LAMBDA,
    OUTSIDE,
    WEIGHT,
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
    Tile,
    add,
)
from sigmerge.operators.task_arithmetic import scaling

Thin = Callable[[Tile], None]
"""Zeroes what the experts' rows of a chunk's tiles lose; called tile by tile, in order."""


class Prepared(NamedTuple):
    """What is known about a tensor: what `thinner` needs, and a factor for every expert."""

    found: Any
    factors: Array


class Thinned(Operator):
    """θ = θ_ref + λ Σ_d w_d thin(Δ_d), or with `elects` the disjoint merge of TIES.

    With `rescale: l1` a thinned tensor keeps the ℓ1 norm that it had.
    """

    elects: bool = False

    def find(self, site: Site, survey: Any) -> Passes:
        """What must be known about a tensor before it is thinned out."""
        return None
        yield

    def thinner(self, chunk: Chunk, found: Any) -> Thin:
        """How the tiles of a chunk are thinned out."""
        raise NotImplementedError

    def prepare(self, site: Site, survey: Any) -> Passes:
        found = yield from self.find(site, survey)
        factors = np.ones(len(site.experts), np.float32)
        if site.settings["rescale"] == "l1":
            before, after = yield Pass(lambda chunk: self._norms(chunk, found), add)
            matched = (before >= 1e-7) & (after >= 1e-7)
            factors[:] = np.where(matched, before / np.where(matched, after, 1.0), 1.0)
        return Prepared(found, factors)

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        found, factors = chunk.state
        thin, room = self.thinner(chunk, found), np.empty((2, chunk.step), np.float32)
        for tile in chunk.tiles("reference"):
            thin(tile)
            for row, factor in zip(tile.experts, factors, strict=True):
                kernels.scale(row, 1.0, float(factor))
            self._combine(chunk.site, tile, room[:, : tile.out.size])
            yield tile

    def _combine(self, site: Site, tile: Tile, room: Array) -> None:
        settings = site.settings
        if not self.elects:
            how = scaling(site)
            kernels.weighted_sum(tile.experts, site.weights(), tile.out)
            kernels.scale(tile.out, how["divisor"], how["factor"])
            return
        weighted, averaged = settings["elect"] == "weighted", bool(settings["normalize"])
        kernels.disjoint(
            tile.experts, site.weights(), weighted, averaged, 1.0, tile.out, room[0], room[1]
        )
        kernels.scale(tile.out, 1.0, float(settings["lambda"]))

    def _norms(self, chunk: Chunk, found: Any) -> Array:
        """ℓ1 norms before and after thinning, per expert."""
        norms, thin = np.zeros((2, len(chunk.site.experts))), self.thinner(chunk, found)
        for tile in chunk.tiles("reference"):
            norms[0] += [kernels.norm(row) for row in tile.experts]
            thin(tile)
            norms[1] += [kernels.norm(row) for row in tile.experts]
        return norms


def family(normalize: bool, elects: bool, *own: Parameter) -> tuple[Parameter, ...]:
    """The parameters that all have, around an operator's own."""
    what = "average the agreeing entries (else sum)" if elects else "divide by the sum of weights"
    return (
        WEIGHT,
        *own,
        *([ELECT] if elects else []),
        Parameter("normalize", bool, what, normalize, normalize),
        LAMBDA,
        OUTSIDE,
        INT8_MASK,
    )
