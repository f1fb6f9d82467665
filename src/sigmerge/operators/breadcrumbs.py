"""Model Breadcrumbs: drop the smallest entries and the largest (Davari & Belilovsky, 2024)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sigmerge.core import merge as loops
from sigmerge.operators.base import MATCH_L1, Chunk, Parameter, Passes, Site
from sigmerge.operators.thinned import Thinned, family
from sigmerge.operators.ties import allowances, cuts_of, find_cuts

MIDDLE_DENSITY = Parameter("density", float, "fraction of entries kept", 1.0, 1.0, True, 0, 1)
GAMMA = Parameter("gamma", float, "fraction of largest entries dropped", 0.01, 0.01, True, 0, 1)


class Breadcrumbs(Thinned):
    """θ = θ_ref + λ Σ_d w_d Δ_d without the γ largest entries and the smallest, down to density.

    Cuts are per tensor; equal magnitudes go to the lowest index. Fewer of the largest are dropped
    where `density` could not be kept otherwise; with density 1 nothing is dropped.
    """

    name = "breadcrumbs"
    title = "Model Breadcrumbs"
    thins_on_gpu = False
    paper = "Davari & Belilovsky, Model Breadcrumbs, ECCV 2024 (arXiv:2312.06795)"
    parameters = family(False, False, MIDDLE_DENSITY, GAMMA, MATCH_L1)

    def find(self, site: Site, survey: Any) -> Passes:
        tops = [_tops(site, d) for d in range(len(site.experts))]
        found = []
        for ranks in zip(*tops, strict=True):
            cuts, tied = yield from find_cuts(ranks, site.size)
            found.append(allowances(cuts, tied) if tied else cuts)
        return found

    def thinning(self, chunk: Chunk, found: Any) -> dict[str, Any]:
        kept, outliers = (np.array(cuts_of(cuts, chunk), np.int64) for cuts in found)
        return {"thin": loops.BAND, "cuts": kept, "outliers": outliers}


class BreadcrumbsTies(Breadcrumbs):
    """Breadcrumbs, then the sign election and disjoint merge of TIES."""

    name = "breadcrumbs_ties"
    title = "Breadcrumbs-TIES"
    elects = True
    parameters = family(False, True, MIDDLE_DENSITY, GAMMA, MATCH_L1)


def _tops(site: Site, expert: int) -> tuple[int, int]:
    """How many of the largest entries hold what is kept, and how many of those are outliers."""
    density, gamma = site.settings["density"][expert], site.settings["gamma"][expert]
    if density >= 1:
        return site.size, 0
    kept = int(density * site.size)
    smallest = max(0, site.size - kept - int(gamma * site.size))
    return site.size - smallest, site.size - smallest - kept
