"""CABS: n:m pruning under sequential masks that keep experts disjoint (Yang et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sigmerge.core import TILE
from sigmerge.core import merge as loops
from sigmerge.core.merge import Formula
from sigmerge.operators.base import OUTSIDE, WEIGHT, Chunk, Operator, Parameter, Site


class Cabs(Operator):
    """In every group of m consecutive entries each expert, in order, keeps its n largest free ones.

    Survivors are not rescaled. A tail shorter than m at the end of a tensor is left at the
    reference, and the tensor's notes say how many entries that is.
    """

    name = "cabs"
    title = "CABS"
    thins_on_gpu = False
    paper = "Yang et al., CABS, ICML 2025 (arXiv:2503.01874)"
    parameters = (
        WEIGHT,
        Parameter("m", int, "group length", 256, 256, low=1, high=TILE),
        Parameter(
            "n",
            int,
            "entries kept per group and expert; auto: m/4, or m/experts if that is less",
            "auto",
            "auto",
            low=1,
            auto=True,
        ),
        Parameter(
            "overlap",
            ("error", "fill"),
            "experts × n > m: refuse, or fill up from entries "
            "already taken and merge those by elected sign",
            "error",
            "error",
        ),
        OUTSIDE,
    )

    def check(self, sites: Sequence[Site]) -> list[str]:
        problems: dict[str, None] = {}
        for site in sites:
            n, m, experts = _kept(site), site.settings["m"], len(site.experts)
            if n > m:
                problems[f"n = {n} exceeds the group length m = {m}"] = None
            elif n == 0:
                problems[f"{experts} experts do not fit into groups of m = {m}"] = None
            elif experts * n > m and site.settings["overlap"] == "error":
                problems[
                    f"{experts} experts × n = {n} exceed m = {m}: masks cannot be disjoint; "
                    f"take n ≤ {m // experts} or set overlap: fill"
                ] = None
        return list(problems)

    def granule(self, site: Site) -> int:
        return int(site.settings["m"])

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        site = chunk.site
        fill = site.settings["overlap"] == "fill"
        if site.size % site.settings["m"] and chunk.start + chunk.size == site.size:
            chunk.notes["tail"] = site.size % site.settings["m"]
        return loops.formula(
            site.weights(),
            thin=loops.PRUNE,
            groups=(_kept(site), site.settings["m"], fill),
            combine=loops.OVERLAPS if fill else loops.SUM,
        )


def _kept(site: Site) -> int:
    n, m = site.settings["n"], site.settings["m"]
    return min(m // 4, m // len(site.experts)) if n == "auto" else int(n)
