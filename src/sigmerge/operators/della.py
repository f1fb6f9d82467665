"""DELLA: drop entries at random, small ones rather than large ones (Deep et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sigmerge.core import merge as loops
from sigmerge.core.philox import key_of
from sigmerge.operators.base import Chunk, Parameter, Site
from sigmerge.operators.thinned import Thinned, family

RANKED_DENSITY = Parameter("density", float, "mean odds to keep an entry", 1.0, 1.0, True, 0, 1)
RANKED_EPSILON = Parameter(
    "epsilon", float, "probabilities go from density − ε to density + ε", 0.15, 0.15, True, -1, 1
)
RANKED_RESCALE = Parameter(
    "rescale",
    ("inverse", "l1", "none"),
    "divide survivors by their probability (the paper), or match each tensor's ℓ1 norm (mergekit)",
    "l1",
    "inverse",
)


class DellaLinear(Thinned):
    """θ = θ_ref + λ Σ_d w_d MAGPRUNE(Δ_d).

    In every row the smallest entry is kept with probability density − ε, the largest with
    density + ε, the others by rank in equal steps; ε < 0 favours small ones. Draws are keyed as in
    DARE.
    """

    name = "della_linear"
    title = "DELLA"
    thins_on_gpu = False
    remembers = True
    paper = "Deep et al., DELLA-Merging, 2024 (arXiv:2406.11617)"
    parameters = family(False, False, RANKED_DENSITY, RANKED_EPSILON, RANKED_RESCALE)

    def check(self, sites: Sequence[Site]) -> list[str]:
        for site in sites:
            pairs = zip(site.settings["density"], site.settings["epsilon"], strict=True)
            for density, epsilon in pairs:
                ends = density - abs(epsilon), density + abs(epsilon)
                if 0 < density < 1 and not (ends[0] > 0 and ends[1] < 1):
                    return [
                        f"density {density:g} and epsilon {epsilon:g} of {site.tensor}: density "
                        "± epsilon must lie between 0 and 1"
                    ]
        return []

    def granule(self, site: Site) -> int:
        return math.prod(site.shape[1:]) if len(site.shape) > 1 else site.size

    def thinning(self, chunk: Chunk, found: Any) -> dict[str, Any]:
        site = chunk.site
        shape = site.shape if len(site.shape) > 1 else (1, site.size)
        density, epsilon = (np.array(site.settings[name]) for name in ("density", "epsilon"))
        inverse = site.settings["rescale"] == "inverse"
        return {
            "thin": loops.RANK,
            "draws": np.array([
                [*key_of(site.seed, "della", expert, site.tensor),
                 loops.ALL if share >= 1 else share > 0]
                for expert, share in zip(site.experts, density, strict=True)
            ], np.int64),
            "odds": np.stack([density - epsilon, density + epsilon], 1),
            "axis": (shape[1], math.prod(shape[2:]), inverse),
        }  # fmt: skip


class Della(DellaLinear):
    """DELLA, then the sign election and disjoint merge of TIES."""

    name = "della"
    title = "DELLA-TIES"
    elects = True
    parameters = family(True, True, RANKED_DENSITY, RANKED_EPSILON, RANKED_RESCALE)
