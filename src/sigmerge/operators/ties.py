"""TIES: trim small entries, elect a sign, merge what agrees (Yadav et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
CANCELLED = Parameter(
    "cancelled",
    ("plus", "majority"),
    "the sign elected where the entries cancel: +, or that of most coordinates of the model",
    "plus",
    "majority",
)


class Surveyed(NamedTuple):
    """What is known about the whole model: every expert's cut if it is one for all tensors."""

    cuts: list[select.Cut] | None
    cancelled: float
    """The sign that is elected where the entries cancel, 1 or −1."""


class Ties(Operator):
    """Keep the `density` largest entries of every task vector, then merge them disjointly.

    `scope: model` takes one threshold over an expert's whole task vector (the authors'; entries
    equal to it all stay), `scope: tensor` one per tensor (mergekit's; exactly k entries stay, ties
    go to the lowest index). Where the entries of a coordinate cancel, `cancelled: majority` elects
    the sign that more coordinates of the whole model elect (the authors'), `plus` always +.
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
        CANCELLED,
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
        if not sites:
            return Surveyed(None, 1.0)
        cuts = None
        if sites[0].settings["scope"] == "model":
            total = sum(site.size for site in sites)
            found, _ = yield from find_cuts(_ranks(sites[0], total), total)
            cuts = [
                cut if cut == KEEP_NONE else cut._replace(ties=kernels.ANY_TIES) for cut in found
            ]
        before = Surveyed(cuts, 1.0)
        merged = partial(self.formula, survey=before)
        sign = yield from cancelled_sign(sites, merged, lambda site: self.prepare(site, before))
        return Surveyed(cuts, sign)

    def prepare(self, site: Site, survey: Surveyed) -> Passes:
        if survey.cuts is not None:
            return survey.cuts
        cuts, tied = yield from find_cuts(_ranks(site, site.size), site.size)
        return _allowances(cuts, tied) if tied else cuts

    def formula(self, chunk: Chunk, survey: Surveyed) -> Formula:
        cuts = chunk.state[chunk.start] if isinstance(chunk.state, dict) else chunk.state
        table = np.array(cuts, np.int64)
        combining = disjoint(chunk.site, survey.cancelled)
        return kernels.formula(chunk.site.weights(), cuts=table, **combining)


def disjoint(site: Site, cancelled: float) -> dict[str, Any]:
    """τ = λ times the disjoint merge of sparse task vectors."""
    settings = site.settings
    return {
        "combine": kernels.DISJOINT,
        "weighted": settings["elect"] == "weighted",
        "normalize": settings["normalize"],
        "cancelled": cancelled,
        "factor": float(settings["lambda"]),
    }


def cancelled_sign(
    sites: Sequence[Site],
    formula: Callable[[Chunk], Formula],
    prepare: Callable[[Site], Passes],
) -> Passes:
    """The sign for coordinates whose entries cancel: 1, or by one pass over the model's elections.

    As many + as − elect +.
    """
    if all(site.settings["cancelled"] == "plus" for site in sites):
        return 1.0
    total = yield Pass(lambda chunk: chunk.lead_of_plus(formula(chunk)), add, prepare)
    return 1.0 if total >= 0 else -1.0


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
        ranges = yield from _ranges(wanted, ranks, size, every)
        parts = (yield Pass(partial(_inside, ranges=ranges))) if ranges else []
        for row, d in enumerate(ranges):
            found = [part.found[row] for part in parts]
            rank = ranks[d] - sum(int(part.above[row]) for part in parts)
            place, cut = _cut(found, rank)
            if cut is None:
                continue
            cuts[d] = cut
            wanted.remove(d)
            for part, entries in zip(parts, found, strict=True):
                ties = tied.setdefault(part.start, [0] * len(ranks))
                ties[d] = int(entries.counts[entries.patterns == place].sum())
    return cuts, sorted(tied.items())


def _ranges(wanted: Sequence[int], ranks: Sequence[int], size: int, every: int) -> Passes:
    """By expert the patterns around its rank; of a sample, only where they are not too many."""
    high = yield Pass(partial(_count_high, experts=np.array(wanted), every=every), add)
    ranges = {}
    for d, row in zip(wanted, high, strict=True):
        if every == 1:
            found, _ = select.bin_of_rank(row, ranks[d])
            ranges[d] = select.range_of(found, found)
        else:
            first, last = select.bins_around(row, ranks[d] / size)
            if last - first < select.FEW:
                ranges[d] = select.range_of(first, last)
    return ranges


class Entries(NamedTuple):
    """Magnitudes in a range: patterns up to the bits that were left out, counts, and those bits."""

    patterns: Array
    counts: Array
    left_out: Array


class Inside(NamedTuple):
    """A chunk's entries in the range of each wanted expert, and how many lie above it."""

    start: int
    found: list[Entries]
    above: Array


def _cut(found: Sequence[Entries], rank: int) -> tuple[int, select.Cut | None]:
    """The cut at a rank and its pattern up to the bits left out; None if it cannot be told."""
    patterns, places = np.unique(np.concatenate([e.patterns for e in found]), return_inverse=True)
    total = np.bincount(places, np.concatenate([e.counts for e in found])).astype(np.int64)
    if not 0 < rank <= total.sum():
        return 0, None
    place, left = select.bin_of_rank(total, rank)
    here = np.concatenate([e.left_out for e in found])[places == place]
    last, others = divmod(int(np.bitwise_or.reduce(here)), 256)[::-1]
    pattern = int(patterns[place])
    return pattern, None if last & others else select.Cut(pattern + last, left)


def _ranks(site: Site, size: int) -> list[int]:
    """How many entries of each expert stay: ⌊density · size⌋, at least one unless density is 0."""
    return [
        size if density >= 1 else max(1, int(density * size)) if density > 0 else 0
        for density in site.settings["density"]
    ]


def _count_high(chunk: Chunk, experts: Array, every: int) -> Array:
    counts = np.zeros((len(experts), select.HIGH_BINS), np.uint32)
    chunk.read(select.count_high, experts, every, counts, share=1 / every)
    return counts


def _inside(chunk: Chunk, ranges: dict[int, tuple[int, int, int]]) -> Inside:
    table, experts = np.array(list(ranges.values())), np.array(list(ranges))
    counts = np.zeros((len(experts), 2 * select.LOW_BINS), np.uint32)
    left_out, above = np.zeros(counts.shape, np.uint16), np.zeros(len(experts), np.int64)
    chunk.read(select.count_inside, experts, table, counts, left_out, above)
    found = []
    for row, (first, _, shift) in enumerate(table):
        places = np.flatnonzero(counts[row])
        entries = Entries(first + (places << shift), counts[row, places], left_out[row, places])
        found.append(entries)
    return Inside(chunk.start, found, above)


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
