"""LiNeS: scale a merged task vector linearly with depth (Wang et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sigmerge.core import Array
from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula, scale
from sigmerge.operators.base import (
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
    Statistics,
    Tile,
    add,
)


class LinesSurvey(NamedTuple):
    inner: Any
    alpha: float


class Lines(Operator):
    """θ = θ_ref + (α + β (ℓ−1)/(L−1)) · τ, τ the merged task vector of another operator.

    Tensors outside the blocks get α. `alpha: auto` is the authors' (1/K) ‖Σ_d Δ_d‖₁ / ‖τ‖₁.
    """

    name = "lines"
    title = "LiNeS"
    paper = "Wang et al., LiNeS: post-training layer scaling, ICLR 2025 (arXiv:2410.17146)"

    def __init__(self, inner: Operator) -> None:
        self.inner = inner
        self.needs, self.solves = inner.needs, inner.solves
        self.revision = inner.revision
        self.parameters = (
            Parameter(
                "alpha",
                float,
                "factor of the first block and of all tensors outside; auto: (1/K)‖Σ Δ‖₁/‖τ‖₁",
                "auto",
                "auto",
                auto=True,
            ),
            Parameter("beta", float, "what the last block gets on top of alpha", 0.5, 0.5),
            *inner.parameters,
        )

    def with_parameters(self, given: Mapping[str, Any]) -> Operator:
        return Lines(self.inner.with_parameters(given))

    def check(self, sites: Sequence[Site]) -> list[str]:
        alphas = {site.settings["alpha"] for site in sites}
        several = ["alpha must be the same for every tensor"] if len(alphas) > 1 else []
        if "auto" in alphas and len({len(site.experts) for site in sites}) > 1:
            several.append("alpha: auto takes as many experts for every tensor; give a number")
        return several + self.inner.check(sites)

    def check_statistics(self, sites: Sequence[Site], statistics: Statistics) -> list[str]:
        return self.inner.check_statistics(sites, statistics)

    def granule(self, site: Site) -> int:
        return self.inner.granule(site)

    def scratch(self, site: Site) -> int:
        return self.inner.scratch(site)

    def survey(self, sites: Sequence[Site]) -> Passes:
        inner = yield from self.inner.survey(sites)
        alpha = sites[0].settings["alpha"] if sites else 0.0
        if alpha != "auto":
            return LinesSurvey(inner, alpha)
        plain, merged = yield Pass(
            lambda chunk: self._norms(chunk, inner),
            add,
            lambda site: self.inner.prepare(site, inner),
        )
        experts = len(sites[0].experts)
        return LinesSurvey(inner, plain / merged / experts if merged > 0 else 1.0 / experts)

    def prepare(self, site: Site, survey: LinesSurvey) -> Passes:
        return (yield from self.inner.prepare(site, survey.inner))

    def formula(self, chunk: Chunk, survey: LinesSurvey) -> Formula | None:
        vector = self._vector(chunk, survey.inner)
        return vector and vector.times(depth_factor(chunk.site, survey.alpha))

    def merge(self, chunk: Chunk, survey: LinesSurvey) -> Iterator[Tile]:
        factor = depth_factor(chunk.site, survey.alpha)
        for tile in self._vectors(chunk, survey.inner):
            scale(tile.out, 1.0, factor)
            yield tile

    def _vector(self, chunk: Chunk, inner: Any) -> Formula | None:
        """τ of an operator that has a formula."""
        formula = self.inner.formula(chunk, inner)
        if formula is None or self.inner.gives_vector:
            return formula
        return formula.plus_reference(-1.0)

    def _vectors(self, chunk: Chunk, inner: Any) -> Iterator[Tile]:
        """τ of an operator that has none, tile by tile."""
        for tile in self.inner.merge(chunk, inner):
            if not self.inner.gives_vector:
                chunk.add_reference(tile, -1.0)
            yield tile

    def _norms(self, chunk: Chunk, inner: Any) -> Array:
        """ℓ1 norms of the plain sum of task vectors and of the merged one."""
        ones = np.ones(len(chunk.site.experts), np.float32)
        plain = chunk.norm(loops.formula(ones), chunk.step)
        vector = self._vector(chunk, inner)
        if vector is not None:
            # The order of addition is part of the result: plain sums have the longer tiles.
            longer = 4 if vector.thin == loops.KEEP_ALL else 1
            return np.array([plain, chunk.norm(vector, longer * chunk.step)])
        return np.array([plain, sum(loops.norm(t.out) for t in self._vectors(chunk, inner))])


def depth_factor(site: Site, alpha: float) -> float:
    """λ_ℓ = α + β (ℓ−1)/(L−1); α alone outside the blocks or with a single block."""
    if site.block is None or site.depth < 2:
        return alpha
    return alpha + float(site.settings["beta"]) * site.block / (site.depth - 1)
