"""TIES: trim small entries, elect a sign, merge what agrees (Yadav et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sigmerge.core import Array, select
from sigmerge.core import merge as loops
from sigmerge.core.merge import ALL, ANY_TIES, Formula
from sigmerge.operators.base import (
    ELECT,
    INT8_MASK,
    LAMBDA,
    MATCH_L1,
    OUTSIDE,
    WEIGHT,
    Chunk,
    Parameter,
    Pass,
    Passes,
    Site,
    add,
    collect,
)
from sigmerge.operators.thinned import Thinned

MANY_PARTS = 32
UNCUT = select.Cut(ALL, ANY_TIES)
KEEP_NONE = select.Cut(0x7FFFFFFF, 0)
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


class Ties(Thinned):
    """Keep the `density` largest entries of every task vector, then merge them disjointly.

    `scope: model` takes one threshold over an expert's whole task vector (the authors'; entries
    equal to it all stay), `scope: tensor` one per tensor (mergekit's; exactly k entries stay, ties
    go to the lowest index). Where the entries of a coordinate cancel, `cancelled: majority` elects
    the sign that more coordinates of the whole model elect (the authors'), `plus` always +.
    """

    name = "ties"
    title = "TIES"
    elects = True
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
        MATCH_L1,
        LAMBDA,
        OUTSIDE,
        INT8_MASK,
    )

    def check(self, sites: Sequence[Site]) -> list[str]:
        return one_scope(sites)

    def survey(self, sites: Sequence[Site]) -> Passes:
        if not sites:
            return TiesSurvey(None, 1.0)
        cuts = None
        if sites[0].settings["scope"] == "model":
            total = sum(site.size for site in sites)
            found, _ = yield from find_cuts(ranks(sites[0], total), total)
            cuts = [cut if cut == KEEP_NONE else cut._replace(ties=ANY_TIES) for cut in found]
        before = TiesSurvey(cuts, 1.0)
        merged = partial(self.formula, survey=before)
        sign = yield from cancelled_sign(sites, merged, lambda site: self.prepare(site, before))
        return TiesSurvey(cuts, sign)

    def find(self, site: Site, survey: TiesSurvey) -> Passes:
        if survey.cuts is not None:
            return survey.cuts
        cuts, tied = yield from find_cuts(ranks(site, site.size), site.size)
        return allowances(cuts, tied) if tied else cuts

    def thinning(self, chunk: Chunk, found: Any) -> dict[str, Any]:
        return {"thin": loops.TRIM, "cuts": np.array(cuts_of(found, chunk), np.int64)}

    def cancelled(self, survey: TiesSurvey) -> float:
        return survey.cancelled


def one_scope(sites: Sequence[Site]) -> list[str]:
    """Problems of a scope that is the whole model, where settings or experts differ in it."""
    scopes = {site.settings["scope"] for site in sites}
    densities = {site.settings["density"] for site in sites}
    if scopes == {"model"} and len(densities) > 1:
        return [
            "scope: model takes one density per expert; filters and gradients need scope: tensor"
        ]
    if "model" in scopes and len({site.experts for site in sites}) > 1:
        return ["scope: model takes one set of experts for all tensors; parts of the model "
                "that have experts of their own need scope: tensor"]  # fmt: skip
    return ["scope must be the same for every tensor"] if len(scopes) > 1 else []


def cuts_of(found: Any, chunk: Chunk) -> Sequence[select.Cut]:
    """The cuts of a chunk, one for each expert."""
    cuts: Sequence[select.Cut] = found[chunk.start] if isinstance(found, dict) else found
    return cuts


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
    found = Found({}, {}, wanted, len(ranks))
    if wanted:
        sample = yield from _high(wanted, select.SAMPLE, size)
        if isinstance(sample, AtOnce):
            for d, (pattern, ties, level) in zip(wanted, sample.found.tolist(), strict=True):
                found.add(d, select.Cut(pattern, ties), [(sample.start, level)])
        else:
            guesses = yield from _guesses(wanted, size, sample)
            around = _around(wanted, size, sample)
            yield from _counted(wanted, around | guesses, found)
            yield from _counted(found.missing(guesses), around, found)
    if missing := found.missing(wanted):
        high = yield from _high(missing, 1)
        bins = {d: select.place_of_rank(high[d], rank)[0] // 2 for d, rank in missing.items()}
        ranges = {d: select.range_of(place, place) for d, place in bins.items()}
        yield from _counted(missing, ranges, found)
    cuts = [found.cuts.get(d, UNCUT if rank else KEEP_NONE) for d, rank in enumerate(ranks)]
    return cuts, sorted(found.tied.items())


class Found(NamedTuple):
    """Cuts by expert, and how many entries of each chunk lie on them."""

    cuts: dict[int, select.Cut]
    tied: dict[int, list[int]]
    wanted: Mapping[int, int]
    experts: int

    def missing(self, some: Iterable[int]) -> dict[int, int]:
        """Ranks of those of some experts whose cut is not known."""
        return {d: self.wanted[d] for d in some if d not in self.cuts}

    def add(self, expert: int, cut: select.Cut, ties: Iterable[tuple[int, Any]]) -> None:
        self.cuts[expert] = cut
        for start, count in ties:
            self.tied.setdefault(start, [0] * self.experts)[expert] = int(count)


class AtOnce(NamedTuple):
    """What a device found of a tensor that is one chunk: its start, and `Chunk.selected`."""

    start: int
    found: Array


def _high(wanted: Mapping[int, int], every: int, size: int = 0) -> Passes:
    """By expert what `select.count_high` counts in one strip of `every`, place by place.

    Or what is found at once of a chunk that has all entries, of which there are `size`.
    """
    parts = yield Pass(partial(_count_high, wanted=wanted, every=every, size=size), _gathered)
    if isinstance(parts[0], AtOnce):  # and there is no other
        return parts[0]
    return dict(zip(wanted, _joined(parts), strict=True))


def _gathered(total: list[Any] | None, part: Any) -> list[Any]:
    """Parts until they are many: joining them is a call, and keeping them takes memory."""
    parts = collect(total, part)
    return parts if len(parts) < MANY_PARTS else [_joined(parts)]


def _joined(parts: Sequence[Sequence[Array]]) -> list[Array]:
    """By expert the counts of all parts."""
    return [_one(of_expert) for of_expert in zip(*parts, strict=True)]


def _one(parts: Sequence[Array]) -> Array:
    """The counts of all parts; those of a tensor that is one chunk are joined already."""
    return parts[0] if len(parts) == 1 else select.joined(parts)


def _guesses(wanted: Mapping[int, int], size: int, sample: Mapping[int, Array]) -> Passes:
    """The one magnitude at the rank's place, where so many of the sample have it that it is sure.

    As good as sure: a count of all entries shows whether it is true.
    """
    ranges, ranks, guesses = {}, {}, {}

    def guess(d: int, pattern: int, ties: int, level: int) -> None:
        slack = select.slack(select.entries(sample[d][1]))
        if slack < ties <= level - slack:
            guesses[d] = select.Range(pattern, 1, 0)

    for d, rank in wanted.items():
        seen = select.entries(sample[d][1])
        place, left, level = select.place_of_rank(sample[d], -(-rank * seen // size))
        if place % 2 == 0:  # one pattern
            guess(d, select.threshold_of(place // 2, 0), left, level)
        else:
            ranges[d], ranks[d] = select.range_of(place // 2, place // 2), left
    counted = yield from _inside(ranges, select.SAMPLE)
    for d, part in counted.items():
        pattern, cut, level = part.cut(ranks[d])
        if cut is not None:
            guess(d, pattern, cut.ties, level)
    return guesses


def _around(
    wanted: Mapping[int, int], size: int, sample: Mapping[int, Array]
) -> dict[int, select.Range]:
    """By expert the patterns around its rank, where their bins are not too many."""
    bins = {d: select.bins_around(sample[d], rank / size) for d, rank in wanted.items()}
    return {
        d: select.range_of(first, last)
        for d, (first, last) in bins.items()
        if last - first < select.FEW
    }


def _counted(wanted: Mapping[int, int], ranges: Mapping[int, select.Range], found: Found) -> Passes:
    """Count all patterns in some ranges, and find the cuts that lie there."""
    counted = yield from _inside({d: ranges[d] for d in wanted if d in ranges}, 1)
    for d, part in counted.items():
        pattern, cut, _ = part.cut(wanted[d] - part.above)
        if cut is not None:
            found.add(d, cut, part.ties(pattern))


def _inside(ranges: Mapping[int, select.Range], every: int) -> Passes:
    """By expert the entries in its range."""
    if not ranges:
        return {}
    parts = yield Pass(partial(_count_inside, ranges=ranges, every=every))
    return {
        d: Inside(ranges[d], [start for start, _, _ in parts], [kept[row] for _, kept, _ in parts],
                  sum(int(above[row]) for _, _, above in parts))
        for row, d in enumerate(ranges)
    }  # fmt: skip


class Inside(NamedTuple):
    """An expert's entries in a range, chunk by chunk, and how many lie above it.

    Of every chunk its start, and (place in the range, count, bits that were left out) for the
    places that have entries.
    """

    range: select.Range
    starts: list[int]
    chunks: list[Array]
    above: int

    def cut(self, rank: int) -> tuple[int, select.Cut | None, int]:
        """The pattern at a rank up to the bits left out, the cut there and how many entries it has.

        The cut is None if the rank lies outside, or entries at its place differ.
        """
        kept = _one(self.chunks)
        at, left = select.bin_of_rank(kept[1], rank)
        if rank < 1 or at < 0:
            return 0, None, 0
        place, level, left_out = (int(row[at]) for row in kept)
        last, others = divmod(left_out, 256)[::-1]
        pattern = self.range.first + (place << self.range.shift)
        cut = None if last & others else select.Cut(pattern + last, left)
        return pattern, cut, level

    def ties(self, pattern: int) -> Iterator[tuple[int, int]]:
        """(start, entries with this pattern) of every chunk."""
        place = (pattern - self.range.first) >> self.range.shift
        for start, kept in zip(self.starts, self.chunks, strict=True):
            yield start, select.entries_at(kept[0], kept[1], place)


def _count_high(
    chunk: Chunk, wanted: Mapping[int, int], every: int, size: int
) -> list[Array] | AtOnce:
    """By expert the places that have entries."""
    experts = np.array(list(wanted))
    if chunk.size == size:
        found = chunk.selected(experts, np.array(list(wanted.values())))
        if found is not None:
            return AtOnce(chunk.start, found)
    counts = select.counters(len(experts), select.HIGH_PLACES)
    chunk.read(select.count_high, experts, every, counts, share=1 / every)
    return select.occupied(counts, np.empty((0, 0), np.uint16))


def _count_inside(
    chunk: Chunk, ranges: Mapping[int, select.Range], every: int
) -> tuple[int, list[Array], Array]:
    most = max(some.places for some in ranges.values())
    counts = select.counters(len(ranges), most)
    left_out = select.notes_left_out(counts)
    above = np.zeros(len(ranges), np.int64)
    given = (np.array(list(ranges)), every, np.array(list(ranges.values())))
    chunk.read(select.count_inside, *given, counts, left_out, above, share=1 / every)
    return chunk.start, select.occupied(counts, left_out), above


def ranks(site: Site, size: int) -> list[int]:
    """How many entries of each expert stay: ⌊density · size⌋, at least one unless density is 0."""
    return [
        size if density >= 1 else max(1, int(density * size)) if density > 0 else 0
        for density in site.settings["density"]
    ]


def allowances(
    cuts: Sequence[select.Cut], counts: list[tuple[int, list[int]]]
) -> dict[int, list[select.Cut]]:
    """How many ties every chunk may keep, the earlier chunks having had theirs.

    None, or ANY_TIES, where none or all of a chunk's stay, so that they are not counted again.
    """
    left = [cut.ties for cut in cuts]
    allowed = {}
    for start, found in counts:
        allowed[start] = [
            cut._replace(ties=0 if not f else ANY_TIES if t >= f else max(0, t))
            for cut, t, f in zip(cuts, left, found, strict=True)
        ]
        left = [t - f for t, f in zip(left, found, strict=True)]
    return allowed
