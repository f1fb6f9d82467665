"""DARE: drop entries at random and rescale the rest (Yu et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sigmerge.core import merge as loops
from sigmerge.core.philox import keep_below, key_of
from sigmerge.operators.base import (
    ELECT,
    INT8_MASK,
    LAMBDA,
    OUTSIDE,
    WEIGHT,
    Chunk,
    Parameter,
    Passes,
    Site,
)
from sigmerge.operators.thinned import Thinned
from sigmerge.operators.ties import CANCELLED, cancelled_sign

DENSITY = Parameter("density", float, "probability to keep an entry (1 − p)", 1.0, 0.1, True, 0, 1)
RESCALE = Parameter(
    "rescale",
    ("inverse", "l1", "none"),
    "divide survivors by 1 − p (the paper), or match each tensor's ℓ1 norm (mergekit)",
    "l1",
    "inverse",
)


class DareLinear(Thinned):
    """θ = θ_ref + λ Σ_d w_d DARE(Δ_d).

    Draws are keyed by (seed, expert, tensor) and an entry's index: no order of work changes them.
    """

    name = "dare_linear"
    title = "DARE"
    remembers = True
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

    def ends_anywhere(self, site: Site) -> bool:
        return True

    def thinning(self, chunk: Chunk, found: Any) -> dict[str, Any]:
        site = chunk.site
        return {
            "thin": loops.DROP,
            "draws": np.array([
                [*key_of(site.seed, "dare", expert, site.tensor),
                 loops.ALL if density >= 1 else keep_below(density)]
                for expert, density in zip(site.experts, site.settings["density"], strict=True)
            ], np.int64),
        }  # fmt: skip

    def divisors(self, site: Site) -> Any:
        densities = np.array(site.settings["density"])
        inverse = site.settings["rescale"] == "inverse"
        return np.where(densities > 0, densities, 1.0) if inverse else 1.0


class DareTies(DareLinear):
    """DARE, then the sign election and disjoint merge of TIES; nothing is trimmed by magnitude."""

    name = "dare_ties"
    title = "DARE-TIES"
    elects = True
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

    def cancelled(self, survey: float) -> float:
        return survey
