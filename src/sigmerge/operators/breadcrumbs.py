"""Model Breadcrumbs: drop the smallest entries and the largest (Davari & Belilovsky, 2024)."""

from __future__ import annotations

from typing import Any

from sigmerge.kernels import thinning
from sigmerge.operators.base import MATCH_L1, Chunk, Parameter, Passes, Site, Tile
from sigmerge.operators.thinned import Thin, Thinned, family
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
    paper = "Davari & Belilovsky, Model Breadcrumbs, ECCV 2024 (arXiv:2312.06795)"
    parameters = family(False, False, MIDDLE_DENSITY, GAMMA, MATCH_L1)

    def find(self, site: Site, survey: Any) -> Passes:
        tops = [_tops(site, d) for d in range(len(site.experts))]
        found = []
        for ranks in zip(*tops, strict=True):
            cuts, tied = yield from find_cuts(ranks, site.size)
            found.append(allowances(cuts, tied) if tied else cuts)
        return found

    def thinner(self, chunk: Chunk, found: Any) -> Thin:
        kept, outliers = (cuts_of(cuts, chunk) for cuts in found)
        ties = [[cut.ties for cut in cuts] for cuts in (kept, outliers)]

        def thin(tile: Tile) -> None:
            for d, row in enumerate(tile.experts):
                ties[0][d], ties[1][d] = thinning.cut_out(
                    row, kept[d].threshold, ties[0][d], outliers[d].threshold, ties[1][d]
                )

        return thin


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
