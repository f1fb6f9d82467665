"""DARE: drop entries at random and rescale the rest (Yu et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sigmerge.kernels import TILE, Array
from sigmerge.kernels import merge as kernels
from sigmerge.kernels.merge import Formula
from sigmerge.kernels.philox import keep_below, key_of
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
    add,
)
from sigmerge.operators.task_arithmetic import scaling
from sigmerge.operators.ties import CANCELLED, cancelled_sign, disjoint

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
        before, after = yield Pass(_norms, add)
        matched = (before >= 1e-7) & (after >= 1e-7)
        return np.where(matched, before / np.where(matched, after, 1.0), 1.0)

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        site = chunk.site
        return kernels.formula(site.weights(), **_dropping(site, chunk.state), **scaling(site))


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
        merged = partial(self.formula, survey=1.0)
        return (yield from cancelled_sign(sites, merged, lambda s: self.prepare(s, None)))

    def formula(self, chunk: Chunk, survey: float) -> Formula:
        site = chunk.site
        dropping, combining = _dropping(site, chunk.state), disjoint(site, survey)
        return kernels.formula(site.weights(), **dropping, **combining)


def _dropping(site: Site, matched: Array | None) -> dict[str, Any]:
    """What is drawn for every expert, and how its survivors are rescaled."""
    densities = np.array(site.settings["density"])
    rescale = np.ones((len(densities), 2), np.float32)
    if matched is not None:
        rescale[:, 0] = matched
    if site.settings["rescale"] == "inverse":
        rescale[:, 1] = np.where(densities > 0, densities, 1.0)
    return {"draws": _draws(site), "rescale": rescale}


def _draws(site: Site) -> Array:
    """The key of every expert's draws, and the bound below which a draw keeps its entry."""
    return np.array([
        [*key_of(site.seed, "dare", expert, site.tensor),
         kernels.ALL if density >= 1 else keep_below(density)]
        for expert, density in zip(site.experts, site.settings["density"], strict=True)
    ], np.int64)  # fmt: skip


def _norms(chunk: Chunk) -> Array:
    """ℓ1 norms before and after dropping, per expert."""
    norms = np.zeros((2, len(chunk.site.experts)))
    chunk.read(kernels.norms_of_drop, _draws(chunk.site), TILE, norms)
    return norms
