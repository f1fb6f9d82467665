"""TIES: trim small entries, elect a sign, merge what agrees (Yadav et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sigmerge.kernels import merge as kernels
from sigmerge.kernels import select
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
from sigmerge.operators.task_arithmetic import task_vectors

ALL_TIES = 2**62
KEEP_ALL = select.Cut(0, ALL_TIES)
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
            found, _ = yield from find_cuts(_ranks(sites[0], total), total, by_chunk=False)
            cuts = [cut if cut == KEEP_NONE else cut._replace(ties=ALL_TIES) for cut in found]
        before = Surveyed(cuts, 1.0)
        sign = yield from cancelled_sign(
            sites, self.sparse, lambda site: self.prepare(site, before)
        )
        return Surveyed(cuts, sign)

    def prepare(self, site: Site, survey: Surveyed) -> Passes:
        if survey.cuts is not None:
            return survey.cuts
        cuts, ties = yield from find_cuts(_ranks(site, site.size), site.size, by_chunk=True)
        return _allowances(cuts, ties) if ties else cuts

    def merge(self, chunk: Chunk, survey: Surveyed) -> Iterator[Tile]:
        for tile in self.sparse(chunk):
            disjoint_sum(tile, chunk.site, survey.cancelled)
            yield tile

    def sparse(self, chunk: Chunk) -> Iterator[Tile]:
        """Tiles whose task vectors are trimmed."""
        cuts = chunk.state[chunk.start] if isinstance(chunk.state, dict) else chunk.state
        ties = [cut.ties for cut in cuts]
        for tile in task_vectors(chunk):
            for d, cut in enumerate(cuts):
                if cut != KEEP_ALL:
                    ties[d] = kernels.trim(tile.experts[d], cut.threshold, ties[d])
            yield tile


def disjoint_sum(tile: Tile, site: Site, cancelled: float) -> None:
    """τ = λ times the disjoint merge of the tile's sparse task vectors."""
    settings = site.settings
    weighted = settings["elect"] == "weighted"
    kernels.disjoint_merge(
        tile.experts, site.weights(), weighted, settings["normalize"], cancelled, tile.out
    )
    kernels.scale(tile.out, 1.0, settings["lambda"])


def cancelled_sign(
    sites: Sequence[Site],
    sparse: Callable[[Chunk], Iterator[Tile]],
    prepare: Callable[[Site], Passes],
) -> Passes:
    """The sign for coordinates whose entries cancel: 1, or by one pass over the model's elections.

    As many + as − elect +.
    """
    if all(site.settings["cancelled"] == "plus" for site in sites):
        return 1.0

    def lead(chunk: Chunk) -> int:
        weights, weighted = chunk.site.weights(), chunk.site.settings["elect"] == "weighted"
        return sum(
            int(kernels.lead_of_plus(tile.experts, weights, weighted)) for tile in sparse(chunk)
        )

    total = yield Pass(lead, add, prepare)
    return 1.0 if total >= 0 else -1.0


class Inside(NamedTuple):
    """Lower bits of a chunk's entries in the bin of each expert's cut: values and their counts."""

    start: int
    found: list[tuple[Array, Array]]


def find_cuts(ranks: Sequence[int], size: int, *, by_chunk: bool) -> Passes:
    """The cut of every expert's largest `rank` of `size` entries, in two counting passes.

    With `by_chunk` also the number of ties in every chunk: (start, one count per expert).
    """
    cuts = [KEEP_NONE if rank == 0 else KEEP_ALL for rank in ranks]
    wanted = [d for d, rank in enumerate(ranks) if 0 < rank < size]
    if not wanted:
        return cuts, []
    high = yield Pass(partial(_count_high, experts=wanted), add)
    bins = [select.bin_of_rank(row, ranks[d]) for row, d in zip(high, wanted, strict=True)]
    chunks: list[Inside] = []

    def fold(total: Array | None, part: Inside) -> Array:
        total = np.zeros((len(wanted), select.LOW_BINS), np.int64) if total is None else total
        for row, (values, counts) in zip(total, part.found, strict=True):
            row[values] += counts
        if by_chunk:
            chunks.append(part)
        return total

    low = yield Pass(partial(_count_low, experts=wanted, bins=[b for b, _ in bins]), fold)
    ties = [(part.start, [0] * len(ranks)) for part in chunks]
    for row, d in enumerate(wanted):
        below, left = select.bin_of_rank(low[row], bins[row][1])
        cuts[d] = select.Cut(select.threshold_of(bins[row][0], below), left)
        for (_, tied), part in zip(ties, chunks, strict=True):
            values, counts = part.found[row]
            tied[d] = int(counts[values == below].sum())
    return cuts, ties


def _ranks(site: Site, size: int) -> list[int]:
    """How many entries of each expert stay: ⌊density · size⌋, at least one unless density is 0."""
    return [
        size if density >= 1 else max(1, int(density * size)) if density > 0 else 0
        for density in site.settings["density"]
    ]


def _count_high(chunk: Chunk, experts: list[int]) -> Array:
    histogram = np.zeros((len(experts), select.HIGH_BINS), np.int64)
    for tile in task_vectors(chunk):
        for row, d in enumerate(experts):
            select.count_high(tile.experts[d], histogram[row])
    return histogram


def _count_low(chunk: Chunk, experts: list[int], bins: list[int]) -> Inside:
    histogram = np.zeros((len(experts), select.LOW_BINS), np.int64)
    for tile in task_vectors(chunk):
        for row, d in enumerate(experts):
            select.count_low(tile.experts[d], bins[row], histogram[row])
    return Inside(chunk.start, [(v := np.flatnonzero(row), row[v]) for row in histogram])


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
