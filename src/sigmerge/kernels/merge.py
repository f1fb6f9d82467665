"""The arithmetic of the dense operators in float32, expert by expert in order.

One call merges one chunk: it reads the stored values of all members strip by strip, thins the
rows out, combines them, and leaves the result in its stored type. What it does is a `Formula`,
which is numbers and small tables, so that a compiled loop serves every pool, and all operators
that thin and combine alike.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from sigmerge.kernels import LANES, Array
from sigmerge.kernels.coordinates import keep_varying
from sigmerge.kernels.jit import inlined, kernel, part, variants
from sigmerge.kernels.rooms import room, zeros
from sigmerge.kernels.stored import load, load_less, load_less_from, save
from sigmerge.kernels.sums import add_scaled, scale, weighted_rows
from sigmerge.kernels.thinning import (
    ALL,
    RANK_COUNTS,
    RANK_ROWS,
    clear_top,
    drop,
    keep_marked,
    keep_ties,
    least_kept,
    mark,
    prune_by_rank,
    prune_groups,
    trim,
)
from sigmerge.kernels.window import NO_DRAIN, Drain, Window, drained, ready

KEEP_ALL, TRIM, DROP, PRUNE, BAND, RANK, SELECT, MARKED = 0, 1, 2, 3, 4, 5, 6, 7
SUM, DISJOINT, OVERLAPS, AGREEING = 0, 1, 2, 3
NORM: Final = 3
LEAD: Final = 4
"""Kinds of output beside the stored types, which are one number and no values: the ℓ1 norm of the
result; how many more coordinates elect + than −."""
VALUES: Final = 0
"""Stands for every stored type, where it does not matter which."""


class Formula(NamedTuple):
    """What is done on every strip, in this order.

    `vectors`: rows are θ_d − θ_ref rather than θ_d. `thin` is one of KEEP_ALL, TRIM, DROP, PRUNE,
    BAND, RANK, SELECT and MARKED; `combine` one of SUM, DISJOINT, OVERLAPS and AGREEING; both say
    below which tables they read. `after`, one row (divisor, factor, share) a step:
    τ / divisor · factor + share · θ_ref.
    """

    weights: Array
    vectors: bool
    thin: int
    cuts: Array
    """TRIM, BAND: int64 (experts, 2), the magnitude pattern of the least entry and how many ties
    stay. SELECT: one row, the same of the variances of coordinates."""
    outliers: Array
    """BAND: as cuts, of the entries that are too large to stay."""
    draws: Array
    """DROP, RANK: int64 (experts, 3), the two key words and the bound below which a draw keeps; of
    RANK only whether it is ALL or zero."""
    odds: Array
    """RANK: float64 (experts, 2), the probabilities to keep the smallest entry and the largest."""
    axis: Array
    """RANK: int64 (length, inner, whether a survivor is divided by its probability)."""
    marks: Array
    """MARKED: uint8 (strips, experts, bytes), a bit for each entry that stays."""
    rescale: Array
    """float32 (experts, 2), what survivors are multiplied with and divided by."""
    groups: Array
    """PRUNE: int64 (n, m, whether a full group is filled up from taken entries)."""
    combine: int
    weighted: bool
    """DISJOINT: whether weights count in the election."""
    normalize: bool
    """DISJOINT: whether agreeing entries are averaged."""
    cancelled: float
    """DISJOINT: the sign that a sum of zero elects, 1 or −1."""
    after: Array

    @property
    def reads_reference(self) -> bool:
        return bool(self.vectors or self.after[:, 2].any())

    @property
    def is_sum(self) -> bool:
        """Whether entries are only weighted and added up."""
        return self.thin == KEEP_ALL and self.combine == SUM and bool((self.rescale == 1).all())

    @property
    def is_copy(self) -> bool:
        """Whether the result is the one expert's values."""
        one = len(self.weights) == 1 and self.weights[0] == 1 and not self.vectors
        return one and self.is_sum and bool((self.after == (1, 1, 0)).all())

    def plus_reference(self, share: float) -> Formula:
        """Then θ_ref, or a multiple of it, is added."""
        return self._then(1.0, 1.0, share)

    def times(self, factor: float) -> Formula:
        return self._then(1.0, factor, 0.0)

    def _then(self, *step: float) -> Formula:
        return self._replace(after=np.vstack([self.after, np.array([step], np.float32)]))


def formula(
    weights: Array,
    *,
    vectors: bool = True,
    thin: int = KEEP_ALL,
    cuts: Array | None = None,
    outliers: Array | None = None,
    draws: Array | None = None,
    odds: Array | None = None,
    axis: tuple[int, int, bool] = (1, 1, False),
    marks: Array | None = None,
    rescale: Array | None = None,
    groups: tuple[int, int, bool] = (0, 1, False),
    combine: int = SUM,
    weighted: bool = False,
    normalize: bool = False,
    cancelled: float = 1.0,
    divisor: float = 1.0,
    factor: float = 1.0,
) -> Formula:
    """A formula of the tables that its steps read; the others are of no effect."""
    experts = len(weights)
    return Formula(
        weights,
        vectors,
        thin,
        np.zeros((experts, 2), np.int64) if cuts is None else cuts,
        np.zeros((experts, 2), np.int64) if outliers is None else outliers,
        np.zeros((experts, 3), np.int64) if draws is None else draws,
        np.ones((experts, 2)) if odds is None else odds,
        np.array(axis, np.int64),
        np.zeros((0, experts, 0), np.uint8) if marks is None else marks,
        np.ones((experts, 2), np.float32) if rescale is None else rescale,
        np.array(groups, np.int64),
        combine,
        weighted,
        normalize,
        float(cancelled),
        np.array([[divisor, factor, 0.0]], np.float32),
    )


def merge(
    formula: Formula,
    addresses: Array,
    kinds: Array,
    window: Window,
    start: int,
    size: int,
    tile: int,
    strip: int,
    out: np.uint64,
    kind: int,
    norms: Array,
    drain: Drain = NO_DRAIN,
) -> tuple[bool, bool]:
    """Merge `size` coordinates of a tensor from `start` on; whether input and output are finite.

    Members are the experts, then the reference if the formula reads it. `out` is the address of the
    result, `kind` its type; with NORM or LEAD, that number is added to norms[0] tile by tile
    instead, in a fixed order of addition. With a drain `out` is room for a part of the result; if
    that cannot be written, it counts as not finite.
    """
    result = kind if kind in (NORM, LEAD) else VALUES
    if result == VALUES and formula.is_sum:
        how = (formula.weights, bool(formula.vectors), formula.after)
        return weighted_rows(*how, addresses, kinds, window, size, np.uint64(out), kind, drain)
    loop = _merging(formula.thin, formula.combine, bool(formula.vectors), result)
    election = (formula.weighted, formula.normalize, formula.cancelled)
    given = (formula.weights, _tables(formula, strip), formula.rescale, election, formula.after)
    rows = room((len(formula.weights) + 4, strip), np.float32, "rows of a strip")
    where = (addresses, kinds, window, start, size, tile, rows)
    fine, stored = loop(*given, *where, np.uint64(out), kind, norms, drain)
    return fine, stored


def _tables(formula: Formula, strip: int) -> tuple[Array, ...]:
    """What a thinning reads. Of cuts a copy: a loop counts there how many ties are left.

    PRUNE also has room for a strip, where entries are marked that an earlier expert has taken, and
    RANK what it needs for sorting one.
    """
    tables: tuple[Array, ...] = ()
    if formula.thin in (TRIM, SELECT):
        tables = (formula.cuts.copy(),)
    elif formula.thin == BAND:
        tables = (formula.cuts.copy(), formula.outliers.copy())
    elif formula.thin == DROP:
        tables = (formula.draws, room(strip, np.uint32, "drawn"))
    elif formula.thin == RANK:
        spare = room((RANK_ROWS, strip), np.uint32, "ranks")
        counts = zeros(RANK_COUNTS, np.uint32, "counts of ranks")
        tables = (formula.draws, formula.axis, *_odds_by_rank(formula), spare, counts)
    elif formula.thin == PRUNE:
        tables = (formula.groups, np.empty(strip, np.uint8))
    elif formula.thin == MARKED:
        tables = (formula.marks,)
    return tables


def _odds_by_rank(formula: Formula) -> tuple[Array, Array]:
    """By expert the probability to keep the entry of a rank, and the highest draw that keeps it."""
    least, most = formula.odds[:, :1], formula.odds[:, 1:]
    length = int(formula.axis[0])
    odds = least + (most - least) / max(length - 1, 1) * np.arange(length)
    return odds, np.clip(np.ceil(odds * 2.0**32) - 1, 0, 2**32 - 1).astype(np.uint32)


@variants
def _merging(thin: int, combine: int, vectors: bool, result: int) -> Any:
    """The loop of some formulas: a branch that none of them takes is not compiled."""
    cuts = vectors and thin in (TRIM, BAND)

    @kernel
    def merging(
        weights: Array, tables: Any, rescale: Array, election: Any, after: Array, addresses: Array,
        kinds: Array, window: Window, start: int, size: int, tile: int, spare: Array,
        out: np.uint64, kind: int, norms: Array, drain: Drain,
    ) -> tuple[bool, bool]:  # fmt: skip
        experts, strip = len(weights), spare.shape[1]
        rows, filled, begun, place = spare[4:], 0, 0, out
        number, fine, stored = -1, True, True
        for first in range(0, size, tile):
            if result == NORM:
                lanes = np.zeros(LANES)
            last = min(first + tile, size)
            for begin in range(first, last, strip):
                count = min(strip, last - begin)
                here, base = spare[0, :count], spare[1, :count]
                sign, share = spare[2, :count], spare[3, :count]
                filled = ready(addresses, window, begin, begin + count, size, filled)
                number += 1
                if len(addresses) > experts:
                    fine &= load(addresses[experts], kinds[experts], begin, base)
                for d in range(experts):
                    row, least = rows[d, :count], np.int32(0)
                    if cuts:
                        least = least_kept(tables[0][d, 0], tables[0][d, 1])
                    if cuts and least > 0:
                        fine &= load_less_from(addresses[d], kinds[d], begin, base, least, row)
                    elif vectors:
                        fine &= load_less(addresses[d], kinds[d], begin, base, row)
                    else:
                        fine &= load(addresses[d], kinds[d], begin, row)
                    _thin(thin, tables, d, row, start + begin, number, least > 0)
                    _rescale(row, rescale[d, 0], rescale[d, 1])
                if thin == SELECT:
                    tables[0][0, 1] = keep_varying(rows, tables[0][0, 0], tables[0][0, 1], share)
                if result == LEAD:
                    norms[0] += lead_of_plus(rows, weights, election[0], sign)
                    continue
                _combine(combine, rows, weights, election, here, sign, share)
                for step in range(len(after)):
                    scale(here, after[step, 0], after[step, 1])
                    if after[step, 2] != 0:
                        add_scaled(here, base, after[step, 2])
                if result == NORM:
                    _add_magnitudes(here, lanes, (begin - first) % LANES)
                else:
                    stored &= save(here, place, kind, begin)
                    begun = drained(drain, out, begun, begin + count, strip, size, stored)
                    if begun < 0:
                        return fine, False
                    place = np.uint64(np.int64(out) - drain.width * begun)
            if result == NORM:
                norms[0] += _total(lanes)
        return fine, stored

    return merging


@inlined
def _thin(
    thin: int, tables: Any, expert: int, row: Array, place: int, number: int, cut: bool,
) -> None:  # fmt: skip
    """Zero what an expert loses before the combination; `cut` if that below its cut is zero.

    The row starts at flat index `place` of the tensor and is strip `number` of the chunk.
    """
    if thin == TRIM:
        _trim(row, tables[0][expert], cut)
    elif thin == BAND:
        _trim(row, tables[0][expert], cut)
        outliers = tables[1][expert]
        outliers[1] = clear_top(row, outliers[0], outliers[1])
    elif thin == DROP:
        _drop(row, tables[0][expert], place, tables[1])
    elif thin == RANK:
        draws, axis, odds, lasts, spare, counts = tables
        own, inverse = draws[expert], axis[2] != 0
        if own[2] > 0:
            prune_by_rank(
                row, axis[0], axis[1], (own[0], own[1]), place, odds[expert], lasts[expert],
                inverse, spare, counts,
            )  # fmt: skip
        else:
            _drop(row, own, place, spare[0])
    elif thin == PRUNE:
        groups, taken = tables[0], tables[1][: row.size]
        if expert == 0:
            taken[:] = 0
        prune_groups(row, taken, groups[0], groups[1], groups[2] != 0)
    elif thin == MARKED:
        keep_marked(row, tables[0][number, expert])


@part
def _trim(row: Array, cut: Array, done: bool) -> None:
    """`trim`; `done` if what lies below the cut is zero."""
    if done:
        cut[1] = keep_ties(row, cut[0], cut[1])
    elif cut[0] != ALL:
        cut[1] = trim(row, cut[0], cut[1])


@part
def _drop(row: Array, draws: Array, place: int, room: Array) -> None:
    if draws[2] != ALL:
        drop(row, (draws[0], draws[1]), place, draws[2], room)


@part
def _rescale(row: Array, factor: np.float32, divisor: np.float32) -> None:
    if factor != 1:
        for i in range(row.size):
            row[i] *= factor
    if divisor != 1:
        for i in range(row.size):
            row[i] /= divisor


@inlined
def _combine(
    combine: int, rows: Array, weights: Array, election: Any, out: Array, sign: Array, share: Array
) -> None:
    if combine == SUM:
        weighted_sum(rows, weights, out)
    elif combine == DISJOINT:
        weighted, normalize, cancelled = election
        disjoint(rows, weights, weighted, normalize, cancelled, out, sign, share)
    elif combine == OVERLAPS:
        merge_overlaps(rows, weights, out)
    else:
        agreeing_mean(rows, weights, out, sign, share)


def norms_of_thinning(
    addresses: Array,
    kinds: Array,
    window: Window,
    start: int,
    size: int,
    formula: Formula,
    tile: int,
    strip: int,
    norms: Array,
    marks: Array,
) -> bool:
    """Add the ℓ1 norms of task vectors before and after thinning to (2, experts); finite?

    Members are the experts and the reference. What stays is marked for MARKED, where there is room.
    """
    loop = _measuring(formula.thin)
    given = (addresses, kinds, window, start, size, _tables(formula, strip), tile)
    return bool(loop(*given, strip, norms, marks))


@variants
def _measuring(thin: int) -> Any:
    """The loop of one way to thin out, as `_merging`."""

    @kernel
    def measuring(
        addresses: Array, kinds: Array, window: Window, start: int, size: int, tables: Any,
        tile: int, strip: int, norms: Array, marks: Array,
    ) -> bool:  # fmt: skip
        experts, number, fine, filled = norms.shape[1], -1, True, 0
        lanes = np.empty((2, experts, LANES))
        base, row = np.empty(strip, np.float32), np.empty(strip, np.float32)
        for first in range(0, size, tile):
            lanes[:] = 0
            last = min(first + tile, size)
            for begin in range(first, last, strip):
                count, shift = min(strip, last - begin), (begin - first) % LANES
                some, less = row[:count], base[:count]
                filled = ready(addresses, window, begin, begin + count, size, filled)
                number += 1
                fine &= load(addresses[experts], kinds[experts], begin, less)
                for d in range(experts):
                    fine &= load_less(addresses[d], kinds[d], begin, less, some)
                    _add_magnitudes(some, lanes[0, d], shift)
                    _thin(thin, tables, d, some, start + begin, number, False)
                    _add_magnitudes(some, lanes[1, d], shift)
                    if marks.size:
                        mark(some, marks[number, d])
            for d in range(experts):
                norms[0, d] += _total(lanes[0, d])
                norms[1, d] += _total(lanes[1, d])
        return fine

    return measuring


@part
def _add_magnitudes(values: Array, lanes: Array, shift: int) -> None:
    """Entry i goes to lane shift + i mod LANES: a fixed order of addition that runs in vectors."""
    if shift:
        for i in range(values.size):
            lanes[(shift + i) % LANES] += np.float64(abs(values[i]))
        return
    for begin in range(0, values.size, LANES):
        part = values[begin : begin + LANES]
        for i in range(part.size):
            lanes[i] += np.float64(abs(part[i]))


@kernel
def norm(values: Array) -> float:
    """ℓ1 norm of a tile."""
    lanes = np.zeros(LANES)
    _add_magnitudes(values, lanes, 0)
    return _total(lanes)


@kernel
def weighted_sum(values: Array, weights: Array, out: Array) -> None:
    """Σ_d w_d v_d."""
    first = values[0, : out.size]
    for i in range(out.size):
        out[i] = first[i] * weights[0]
    for d in range(1, len(values)):
        add_scaled(out, values[d, : out.size], weights[d])


@part
def _total(lanes: Array) -> float:
    """Lane by lane. `lanes.sum()` would load a good part of numba with this kernel."""
    total = 0.0
    for i in range(lanes.size):
        total += lanes[i]
    return total


@part
def disjoint(
    values: Array,
    weights: Array,
    weighted: bool,
    normalize: bool,
    cancelled: float,
    total: Array,
    sign: Array,
    share: Array,
) -> None:
    """Elect a sign per coordinate, then sum (or average) the weighted entries that agree.

    The sign is that of Σ w_d v_d, or of Σ v_d in the unweighted election; a zero sum elects
    `cancelled`, 1 or −1. Zeros never agree. `sign` and `share` are room.
    """
    last = len(values) - 1
    _election(values, weights, weighted, sign)
    _begin_agreeing(values[0, : sign.size], weights[0], cancelled, sign, total, share)
    for d in range(1, len(values)):
        row = values[d, : sign.size]
        if normalize and d == last:
            _average_agreeing(row, weights[d], sign, total, share)
        else:
            _add_agreeing(row, weights[d], sign, total, share)
    if normalize and last == 0:
        for i in range(total.size):
            total[i] = _mean(total[i], share[i])


@part
def lead_of_plus(values: Array, weights: Array, weighted: bool, sums: Array) -> int:
    """How many more coordinates elect + than −; see `disjoint`. `sums` is room."""
    lead = 0
    _election(values, weights, weighted, sums)
    for i in range(sums.size):
        lead += int(sums[i] > 0) - int(sums[i] < 0)
    return lead


@part
def _election(values: Array, weights: Array, weighted: bool, sums: Array) -> None:
    """The sums whose signs are elected; the sign of a zero does not matter."""
    if weighted:
        weighted_sum(values, weights, sums)
        return
    first = values[0, : sums.size]
    for i in range(sums.size):
        sums[i] = first[i]
    for d in range(1, len(values)):
        row = values[d, : sums.size]
        for i in range(sums.size):
            sums[i] += row[i]


@part
def _begin_agreeing(
    values: Array, weight: np.float32, cancelled: float, sign: Array, total: Array, share: Array
) -> None:
    """Turn sums into elected signs, and begin totals and shares with what agrees."""
    zero = np.float32(cancelled)
    for i in range(values.size):
        elected = zero if sign[i] * zero >= 0 else -zero
        # A sum that is not a number elects nothing.
        sign[i] = elected if sign[i] == sign[i] else np.float32(0)
        total[i], share[i] = _agreeing(values[i], weight, sign[i])


@part
def _add_agreeing(
    values: Array, weight: np.float32, sign: Array, total: Array, share: Array
) -> None:
    for i in range(values.size):
        entry, own = _agreeing(values[i], weight, sign[i])
        total[i] += entry
        share[i] += own


@part
def _average_agreeing(
    values: Array, weight: np.float32, sign: Array, total: Array, share: Array
) -> None:
    """Add the last expert's, then divide: one loop, since others add while a division runs."""
    for i in range(values.size):
        entry, own = _agreeing(values[i], weight, sign[i])
        total[i] = _mean(np.float32(total[i] + entry), np.float32(share[i] + own))


@part
def _agreeing(
    value: np.float32, weight: np.float32, sign: np.float32
) -> tuple[np.float32, np.float32]:
    """A weighted entry and its weight, or zeros if it is not of the elected sign."""
    entry = np.float32(value * weight)
    agrees = entry * sign > 0
    return (entry if agrees else np.float32(0)), (weight if agrees else np.float32(0))


@part
def _mean(total: np.float32, share: np.float32) -> np.float32:
    return total / (share if share != 0 else np.float32(1))


@part
def merge_overlaps(values: Array, weights: Array, out: Array) -> None:
    """One claimant: its weighted entry. Several: the mean of those that agree with their sum."""
    experts = len(values)
    for i in range(out.size):
        total = np.float32(0)
        for d in range(experts):
            total += values[d, i] * weights[d]
        agreeing, count = np.float32(0), 0
        for d in range(experts):
            entry = values[d, i] * weights[d]
            if (entry > 0 and total >= 0) or (entry < 0 and total < 0):
                agreeing += entry
                count += 1
        out[i] = agreeing / np.float32(count) if count > 0 else np.float32(0)


@part
def agreeing_mean(values: Array, weights: Array, out: Array, sign: Array, share: Array) -> None:
    """The weighted mean of the entries whose sign is that of their plain sum; a sum of 0 is +.

    `sign` and `share` are room.
    """
    out[:], share[:] = 0, 0
    _election(values, weights, False, sign)
    for i in range(sign.size):
        sign[i] = np.float32(1) if sign[i] >= 0 else np.float32(-1)
    for d in range(len(values)):
        row, weight = values[d, : out.size], weights[d]
        for i in range(out.size):
            agrees = row[i] * sign[i] > 0
            out[i] += row[i] * weight if agrees else np.float32(0)
            share[i] += weight if agrees else np.float32(0)
    for i in range(out.size):
        out[i] /= max(share[i], np.float32(1e-6))
