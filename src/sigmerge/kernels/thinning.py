"""Thinning a task vector out: by cuts, by groups, at random, at random with a rank's odds."""

from __future__ import annotations

from typing import Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import part
from sigmerge.kernels.philox import fill
from sigmerge.kernels.raw import bits_as, lowest_bit
from sigmerge.kernels.select import MAGNITUDE
from sigmerge.kernels.stored import keep_from

ALL: Final = -1
"""A threshold or bound of an expert that keeps all its entries."""
ANY_TIES: Final = 2**62
"""More ties than there can be."""
DIGIT: Final = 11
"""Bits of a key that one pass of a sort looks at, at most."""
COUNTED_BITS: Final = 20
"""Bits of a key that has a count of its own, at most."""
RANK_COUNTS: Final = (1 << COUNTED_BITS) + (1 << COUNTED_BITS - 5) + (1 << COUNTED_BITS - 10)
"""A count for each such key, a bit for each in words of 32, and a bit for each word."""
RANK_ROWS: Final = 5
FIVE, LOWEST = np.uint32(5), np.uint32(31)


@part
def trim(values: Array, threshold: int, ties: int) -> int:
    """Zero what lies below a cut; of the entries equal to it only the first `ties` stay.

    Returns how many ties may still be kept further on.
    """
    keep_from(values, least_kept(threshold, ties))
    return keep_ties(values, threshold, ties)


@part
def least_kept(threshold: int, ties: int) -> np.int32:
    """The least magnitude's pattern that a cut keeps, some or all of its ties among them.

    Not above zero if it keeps ALL.
    """
    return np.int32(threshold if ties > 0 else min(threshold, 0x7FFFFFFE) + 1)


@part
def keep_ties(values: Array, threshold: int, ties: int) -> int:
    """The second half of `trim`, where what lies below the cut is zero."""
    bits, cut = bits_as(values, np.uint32), np.uint32(threshold)
    if ties == 0 or ties >= ANY_TIES:
        return ties
    tied = np.uint32(0)
    for i in range(bits.size):
        tied = np.uint32(tied + np.uint32(np.uint32(bits[i] & MAGNITUDE) == cut))
    if int(tied) <= ties:
        return ties - int(tied)
    for i in range(bits.size):
        if np.uint32(bits[i] & MAGNITUDE) == cut:
            bits[i] = bits[i] if ties > 0 else np.uint32(0)
            ties -= ties > 0
    return ties


@part
def clear_top(values: Array, threshold: int, ties: int) -> int:
    """Zero what lies above a cut, and the first `ties` of the entries equal to it; as `trim`."""
    bits, cut = bits_as(values, np.int32), np.int32(threshold)
    if 0 < ties < ANY_TIES:
        for i in range(bits.size):
            magnitude = bits[i] & np.int32(0x7FFFFFFF)
            tied = magnitude == cut and ties > 0
            ties -= int(tied)
            bits[i] = np.int32(0) if magnitude > cut or tied else bits[i]
        return ties
    most = np.int32(cut - np.int32(ties > 0))
    for i in range(bits.size):
        bits[i] = np.int32(bits[i] * np.int32(bits[i] & np.int32(0x7FFFFFFF) <= most))
    return ties


@part
def drop(values: Array, key: tuple[int, int], start: int, keep: int, room: Array) -> None:
    """Keep an entry if its draw lies below `keep` (at most 2**32); zero the others."""
    if keep <= 0:
        values[:] = 0
        return
    drawn = room[: values.size]
    fill(key, start, drawn)
    bits, last = bits_as(values, np.uint32), np.uint32(keep - 1)
    for i in range(bits.size):
        # A factor of 0 or 1, since a store under a condition does not run in vectors.
        bits[i] = np.uint32(bits[i] * np.uint32(drawn[i] <= last))


@part
def prune_groups(values: Array, taken: Array, n: int, m: int, overlap: bool) -> None:
    """n:m pruning (CABS) of one expert's tile, in place: a group keeps its n largest free entries.

    Free means not `taken` by an earlier expert. With `overlap`, a group that runs out of free
    entries fills up from taken ones. Ties go to the lowest index. A tail shorter than m is zeroed.
    """
    bits = bits_as(values, np.uint32)
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


@part
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


@part
def prune_by_rank(
    values: Array,
    length: int,
    inner: int,
    key: tuple[int, int],
    start: int,
    odds: Array,
    lasts: Array,
    inverse: bool,
    room: Array,
    counts: Array,
) -> None:
    """Keep each entry with a probability that depends on its rank.

    Ranks are those of magnitudes along an axis; equal ones rank by index. `lasts` has the highest
    draw that keeps the entry of a rank. With `inverse` a survivor is divided by its probability,
    which `odds` has. Seen along the axis `values` are (outer, length, inner), and `start` is the
    flat index of the first. `room`: RANK_ROWS rows, the first as long as `values`, the others as
    the axis. `counts`: RANK_COUNTS zeros.
    """
    drawn, bits = room[0, : values.size], bits_as(values, np.uint32)
    fill(key, start, drawn)
    for vector in range(values.size // length):
        first = vector // inner * length * inner + vector % inner
        if inner == 1:  # contiguous, which the compiler must know
            own, draws = bits[first : first + length], drawn[first : first + length]
            _prune(own, values[first : first + length], draws, odds, lasts, inverse, room, counts)
        else:
            apart, theirs = bits[first::inner][:length], drawn[first::inner][:length]
            entries = values[first::inner][:length]
            _prune(apart, entries, theirs, odds, lasts, inverse, room, counts)


@part
def _prune(
    bits: Array, values: Array, draws: Array, odds: Array, lasts: Array, inverse: bool, room: Array,
    counts: Array,
) -> None:  # fmt: skip
    """`prune_by_rank` of one vector, also given as bits."""
    length = bits.size
    keys, ranks, seen = room[1, :length], room[2, :length], room[3, :length]
    for k in range(length):
        keys[k] = bits[k] & MAGNITUDE
    found = _rank(keys, ranks, seen, room[4, :length], counts)
    # One table a loop: a loop that looks up in two, one place given by the other, takes twice as
    # long as both.
    for k in range(length):
        ranks[k] += counts[keys[k]]
    highest = keys
    for k in range(length):
        highest[k] = lasts[ranks[k]]
    if inverse:
        for k in range(length):
            values[k] /= np.float32(odds[ranks[k]])
    for k in range(length):
        bits[k] = np.uint32(bits[k] * np.uint32(draws[k] <= highest[k]))
    for i in range(found):
        counts[seen[i]] = np.uint32(0)


@part
def mark(values: Array, marks: Array) -> None:
    """A bit for each entry, eight to a byte: whether it is not zero.

    The n-th bits of all bytes are those of the n-th eighth of the entries, so that both loops run
    in vectors.
    """
    bits = bits_as(values, np.uint32)
    width = -(-bits.size // 8)
    marks[:width] = 0
    for eighth in range(8):
        some = bits[eighth * width : (eighth + 1) * width]
        for i in range(some.size):
            marks[i] |= np.uint8(np.uint8(some[i] != 0) << np.uint8(eighth))


@part
def keep_marked(values: Array, marks: Array) -> None:
    """Zero the entries whose bit is not set."""
    bits = bits_as(values, np.uint32)
    width = -(-bits.size // 8)
    for eighth in range(8):
        some = bits[eighth * width : (eighth + 1) * width]
        for i in range(some.size):
            some[i] *= np.uint32((marks[i] >> np.uint8(eighth)) & np.uint8(1))


@part
def _rank(keys: Array, ranks: Array, seen: Array, spare: Array, counts: Array) -> int:
    """Rank keys, equal ones by index: the rank of entry i is ranks[i] + counts[keys[i]].

    Few bits tell the differences of stored halves apart: each such key has a count. Others are
    sorted, and become the key 0. Returns how many keys of `seen` have counts; the caller clears
    them.
    """
    bits = _squeeze(keys)
    if bits > COUNTED_BITS:
        _sort(keys, bits, seen, spare, ranks)
        keys[:] = 0
        return 0
    found = 0
    for i in range(keys.size):
        key = keys[i]
        before = counts[key]
        ranks[i], counts[key] = before, np.uint32(before + np.uint32(1))
        # Adding 0 or 1 keeps the loop free of a branch that no one can predict.
        seen[found] = key
        found += int(before == 0)
    _place(counts, seen[:found], bits)
    return found


@part
def _place(counts: Array, seen: Array, bits: int) -> None:
    """Turn the counts of the keys that were seen into sums of all before.

    A bit for each key, and one for each word of those, bring them in order.
    """
    words, groups = (
        counts[1 << COUNTED_BITS :],
        counts[(1 << COUNTED_BITS) + (1 << COUNTED_BITS - 5) :],
    )
    for i in range(seen.size):
        word = seen[i] >> FIVE
        words[word] |= np.uint32(1) << (seen[i] & LOWEST)
        groups[word >> FIVE] |= np.uint32(1) << (word & LOWEST)
    total = np.uint32(0)
    for group in range(1 << max(bits - 10, 0)):
        left = groups[group]
        groups[group] = np.uint32(0)
        while left != 0:
            word = np.uint32(group << 5) + lowest_bit(left)
            left = np.uint32(left & np.uint32(left - np.uint32(1)))
            keys = words[word]
            words[word] = np.uint32(0)
            while keys != 0:
                key = np.uint32(word << FIVE) + lowest_bit(keys)
                keys = np.uint32(keys & np.uint32(keys - np.uint32(1)))
                total, counts[key] = np.uint32(total + counts[key]), total


@part
def _sort(keys: Array, bits: int, source: Array, target: Array, ranks: Array) -> None:
    """Rank keys of so many bits by counting, a digit at a time; the last pass leaves ranks.

    `source` and `target` are room.
    """
    length = keys.size
    passes = max(1, -(-bits // DIGIT))
    width = np.uint32(-(-bits // passes))
    mask = np.uint32((np.uint32(1) << width) - np.uint32(1))
    for i in range(length):
        source[i] = np.uint32(i)
    for number in range(passes):
        shift = np.uint32(number * width)
        places = np.zeros(1 << width, np.uint32)
        for i in range(length):
            places[(keys[i] >> shift) & mask] += np.uint32(1)
        before = np.uint32(0)
        for digit in range(places.size):
            before, places[digit] = np.uint32(before + places[digit]), before
        last = number == passes - 1
        for i in range(length):
            k = source[i]
            digit = (keys[k] >> shift) & mask
            place = places[digit]
            places[digit] = np.uint32(place + np.uint32(1))
            if last:
                ranks[k] = place
            else:
                target[place] = k
        source, target = target, source


@part
def _squeeze(keys: Array) -> int:
    """Make keys small in the same order; returns how many bits the highest has.

    Bits that are zero in all of them go, and the gap between zero and the lowest other key.
    """
    lowest, highest, ones = np.uint32(0xFFFFFFFF), np.uint32(0), np.uint32(0)
    for i in range(keys.size):
        lowest = min(lowest, np.uint32(keys[i] - np.uint32(1)))
        highest = max(highest, keys[i])
        ones = np.uint32(ones | keys[i])
    if ones == 0:
        return 0
    shift = lowest_bit(ones)
    gap = np.uint32(lowest >> shift)
    for i in range(keys.size):
        keys[i] = np.uint32((keys[i] >> shift) - gap) if keys[i] != 0 else np.uint32(0)
    left = 0
    while np.int64((highest >> shift) - gap) >> left:
        left += 1
    return left
