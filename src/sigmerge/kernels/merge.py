"""The arithmetic of the dense operators in float32, expert by expert in order.

One call merges one chunk: it reads the stored values of all members strip by strip, thins the
rows out, combines them, and leaves the result in its stored type. What it does is a `Formula`,
which is numbers and small tables, so that one compiled function serves every operator and pool.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sigmerge.kernels import LANES, STRIP, Array
from sigmerge.kernels.jit import kernel
from sigmerge.kernels.philox import fill
from sigmerge.kernels.stored import keep_from, load, load_less, load_less_from, save

KEEP_ALL, TRIM, DROP, PRUNE = 0, 1, 2, 3
SUM, DISJOINT, OVERLAPS = 0, 1, 2
NORM: Final = 3
LEAD: Final = 4
"""Kinds of output beside the stored types, which are one number and no values: the ℓ1 norm of the
result; how many more coordinates elect + than −."""
ALL: Final = -1
"""A threshold or bound of an expert that keeps all its entries."""
ANY_TIES: Final = 2**62
"""More ties than there can be."""


class Formula(NamedTuple):
    """What is done on every strip, in this order.

    `vectors`: rows are θ_d − θ_ref rather than θ_d. `thin` is one of KEEP_ALL, TRIM, DROP, PRUNE;
    `combine` one of SUM, DISJOINT, OVERLAPS; both say below which tables they read.
    `after`, one row (divisor, factor, share) a step: τ / divisor · factor + share · θ_ref.
    """

    weights: Array
    vectors: bool
    thin: int
    cuts: Array
    """TRIM: int64 (experts, 2), the magnitude pattern of the least entry and how many ties stay."""
    draws: Array
    """DROP: int64 (experts, 3), the two key words and the bound below which a draw keeps."""
    rescale: Array
    """DROP: float32 (experts, 2), what survivors are multiplied with and divided by."""
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
    cuts: Array | None = None,
    draws: Array | None = None,
    rescale: Array | None = None,
    groups: tuple[int, int, bool] | None = None,
    combine: int = SUM,
    weighted: bool = False,
    normalize: bool = False,
    cancelled: float = 1.0,
    divisor: float = 1.0,
    factor: float = 1.0,
) -> Formula:
    """What is given decides how rows are thinned out; at most one of cuts, draws and groups."""
    thin = (
        TRIM if cuts is not None else DROP if draws is not None else PRUNE if groups else KEEP_ALL
    )
    experts = len(weights)
    return Formula(
        weights,
        vectors,
        thin,
        np.zeros((experts, 2), np.int64) if cuts is None else cuts,
        np.zeros((experts, 3), np.int64) if draws is None else draws,
        np.ones((experts, 2), np.float32) if rescale is None else rescale,
        np.array(groups or (0, 1, 0), np.int64),
        combine,
        weighted,
        normalize,
        float(cancelled),
        np.array([[divisor, factor, 0.0]], np.float32),
    )


@kernel
def merge(
    formula: Formula,
    addresses: Array,
    kinds: Array,
    start: int,
    size: int,
    tile: int,
    strip: int,
    out: np.uint64,
    kind: int,
    norms: Array,
) -> tuple[bool, bool]:
    """Merge `size` coordinates of a tensor from `start` on; whether input and output are finite.

    Members are the experts, then the reference if the formula reads it. `out` is the address of the
    result, `kind` its type; with NORM or LEAD, that number is added to norms[0] tile by tile
    instead, in a fixed order of addition.
    """
    experts = len(formula.weights)
    rows = np.empty((experts, strip), np.float32)
    total, reference = np.empty(strip, np.float32), np.empty(strip, np.float32)
    sign, share = np.empty(strip, np.float32), np.empty(strip, np.float32)
    taken, lanes = np.empty(strip, np.uint8), np.empty(LANES)
    ties = formula.cuts[:, 1].copy()
    fine, stored = True, True
    for first in range(0, size, tile):
        lanes[:] = 0
        last = min(first + tile, size)
        for begin in range(first, last, strip):
            count = min(strip, last - begin)
            here, base = total[:count], reference[:count]
            if len(addresses) > experts:
                fine &= load(addresses[experts], kinds[experts], begin, base)
            taken[:] = 0
            for d in range(experts):
                row, least = rows[d, :count], _least(formula, d, ties[d])
                if least > 0:
                    fine &= load_less_from(addresses[d], kinds[d], begin, base, least, row)
                    continue
                if formula.vectors:
                    fine &= load_less(addresses[d], kinds[d], begin, base, row)
                else:
                    fine &= load(addresses[d], kinds[d], begin, row)
                ties[d] = _thin(formula, d, row, start + begin, ties[d], taken[:count])
            if kind == LEAD:
                norms[0] += lead_of_plus(rows, formula.weights, formula.weighted, sign[:count])
                continue
            _combine(formula, rows, here, sign[:count], share[:count])
            for step in range(len(formula.after)):
                scale(here, formula.after[step, 0], formula.after[step, 1])
                if formula.after[step, 2] != 0:
                    add_scaled(here, base, formula.after[step, 2])
            if kind == NORM:
                _add_magnitudes(here, lanes, (begin - first) % LANES)
            else:
                stored &= save(here, out, kind, begin)
        if kind == NORM:
            norms[0] += _total(lanes)
    return fine, stored


@kernel
def _least(formula: Formula, expert: int, ties: int) -> np.int32:
    """The least magnitude's pattern that an expert keeps; 0 if that is not all that trims it."""
    if formula.thin != TRIM or not formula.vectors or formula.cuts[expert, 0] == ALL:
        return np.int32(0)
    if ties == 0:
        return np.int32(min(formula.cuts[expert, 0], 0x7FFFFFFE) + 1)
    return np.int32(formula.cuts[expert, 0] if ties >= ANY_TIES else 0)


@kernel
def _thin(formula: Formula, expert: int, row: Array, place: int, ties: int, taken: Array) -> int:
    """Zero what an expert loses before the combination; returns the ties it may still keep."""
    if formula.thin == TRIM and formula.cuts[expert, 0] != ALL:
        return int(trim(row, formula.cuts[expert, 0], ties))
    if formula.thin == DROP and formula.draws[expert, 2] != ALL:
        key = (formula.draws[expert, 0], formula.draws[expert, 1])
        factor, divisor = formula.rescale[expert, 0], formula.rescale[expert, 1]
        drop(row, key, place, formula.draws[expert, 2], factor, divisor)
    if formula.thin == PRUNE:
        prune_groups(row, taken, formula.groups[0], formula.groups[1], formula.groups[2] != 0)
    return ties


@kernel
def _combine(formula: Formula, rows: Array, out: Array, sign: Array, share: Array) -> None:
    if formula.combine == SUM:
        weighted_sum(rows, formula.weights, out)
    elif formula.combine == DISJOINT:
        disjoint(
            rows,
            formula.weights,
            formula.weighted,
            formula.normalize,
            formula.cancelled,
            out,
            sign,
            share,
        )
    else:
        merge_overlaps(rows, formula.weights, out)


@kernel
def norms_of_drop(
    addresses: Array, kinds: Array, start: int, size: int, draws: Array, tile: int, norms: Array
) -> bool:
    """Add the ℓ1 norms of task vectors before and after dropping to (2, experts); finite?

    `draws` as in `Formula`; members are the experts and the reference.
    """
    experts = len(draws)
    lanes = np.empty((2, experts, LANES))
    drawn, base = np.empty(STRIP, np.uint32), np.empty(STRIP, np.float32)
    row, fine = np.empty(STRIP, np.float32), True
    for first in range(0, size, tile):
        lanes[:] = 0
        last = min(first + tile, size)
        for begin in range(first, last, STRIP):
            count = min(STRIP, last - begin)
            some, less = row[:count], base[:count]
            fine &= load(addresses[experts], kinds[experts], begin, less)
            for d in range(experts):
                fine &= load_less(addresses[d], kinds[d], begin, less, some)
                _add_magnitudes(some, lanes[0, d], 0)
                if draws[d, 2] != ALL:
                    fill((draws[d, 0], draws[d, 1]), start + begin, drawn[:count])
                    _keep(some, drawn[:count], draws[d, 2])
                _add_magnitudes(some, lanes[1, d], 0)
        for d in range(experts):
            norms[0, d] += _total(lanes[0, d])
            norms[1, d] += _total(lanes[1, d])
    return fine


@kernel
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


@kernel
def add_scaled(total: Array, values: Array, factor: np.float32) -> None:
    for i in range(total.size):
        total[i] += values[i] * factor


@kernel
def scale(out: Array, divisor: float, factor: float) -> None:
    """τ · factor / divisor, in place."""
    below, above = np.float32(divisor), np.float32(factor)
    if below == 1 and above == 1:
        return
    for i in range(out.size):
        out[i] = out[i] / below * above


@kernel
def trim(values: Array, threshold: int, ties: int) -> int:
    """Zero what lies below a cut; of the entries equal to it only the first `ties` stay.

    Returns how many ties may still be kept further on.
    """
    bits, cut = values.view(np.int32), np.int32(threshold)
    if ties == 0:
        keep_from(values, np.int32(min(threshold, 0x7FFFFFFE) + 1))
        return 0
    tied = np.int32(0)
    for i in range(bits.size):
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        tied = np.int32(tied + np.int32(magnitude == cut))
        bits[i] = bits[i] if magnitude >= cut else np.int32(0)
    if tied <= ties:
        return ties - int(tied)
    for i in range(bits.size):
        if bits[i] & np.int32(0x7FFFFFFF) == cut:
            bits[i] = bits[i] if ties > 0 else np.int32(0)
            ties -= ties > 0
    return ties


@kernel
def drop(
    values: Array, key: tuple[int, int], start: int, keep: int, multiplier: float, divisor: float
) -> None:
    """Keep an entry if its draw lies below `keep` (out of 2**32), rescaled; zero the others."""
    drawn = np.empty(values.size, np.uint32)
    factor, below = np.float32(multiplier), np.float32(divisor)
    fill(key, start, drawn)
    _keep(values, drawn, keep)
    if factor != 1:
        for i in range(values.size):
            values[i] *= factor
    if below != 1:
        for i in range(values.size):
            values[i] /= below


@kernel
def _keep(values: Array, draws: Array, keep: int) -> None:
    """Zero the entries whose draw does not lie below `keep` (at most 2**32)."""
    if keep <= 0:
        values[:] = 0
        return
    bits, last = values.view(np.uint32), np.uint32(keep - 1)
    for i in range(bits.size):
        # A factor of 0 or 1, since a store under a condition does not run in vectors.
        bits[i] = np.uint32(bits[i] * np.uint32(draws[i] <= last))


@kernel
def _total(lanes: Array) -> float:
    """Lane by lane. `lanes.sum()` would load a good part of numba with this kernel."""
    total = 0.0
    for i in range(lanes.size):
        total += lanes[i]
    return total


@kernel
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
    zero = np.float32(cancelled)
    total[:], share[:] = 0, 0
    _election(values, weights, weighted, sign)
    for i in range(sign.size):
        # A sum that is not a number elects nothing.
        level = zero if sign[i] == 0 else np.float32(0)
        negative = np.float32(-1) if sign[i] < 0 else level
        sign[i] = np.float32(1) if sign[i] > 0 else negative
    for d in range(len(values)):
        _add_agreeing(values[d, : sign.size], weights[d], sign, total, share)
    if normalize:
        for i in range(total.size):
            total[i] /= share[i] if share[i] != 0 else np.float32(1)


@kernel
def lead_of_plus(values: Array, weights: Array, weighted: bool, sums: Array) -> int:
    """How many more coordinates elect + than −; see `disjoint`. `sums` is room."""
    lead = 0
    _election(values, weights, weighted, sums)
    for i in range(sums.size):
        lead += int(sums[i] > 0) - int(sums[i] < 0)
    return lead


@kernel
def _election(values: Array, weights: Array, weighted: bool, sums: Array) -> None:
    """The sums whose signs are elected."""
    sums[:] = 0
    for d in range(len(values)):
        add_scaled(sums, values[d, : sums.size], weights[d] if weighted else np.float32(1))


@kernel
def _add_agreeing(
    values: Array, weight: np.float32, sign: Array, total: Array, share: Array
) -> None:
    """Add the weighted entries of the elected sign, and their weights."""
    for i in range(values.size):
        entry = values[i] * weight
        agrees = entry * sign[i] > 0
        total[i] += entry if agrees else np.float32(0)
        share[i] += weight if agrees else np.float32(0)


@kernel
def prune_groups(values: Array, taken: Array, n: int, m: int, overlap: bool) -> None:
    """n:m pruning (CABS) of one expert's tile, in place: a group keeps its n largest free entries.

    Free means not `taken` by an earlier expert. With `overlap`, a group that runs out of free
    entries fills up from taken ones. Ties go to the lowest index. A tail shorter than m is zeroed.
    """
    bits = values.view(np.uint32)
    scores = np.empty(m, np.int64)
    whole = values.size // m * m
    for base in range(0, whole, m):
        free = 0
        for i in range(m):
            magnitude = np.int64(bits[base + i] & np.uint32(0x7FFFFFFF))
            scores[i] = magnitude if taken[base + i] == 0 else np.int64(-1)
            free += taken[base + i] == 0
        if overlap and free < n:
            # Every free entry first: they rank above all magnitudes, taken ones by magnitude.
            for i in range(m):
                magnitude = np.int64(bits[base + i] & np.uint32(0x7FFFFFFF))
                scores[i] = magnitude if taken[base + i] != 0 else np.int64(1) << 31
        _keep_largest(scores, min(n, m if overlap else free))
        for i in range(m):
            kept = scores[i] == KEPT_SCORE
            bits[base + i] = bits[base + i] if kept else np.uint32(0)
            taken[base + i] |= np.uint8(kept)
    bits[whole:] = 0


KEPT_SCORE = -2


@kernel
def _keep_largest(scores: Array, count: int) -> None:
    """Overwrite the `count` largest scores (all ≥ 0) by KEPT, the lowest index first among equals.

    The count-th largest score is built bit by bit from the top: a handful of vectorised counts.
    """
    if count == 0:
        return
    threshold = np.int64(0)
    for bit in range(31, -1, -1):
        candidate = threshold | (np.int64(1) << bit)
        reached = 0
        for i in range(scores.size):
            reached += scores[i] >= candidate
        if reached >= count:
            threshold = candidate
    above = 0
    for i in range(scores.size):
        above += scores[i] > threshold
    ties = count - above
    for i in range(scores.size):
        if scores[i] > threshold:
            scores[i] = KEPT_SCORE
        elif scores[i] == threshold and ties > 0:
            scores[i] = KEPT_SCORE
            ties -= 1


@kernel
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
