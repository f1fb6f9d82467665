"""DARE: drop entries at random and rescale the rest (Yu et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sigmerge.kernels import merge as kernels
from sigmerge.kernels.philox import keep_below, key_of
from sigmerge.operators.base import (
    INT8_MASK,
    LAMBDA,
    OUTSIDE,
    WEIGHT,
    Array,
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
    Tile,
    add,
)
from sigmerge.operators.task_arithmetic import plain_sum, task_vectors
from sigmerge.operators.ties import CANCELLED, ELECT, cancelled_sign, disjoint_sum

DENSITY = Parameter("density", float, "probability to keep an entry (1 − p)", 1.0, 0.1, True, 0, 1)
RESCALE = Parameter(
    "rescale",
    ("inverse", "l1", "none"),
    "divide survivors by 1 − p (the paper), or match each tensor's ℓ1 norm (mergekit)",
    "l1",
    "inverse",
)


class DareLinear(Operator):
    """θ = θ_ref + λ Σ_d w_d DARE(Δ_d).

    Draws are keyed by (seed, expert, tensor) and an entry's index: no order of work changes them.
    """

    name = "dare_linear"
    title = "DARE"
    paper = "Yu et al., Language models are super mario, ICML 2024 (arXiv:2311.03099)"
    parameters: tuple[Parameter, ...] = (
        WEIGHT,
        DENSITY,
        RESCALE,
        LAMBDA,
        Parameter("normalize", bool, "divide by the sum of the weights", False, False),
        OUTSIDE,
        INT8_MASK,
    )

    def prepare(self, site: Site, survey: Any) -> Passes:
        if site.settings["rescale"] != "l1":
            return None
        norms = yield Pass(_norms, add)
        before, after = norms
        matched = (before >= 1e-7) & (after >= 1e-7)
        return np.where(matched, before / np.where(matched, after, 1.0), 1.0)

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        for tile in self.sparse(chunk):
            plain_sum(tile, chunk.site)
            yield tile

    def sparse(self, chunk: Chunk) -> Iterator[Tile]:
        """Tiles whose task vectors are dropped and rescaled."""
        site = chunk.site
        inverse = site.settings["rescale"] == "inverse"
        for tile in task_vectors(chunk):
            for d, density in enumerate(site.settings["density"]):
                if density >= 1:
                    continue
                kernels.drop(
                    tile.experts[d],
                    _key(site, d),
                    tile.start,
                    keep_below(density),
                    1.0 if chunk.state is None else chunk.state[d],
                    density if inverse and density > 0 else 1.0,
                )
            yield tile


class DareTies(DareLinear):
    """DARE, then the sign election and disjoint merge of TIES; nothing is trimmed by magnitude."""

    name = "dare_ties"
    title = "DARE-TIES"
    parameters = (
        WEIGHT,
        DENSITY,
        RESCALE,
        ELECT,
        CANCELLED,
        Parameter("normalize", bool, "average the agreeing entries (else sum)", False, True),
        LAMBDA,
        OUTSIDE,
        INT8_MASK,
    )

    def survey(self, sites: Sequence[Site]) -> Passes:
        return (yield from cancelled_sign(sites, self.sparse, lambda s: self.prepare(s, None)))

    def merge(self, chunk: Chunk, survey: float) -> Iterator[Tile]:
        for tile in self.sparse(chunk):
            disjoint_sum(tile, chunk.site, survey)
            yield tile


def _key(site: Site, expert: int) -> tuple[int, int]:
    return key_of(site.seed, "dare", site.experts[expert], site.tensor)


def _norms(chunk: Chunk) -> Array:
    """ℓ1 norms before and after dropping, per expert."""
    norms = np.zeros((2, len(chunk.site.experts)))
    for tile in task_vectors(chunk):
        for d, density in enumerate(chunk.site.settings["density"]):
            norms[:, d] += kernels.norms_of_drop(
                tile.experts[d], _key(chunk.site, d), tile.start, keep_below(density)
            )
    return norms
