"""TIES: trim small entries, elect a sign, merge what agrees (Yadav et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sigmerge.kernels import merge as kernels
from sigmerge.kernels import select
from sigmerge.kernels.merge import Formula
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
    add,
)

KEEP_ALL = select.Cut(kernels.ALL, kernels.ANY_TIES)
KEEP_NONE = select.Cut(0x7FFFFFFF, 0)
ELECT = Parameter(
    "elect",
    ("weighted", "unweighted"),
    "whether weights count in the election of signs",
    "weighted",
    "unweighted",
)


class Ties(Operator):
    """Keep the `density` largest entries of every task vector, then merge them disjointly.

    `scope: model` takes one threshold over an expert's whole task vector (the authors'; entries
    equal to it all stay), `scope: tensor` one per tensor (mergekit's; exactly k entries stay, ties
    go to the lowest index).
    """

    name = "ties"
    title = "TIES"
    paper = "Yadav et al., TIES-Merging, NeurIPS 2023 (arXiv:2306.01708)"
    parameters = (
        WEIGHT,
        Parameter("density", float, "fraction of entries kept", 1.0, 0.2, True, 0.0, 1.0),
        Parameter(
            "scope", ("tensor", "model"), "what a threshold is taken over", "tensor", "model"
        ),
        ELECT,
        Parameter("normalize", bool, "average the agreeing entries (else sum)", True, True),
        LAMBDA,
        OUTSIDE,
        INT8_MASK,
    )

    def check(self, sites: Sequence[Site]) -> list[str]:
        scopes = {site.settings["scope"] for site in sites}
        densities = {site.settings["density"] for site in sites}
        if scopes == {"model"} and len(densities) > 1:
            return [
                "scope: model takes one density per expert; filters and gradients need "
                "scope: tensor"
            ]
        return ["scope must be the same for every tensor"] if len(scopes) > 1 else []

    def survey(self, sites: Sequence[Site]) -> Passes:
        if not sites or sites[0].settings["scope"] == "tensor":
            return None
        total = sum(site.size for site in sites)
        cuts, _ = yield from find_cuts(_ranks(sites[0], total), total)
        return [cut if cut == KEEP_NONE else cut._replace(ties=kernels.ANY_TIES) for cut in cuts]

    def prepare(self, site: Site, survey: Any) -> Passes:
        if survey is not None:
            return survey
        cuts, tied = yield from find_cuts(_ranks(site, site.size), site.size)
        return _allowances(cuts, tied) if tied else cuts

    def formula(self, chunk: Chunk, survey: Any) -> Formula:
        cuts = chunk.state[chunk.start] if isinstance(chunk.state, dict) else chunk.state
        table = np.array(cuts, np.int64)
        return kernels.formula(chunk.site.weights(), cuts=table, **disjoint(chunk.site))


def disjoint(site: Site) -> dict[str, Any]:
    """τ = λ times the disjoint merge of sparse task vectors."""
    settings = site.settings
    return {
        "combine": kernels.DISJOINT,
        "weighted": settings["elect"] == "weighted",
        "normalize": settings["normalize"],
        "factor": float(settings["lambda"]),
    }


def find_cuts(ranks: Sequence[int], size: int) -> Passes:
    """The cut of every expert's largest `rank` of `size` entries; and the ties of every chunk.

    Ties are counted by chunk, (start, one count per expert), in the order of the chunks.
    """
    cuts = [KEEP_NONE if rank == 0 else KEEP_ALL for rank in ranks]
    wanted = [d for d, rank in enumerate(ranks) if 0 < rank < size]
    tied: dict[int, list[int]] = {}
    for every in (select.SAMPLE, 1):
        if not wanted:
            break
        guesses = yield from _thresholds(wanted, ranks, size, every)
        tried = [d for d in wanted if d in guesses]
        counts: list[Counted] = []
        if tried:
            at = np.array([guesses[d] for d in tried], np.int64)
            counts = yield Pass(partial(_count_cut, experts=tried, thresholds=at))
        for row, d in enumerate(tried):
            above, equal = (sum(int(c.counts[row, k]) for c in counts) for k in (0, 1))
            if above < ranks[d] <= above + equal:
                cuts[d] = select.Cut(guesses[d], ranks[d] - above)
                wanted.remove(d)
                for part in counts:
                    part_ties = tied.setdefault(part.start, [0] * len(ranks))
                    part_ties[d] = int(part.counts[row, 1])
    return cuts, sorted(tied.items())


def _thresholds(wanted: Sequence[int], ranks: Sequence[int], size: int, every: int) -> Passes:
    """Magnitudes at the ranks in one strip of `every`; of a sample, those worth a count."""
    experts = np.array(wanted)
    high = yield Pass(partial(_count_high, experts=experts, every=every), add)
    seen = int(high[0].sum())
    places = [
        select.bin_of_rank(row, -(-ranks[d] * seen // size))
        for row, d in zip(high, wanted, strict=True)
    ]
    bins = np.array([upper for upper, _ in places])
    low = yield Pass(partial(_count_low, experts=experts, every=every, bins=bins), add)
    found = {}
    for row, (d, (upper, rank)) in enumerate(zip(wanted, places, strict=True)):
        lower, _ = select.bin_of_rank(low[row], rank)
        if every == 1 or low[row][lower] >= select.WORTH_A_GUESS * seen:
            found[d] = select.threshold_of(upper, lower)
    return found


def _ranks(site: Site, size: int) -> list[int]:
    """How many entries of each expert stay: ⌊density · size⌋, at least one unless density is 0."""
    return [
        size if density >= 1 else max(1, int(density * size)) if density > 0 else 0
        for density in site.settings["density"]
    ]


class Counted(NamedTuple):
    """A chunk's entries above and equal to each wanted expert's threshold."""

    start: int
    counts: Array


def _count_high(chunk: Chunk, experts: Array, every: int) -> Array:
    counts = np.zeros((len(experts), select.HIGH_BINS), np.uint32)
    chunk.read(select.count_high, experts, every, counts, share=1 / every)
    return counts


def _count_low(chunk: Chunk, experts: Array, every: int, bins: Array) -> Array:
    counts = np.zeros((len(experts), select.LOW_BINS), np.uint32)
    chunk.read(select.count_low, experts, every, bins, counts, share=1 / every)
    return counts


def _count_cut(chunk: Chunk, experts: list[int], thresholds: Array) -> Counted:
    counts = np.zeros((len(experts), 2), np.int64)
    chunk.read(select.count_cut, np.array(experts), thresholds, counts)
    return Counted(chunk.start, counts)


def _allowances(
    cuts: Sequence[select.Cut], counts: list[tuple[int, list[int]]]
) -> dict[int, list[select.Cut]]:
    """How many ties every chunk may keep, the earlier chunks having had theirs."""
    left = [cut.ties for cut in cuts]
    allowed = {}
    for start, found in counts:
        allowed[start] = [cut._replace(ties=max(0, t)) for cut, t in zip(cuts, left, strict=True)]
        left = [t - f for t, f in zip(left, found, strict=True)]
    return allowed
