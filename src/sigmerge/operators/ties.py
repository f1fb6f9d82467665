"""TIES: trim small entries, elect a sign, merge what agrees (Yadav et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sigmerge.kernels import Array, select
from sigmerge.kernels import merge as kernels
from sigmerge.kernels.merge import Formula
from sigmerge.operators.base import (
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

UNCUT = select.Cut(kernels.ALL, kernels.ANY_TIES)
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


class TiesSurvey(NamedTuple):
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
            return TiesSurvey(None, 1.0)
        cuts = None
        if sites[0].settings["scope"] == "model":
            total = sum(site.size for site in sites)
            found, _ = yield from find_cuts(_ranks(sites[0], total), total)
            cuts = [
                cut if cut == KEEP_NONE else cut._replace(ties=kernels.ANY_TIES) for cut in found
            ]
        before = TiesSurvey(cuts, 1.0)
        merged = partial(self.formula, survey=before)
        sign = yield from cancelled_sign(sites, merged, lambda site: self.prepare(site, before))
        return TiesSurvey(cuts, sign)

    def prepare(self, site: Site, survey: TiesSurvey) -> Passes:
        if survey.cuts is not None:
            return survey.cuts
        cuts, tied = yield from find_cuts(_ranks(site, site.size), site.size)
        return _allowances(cuts, tied) if tied else cuts

    def formula(self, chunk: Chunk, survey: TiesSurvey) -> Formula:
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
    wanted = {d: rank for d, rank in enumerate(ranks) if 0 < rank < size}
    found = Found({}, {}, len(ranks))
    if wanted:
        sample = yield from _high(wanted, select.SAMPLE)
        yield from _guessed(wanted, size, sample, found)
        yield from _counted(found.missing(wanted), _around(wanted, size, sample), found)
    if missing := found.missing(wanted):
        high = yield from _high(missing, 1)
        bins = {d: select.bin_of_rank(high[d], rank)[0] for d, rank in missing.items()}
        yield from _counted(missing, {d: (place, place) for d, place in bins.items()}, found)
    cuts = [found.cuts.get(d, UNCUT if rank else KEEP_NONE) for d, rank in enumerate(ranks)]
    return cuts, sorted(found.tied.items())


class Found(NamedTuple):
    """Cuts by expert, and how many entries of each chunk lie on them."""

    cuts: dict[int, select.Cut]
    tied: dict[int, list[int]]
    experts: int

    def missing(self, wanted: Mapping[int, int]) -> dict[int, int]:
        return {d: rank for d, rank in wanted.items() if d not in self.cuts}

    def add(self, expert: int, cut: select.Cut, ties: Iterable[tuple[int, Any]]) -> None:
        self.cuts[expert] = cut
        for start, count in ties:
            self.tied.setdefault(start, [0] * self.experts)[expert] = int(count)


def _high(wanted: Mapping[int, int], every: int) -> Passes:
    """By expert the counts of the upper halves of patterns, in one strip of `every`."""
    counts = yield Pass(partial(_count_high, experts=np.array(list(wanted)), every=every), add)
    return dict(zip(wanted, counts, strict=True))


def _guessed(
    wanted: Mapping[int, int], size: int, sample: Mapping[int, Array], found: Found
) -> Passes:
    """Try the magnitude at the rank's place in the sample, where a good part of it has that one."""
    bins, places = {}, {}
    for d, rank in wanted.items():
        seen = int(sample[d].sum())
        bins[d], places[d] = select.bin_of_rank(sample[d], -(-rank * seen // size))
    parts = yield Pass(partial(_inside, bins={d: (b, b) for d, b in bins.items()},
                               every=select.SAMPLE))  # fmt: skip
    guesses = {}
    for row, d in enumerate(bins):
        guess, _, level = _cut([part.found[row] for part in parts], places[d])
        if level >= select.WORTH_A_GUESS * sample[d].sum():
            guesses[d] = guess
    levels = (yield Pass(partial(_levels, guesses=guesses))) if guesses else []
    for row, (d, guess) in enumerate(guesses.items()):
        above, level = sum(counts[row] for _, counts in levels)
        if above < wanted[d] <= above + level:
            cut = select.Cut(guess, wanted[d] - int(above))
            found.add(d, cut, ((start, counts[row, 1]) for start, counts in levels))


def _around(
    wanted: Mapping[int, int], size: int, sample: Mapping[int, Array]
) -> dict[int, tuple[int, int]]:
    """By expert the bins around its rank, where they are not too many."""
    bins = {d: select.bins_around(sample[d], rank / size) for d, rank in wanted.items()}
    return {d: (first, last) for d, (first, last) in bins.items() if last - first < select.FEW}


def _counted(
    wanted: Mapping[int, int], bins: Mapping[int, tuple[int, int]], found: Found
) -> Passes:
    """Count all patterns in some bins, and find the cuts that lie there."""
    bins = {d: bins[d] for d in wanted if d in bins}
    parts = (yield Pass(partial(_inside, bins=bins, every=1))) if bins else []
    for row, d in enumerate(bins):
        entries = [part.found[row] for part in parts]
        rank = wanted[d] - sum(int(part.above[row]) for part in parts)
        pattern, cut, _ = _cut(entries, rank)
        if cut is not None:
            ties = ((part.start, e.counts[e.patterns == pattern].sum())
                    for part, e in zip(parts, entries, strict=True))  # fmt: skip
            found.add(d, cut, ties)


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


def _cut(found: Sequence[Entries], rank: int) -> tuple[int, select.Cut | None, int]:
    """The pattern at a rank up to the bits left out, the cut there and how many entries have it.

    The cut is None if it cannot be told.
    """
    patterns, places = np.unique(np.concatenate([e.patterns for e in found]), return_inverse=True)
    total = np.bincount(places, np.concatenate([e.counts for e in found])).astype(np.int64)
    if not 0 < rank <= total.sum():
        return 0, None, 0
    place, left = select.bin_of_rank(total, rank)
    here = np.concatenate([e.left_out for e in found])[places == place]
    last, others = divmod(int(np.bitwise_or.reduce(here)), 256)[::-1]
    pattern = int(patterns[place])
    cut = None if last & others else select.Cut(pattern + last, left)
    return pattern, cut, int(total[place])


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


def _levels(chunk: Chunk, guesses: dict[int, int]) -> tuple[int, Array]:
    """How many entries of each guess's expert lie above it, and on it."""
    counts = np.zeros((len(guesses), 2), np.int64)
    patterns = np.array(list(guesses.values()), np.int64)
    chunk.read(select.count_level, np.array(list(guesses)), patterns, counts)
    return chunk.start, counts


def _inside(chunk: Chunk, bins: dict[int, tuple[int, int]], every: int) -> Inside:
    table = np.array([select.range_of(*some) for some in bins.values()])
    experts = np.array(list(bins))
    counts = np.zeros((len(experts), 2 * select.LOW_BINS), np.uint32)
    left_out, above = np.zeros(counts.shape, np.uint16), np.zeros(len(experts), np.int64)
    given = (experts, every, table, counts, left_out, above)
    chunk.read(select.count_inside, *given, share=1 / every)
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
