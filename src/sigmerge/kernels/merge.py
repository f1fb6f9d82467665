"""The arithmetic of the dense operators on one tile, in float32, expert by expert in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from sigmerge.kernels.convert import all_finite
from sigmerge.kernels.jit import kernel
from sigmerge.kernels.philox import fill

Array = np.ndarray[Any, Any]

STRIP = 1024
"""Coordinates that stay in the first-level cache while all experts pass over them."""

LANES = 64
"""Partial sums of a norm."""


@kernel
def add_stored(values: Array, weight: float, fresh: bool, out: Array) -> bool:
    """w θ, added to `out` unless that is fresh; False if not all values are finite.

    Values as they are stored: bfloat16 bit patterns, or float32. They are widened in the
    loop that adds them: a pass over memory less for every expert.
    """
    factor = np.float32(weight)
    if values.itemsize == 4:
        for i in range(out.size):
            entry = np.float32(values[i]) * factor
            out[i] = entry if fresh else out[i] + entry
        return bool(all_finite(values))
    largest = np.uint16(0)
    for i in range(out.size):
        bits = np.uint32(np.uint32(values[i]) << np.uint32(16))
        entry = bits.view(np.float32) * factor
        out[i] = entry if fresh else out[i] + entry
        largest = max(largest, np.uint16(np.uint16(values[i]) & np.uint16(0x7FFF)))
    return bool(largest < np.uint16(0x7F80))


@kernel
def add_difference(values: Array, reference: Array, weight: float, fresh: bool, out: Array) -> bool:
    """w (θ − θ_ref), added to `out` unless that is fresh; otherwise as `add_stored`."""
    factor = np.float32(weight)
    if values.itemsize == 4:
        for i in range(out.size):
            entry = (np.float32(values[i]) - np.float32(reference[i])) * factor
            out[i] = entry if fresh else out[i] + entry
        return bool(all_finite(values) & all_finite(reference))
    largest = np.uint16(0)
    for i in range(out.size):
        bits = np.uint32(np.uint32(values[i]) << np.uint32(16))
        less = np.uint32(np.uint32(reference[i]) << np.uint32(16))
        entry = (bits.view(np.float32) - less.view(np.float32)) * factor
        out[i] = entry if fresh else out[i] + entry
        largest = max(largest, np.uint16(np.uint16(values[i]) & np.uint16(0x7FFF)))
        largest = max(largest, np.uint16(np.uint16(reference[i]) & np.uint16(0x7FFF)))
    return bool(largest < np.uint16(0x7F80))


@kernel
def weighted_sum(values: Array, weights: Array, out: Array) -> None:
    """Σ_d w_d v_d."""
    for begin in range(0, out.size, STRIP):
        total = out[begin : begin + STRIP]
        first = values[0, begin : begin + STRIP]
        for i in range(total.size):
            total[i] = first[i] * weights[0]
        for d in range(1, len(values)):
            _add_scaled(total, values[d, begin : begin + STRIP], weights[d])


@kernel
def _add_scaled(total: Array, values: Array, factor: np.float32) -> None:
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
    bits = values.view(np.uint32)
    cut = np.uint32(threshold)
    for i in range(bits.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        bits[i] = bits[i] if magnitude >= cut else np.uint32(0)
    if ties >= bits.size:
        return ties - equal_count(bits, cut)
    for i in range(bits.size):
        if bits[i] & np.uint32(0x7FFFFFFF) == cut:
            if ties > 0:
                ties -= 1
            else:
                bits[i] = np.uint32(0)
    return ties


@kernel
def equal_count(bits: Array, cut: int) -> int:
    count = 0
    for i in range(bits.size):
        count += (bits[i] & np.uint32(0x7FFFFFFF)) == cut
    return count


@kernel
def drop(
    values: Array, key: tuple[int, int], start: int, keep: int, multiplier: float, divisor: float
) -> None:
    """Keep an entry if its draw lies below `keep` (out of 2**32), rescaled; zero the others."""
    draws = np.empty(STRIP, np.uint32)
    factor, below = np.float32(multiplier), np.float32(divisor)
    for begin in range(0, values.size, STRIP):
        part = values[begin : begin + STRIP]
        drawn = draws[: part.size]
        fill(key, start + begin, drawn)
        _keep_below(drawn, keep)
        for i in range(part.size):
            part[i] = part[i] * factor if drawn[i] else np.float32(0)
        if below != 1:
            for i in range(part.size):
                part[i] /= below


@kernel
def _keep_below(draws: Array, keep: int) -> None:
    """Draws become 1 if they lie below `keep` (at most 2**32), else 0."""
    last = np.uint32(max(keep, 1) - 1)
    some = np.uint32(keep > 0)
    for i in range(draws.size):
        draws[i] = some if draws[i] <= last else np.uint32(0)


@kernel
def norms_of_drop(
    values: Array, key: tuple[int, int], start: int, keep: int
) -> tuple[float, float]:
    """ℓ1 norms of a tile before and after dropping."""
    draws = np.empty(STRIP, np.uint32)
    kept = np.empty(STRIP, np.float32)
    before, after = np.zeros(LANES), np.zeros(LANES)
    for begin in range(0, values.size, STRIP):
        part = values[begin : begin + STRIP]
        drawn, some = draws[: part.size], kept[: part.size]
        fill(key, start + begin, drawn)
        _keep_below(drawn, keep)
        for i in range(part.size):
            some[i] = part[i] if drawn[i] else np.float32(0)
        _add_magnitudes(part, before)
        _add_magnitudes(some, after)
    return _total(before), _total(after)


@kernel
def norm(values: Array) -> float:
    """ℓ1 norm of a tile."""
    lanes = np.zeros(LANES)
    _add_magnitudes(values, lanes)
    return _total(lanes)


@kernel
def _total(lanes: Array) -> float:
    """Lane by lane. `lanes.sum()` would load a good part of numba with this kernel."""
    total = 0.0
    for i in range(lanes.size):
        total += lanes[i]
    return total


@kernel
def _add_magnitudes(values: Array, lanes: Array) -> None:
    """Entry i goes to lane i mod LANES: a fixed order of addition that runs in vectors."""
    for begin in range(0, values.size, LANES):
        part = values[begin : begin + LANES]
        for i in range(part.size):
            lanes[i] += np.float64(abs(part[i]))


@kernel
def disjoint_merge(
    values: Array,
    weights: Array,
    weighted_election: bool,
    normalize: bool,
    cancelled: float,
    out: Array,
) -> None:
    """Elect a sign per coordinate, then sum (or average) the weighted entries that agree.

    The sign is that of Σ w_d v_d, or of Σ v_d in the unweighted election; a zero sum elects
    `cancelled`, 1 or −1. Zeros never agree.
    """
    zero = np.float32(cancelled)
    signs, shares = np.empty(STRIP, np.float32), np.empty(STRIP, np.float32)
    for begin in range(0, out.size, STRIP):
        total = out[begin : begin + STRIP]
        sign, share = signs[: total.size], shares[: total.size]
        sign[:], total[:], share[:] = 0, 0, 0
        for d in range(len(values)):
            weight = weights[d] if weighted_election else np.float32(1)
            _add_scaled(sign, values[d, begin : begin + STRIP], weight)
        for i in range(sign.size):
            # A sum that is not a number elects nothing.
            level = zero if sign[i] == 0 else np.float32(0)
            negative = np.float32(-1) if sign[i] < 0 else level
            sign[i] = np.float32(1) if sign[i] > 0 else negative
        for d in range(len(values)):
            _add_agreeing(values[d, begin : begin + STRIP], weights[d], sign, total)
            if normalize:
                _add_shares(values[d, begin : begin + STRIP], weights[d], sign, share)
        if normalize:
            for i in range(total.size):
                total[i] /= share[i] if share[i] != 0 else np.float32(1)


@kernel
def lead_of_plus(values: Array, weights: Array, weighted_election: bool) -> int:
    """How many more coordinates elect + than −; see `disjoint_merge`."""
    room, lead = np.empty(STRIP, np.float32), 0
    for begin in range(0, values.shape[1], STRIP):
        sums = room[: min(STRIP, values.shape[1] - begin)]
        sums[:] = 0
        for d in range(len(values)):
            weight = weights[d] if weighted_election else np.float32(1)
            _add_scaled(sums, values[d, begin : begin + STRIP], weight)
        for i in range(sums.size):
            lead += (sums[i] > 0) - (sums[i] < 0)
    return lead


@kernel
def _add_agreeing(values: Array, weight: np.float32, sign: Array, total: Array) -> None:
    """Add the weighted entries of the elected sign."""
    for i in range(values.size):
        entry = values[i] * weight
        total[i] += entry if entry * sign[i] > 0 else np.float32(0)


@kernel
def _add_shares(values: Array, weight: np.float32, sign: Array, share: Array) -> None:
    """Add the weights of the entries of the elected sign."""
    for i in range(values.size):
        share[i] += weight if values[i] * weight * sign[i] > 0 else np.float32(0)


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
            kept = scores[i] == KEPT
            bits[base + i] = bits[base + i] if kept else np.uint32(0)
            taken[base + i] |= np.uint8(kept)
    bits[whole:] = 0


KEPT = -2


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
            scores[i] = KEPT
        elif scores[i] == threshold and ties > 0:
            scores[i] = KEPT
            ties -= 1


@kernel
def merge_overlaps(values: Array, weights: Array, out: Array) -> None:
    """One claimant: its weighted entry. Several: the mean of those that agree with their sum."""
    experts, size = values.shape
    for i in range(size):
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
