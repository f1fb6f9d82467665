"""Rules that look at one coordinate of all members at a time, in float32."""

from __future__ import annotations

from typing import Final

import numpy as np

from sigmerge.kernels import LANES, STRIP, Array
from sigmerge.kernels.jit import kernel, part
from sigmerge.kernels.raw import bits_as
from sigmerge.kernels.stored import load, load_less
from sigmerge.kernels.thinning import ALL, trim
from sigmerge.kernels.window import Window, ready

SUMMED: Final = 256
"""Coordinates whose sums stay in the first cache."""
UNSURE = np.float32(-1)
"""Stands for a variance that is computed later."""


@part
def variance(values: Array, out: Array) -> None:
    """The variance of each coordinate over the rows, as `_variance_at` computes it.

    Two divisions take longer than all else. Σ v² and Σ v give the variance but for an error that
    Σ v² bounds; where it rounds to one float32 with the error and without, that is the variance.
    """
    rows, sums, squares = len(values), np.empty(SUMMED), np.empty(SUMMED)
    share = 1 / (rows * rows)
    for begin in range(0, out.size, SUMMED):
        here = out[begin : begin + SUMMED]
        _add_powers(values, begin, sums[: here.size], squares[: here.size])
        unsure = np.uint32(0)
        for i in range(here.size):
            found, error = (squares[i] * rows - sums[i] * sums[i]) * share, squares[i] * 2.0**-46
            most = np.float32(found + error)
            sure = np.float32(found - error) == most
            here[i] = most if sure else UNSURE
            unsure += np.uint32(not sure)
        if unsure:
            _settle(values, begin, here)


@part
def _add_powers(values: Array, begin: int, sums: Array, squares: Array) -> None:
    """Σ v and Σ v² of each coordinate from `begin` on, in the type of the sums."""
    row = values[0, begin : begin + sums.size]
    for i in range(sums.size):
        sums[i] = row[i]
        squares[i] = sums[i] * sums[i]
    for d in range(1, len(values)):
        other = values[d, begin : begin + sums.size]
        for i in range(sums.size):
            value = sums.dtype.type(other[i])
            sums[i] += value
            squares[i] += value * value


@part
def _settle(values: Array, begin: int, out: Array) -> None:
    """Compute the variances that are UNSURE."""
    for i in range(out.size):
        if out[i] < 0:
            out[i] = _variance_at(values, begin + i)


@part
def _variance_at(values: Array, i: int) -> np.float32:
    """The variance of a coordinate, computed in float64, row by row. A NaN has no sign, either:
    tables of counts have a place for 31 bits."""
    rows, mean, total = len(values), 0.0, 0.0
    for d in range(rows):
        mean += np.float64(values[d, i])
    mean /= rows
    for d in range(rows):
        apart = np.float64(values[d, i]) - mean
        total += apart * apart
    return np.float32(abs(total / rows))


@part
def _variance_within(values: Array, least: int, most: int, out: Array) -> None:
    """The variances between two patterns; 0 for those below, and infinity for those above.

    As `variance`, in float32, with a bound on its errors.
    """
    low, high = np.uint32(least).view(np.float32), np.uint32(most).view(np.float32)
    if not (low > np.float32(1e-30) and high < np.float32(1e30)):  # where squares are exact enough
        variance(values, out)
        return
    rows = len(values)
    sums, squares = np.empty(SUMMED, np.float32), np.empty(SUMMED, np.float32)
    times, error = np.float32(rows), np.float32(rows * (4 * rows + 16) * 2.0**-24)
    low *= np.float32(rows * rows * (1 - 2.0**-20))
    high *= np.float32(rows * rows * (1 + 2.0**-20))
    for begin in range(0, out.size, SUMMED):
        here = out[begin : begin + SUMMED]
        _add_powers(values, begin, sums[: here.size], squares[: here.size])
        unsure = np.uint32(0)
        for i in range(here.size):
            found = np.float32(squares[i] * times) - np.float32(sums[i] * sums[i])
            slack = np.float32(squares[i] * error)
            # Infinite is also a product that only just overflowed, and the other did not.
            below, above = found + slack < low, high < found - slack < np.float32(np.inf)
            inside = UNSURE if not above else np.float32(np.inf)
            here[i] = np.float32(0) if below else inside
            unsure += np.uint32(not (below or above))
        if unsure:
            _settle(values, begin, here)


@kernel
def keep_varying(values: Array, threshold: int, ties: int, room: Array) -> int:
    """Zero the coordinates whose variance lies below a cut; as `trim`."""
    if threshold == ALL:
        return ties
    _variance_within(values, threshold, threshold, room)
    left = int(trim(room, threshold, ties))
    for d in range(len(values)):
        bits = bits_as(values[d, : room.size], np.uint32)
        for i in range(room.size):
            # A factor of 0 or 1, since a choice between floats does not run in vectors.
            bits[i] = np.uint32(bits[i] * np.uint32(room[i] != 0))
    return left


@kernel
def count_variances(
    addresses: Array, kinds: Array, window: Window, start: int, size: int, upper: int, counts: Array
) -> bool:
    """Count the task vectors' variances by the upper 16 bits of their 31-bit pattern, or the lower.

    The lower 15 of those whose upper bits are `upper`, unless that is −1; then the last place
    counts zeros. Members are the experts and the reference; returns whether all is finite.
    """
    rows, base = np.empty((len(addresses) - 1, STRIP), np.float32), np.empty(STRIP, np.float32)
    spread, fine, zeros, filled = np.empty(STRIP, np.float32), True, 0, 0
    for begin in range(0, size, STRIP):
        count = min(STRIP, size - begin)
        filled = ready(addresses, window, begin, begin + count, size, filled)
        fine &= _load_vectors(addresses, kinds, begin, base[:count], rows)
        bits = spread[:count].view(np.uint32)
        if upper < 0:
            variance(rows, spread[:count])
            for i in range(count):
                counts[bits[i] >> np.uint32(15)] += 1
            for i in range(count):
                zeros += int(bits[i] == 0)
        else:
            _variance_within(rows, upper << 15, (upper + 1) << 15, spread[:count])
            for i in range(count):
                if np.int64(bits[i] >> np.uint32(15)) == upper:
                    counts[bits[i] & np.uint32(0x7FFF)] += 1
    if upper < 0:
        counts[-1] += zeros
    return fine


@kernel
def squares_of_varying(
    addresses: Array,
    kinds: Array,
    window: Window,
    start: int,
    size: int,
    threshold: int,
    ties: int,
    tile: int,
    total: Array,
) -> bool:
    """Add each task vector's Σ Δ² over what `keep_varying` keeps: float64, in lanes of a tile.

    Members are the experts and the reference; returns whether everything read is finite.
    """
    rows, base = np.empty((len(total), STRIP), np.float32), np.empty(STRIP, np.float32)
    room, lanes = np.empty(STRIP, np.float32), np.empty((len(total), LANES))
    fine, filled = True, 0
    for first in range(0, size, tile):
        lanes[:] = 0
        last = min(first + tile, size)
        for begin in range(first, last, STRIP):
            count = min(STRIP, last - begin)
            filled = ready(addresses, window, begin, begin + count, size, filled)
            fine &= _load_vectors(addresses, kinds, begin, base[:count], rows)
            ties = keep_varying(rows, threshold, ties, room[:count])
            for d in range(len(total)):
                sums = lanes[d]
                for some in range(0, count, LANES):
                    part = rows[d, some : min(some + LANES, count)]
                    for i in range(part.size):
                        sums[i] += np.float64(part[i]) * np.float64(part[i])
        for d in range(len(total)):
            for i in range(LANES):
                total[d] += lanes[d, i]
    return fine


@part
def _load_vectors(addresses: Array, kinds: Array, begin: int, base: Array, rows: Array) -> bool:
    """Task vectors from `begin` on into the front of rows; `base` gets the reference."""
    fine = load(addresses[-1], kinds[-1], begin, base)
    for d in range(len(rows)):
        fine &= load_less(addresses[d], kinds[d], begin, base, rows[d, : base.size])
    return bool(fine)


@kernel
def swap_near(other: Array, base: Array, t: float, out: Array) -> None:
    """The base, moved by t towards the other value, or to it where that is nearer."""
    for i in range(out.size):
        apart = max(abs(base[i] - other[i]), np.float32(1e-6))
        share = min(max(np.float32(t) / apart, np.float32(0)), np.float32(1))
        out[i] = share * other[i] + (np.float32(1) - share) * base[i]


@kernel
def count_changes(values: Array, least: float, alone: Array, shared: Array) -> None:
    """By row, how many entries above `least` stand alone at their coordinate, and how many not."""
    rows, bound = len(values), np.float32(least)
    for i in range(values.shape[1]):
        changed = 0
        for d in range(rows):
            changed += int(abs(values[d, i]) > bound)
        for d in range(rows):
            if abs(values[d, i]) > bound:
                alone[d] += int(changed == 1)
                shared[d] += int(changed > 1)


@kernel
def reinforce(values: Array, least: float, factors: Array, out: Array) -> None:
    """The mean of the entries above `least`; one that stands alone is multiplied by its factor."""
    rows, bound = len(values), np.float32(least)
    for i in range(out.size):
        changed, alone = 0, np.float32(0)
        for d in range(rows):
            if abs(values[d, i]) > bound:
                changed += 1
                alone = values[d, i] * factors[d]
        total = np.float32(0)
        for d in range(rows):
            if abs(values[d, i]) > bound:
                total += values[d, i] / np.float32(max(changed, 1))
        out[i] = alone if changed == 1 else total


@kernel
def divergences(values: Array, base: Array, length: int, out: Array) -> None:
    """The Kullback-Leibler divergence of the softmaxes of every row of `length`, in float64.

    Probabilities are raised by 1e-8 first.
    """
    for row in range(out.size):
        first = row * length
        high, low = np.float64(values[first]), np.float64(base[first])
        for i in range(first, first + length):
            high, low = max(high, np.float64(values[i])), max(low, np.float64(base[i]))
        above, below = 0.0, 0.0
        for i in range(first, first + length):
            above += np.exp(np.float64(values[i]) - high)
            below += np.exp(np.float64(base[i]) - low)
        total = 0.0
        for i in range(first, first + length):
            p = np.exp(np.float64(values[i]) - high) / above + 1e-8
            q = np.exp(np.float64(base[i]) - low) / below + 1e-8
            total += p * np.log(p / q)
        out[row] = total


@kernel
def scale_rows(values: Array, length: int, factors: Array, out: Array) -> None:
    """|v| times the factor of its row."""
    for i in range(out.size):
        out[i] = abs(values[i]) * np.float32(factors[i // length])


@kernel
def keep_from(values: Array, scores: Array, least: float, out: Array) -> None:
    """The values whose score reaches `least`; zero elsewhere."""
    bound = np.float32(least)
    for i in range(out.size):
        out[i] = values[i] if scores[i] >= bound else np.float32(0)


@kernel
def count_keys(values: Array, upper: int, counts: Array) -> None:
    """Count numbers by half of their ordered 32-bit key (see `key_value`).

    The upper half with upper = −1; else the lower half of those with that upper half.
    """
    bits = values.view(np.uint32)
    for i in range(bits.size):
        negative = bits[i] >> np.uint32(31) != 0
        key = ~bits[i] if negative else bits[i] | np.uint32(0x80000000)
        if upper < 0:
            counts[key >> np.uint32(16)] += 1
        elif np.int64(key >> np.uint32(16)) == upper:
            counts[key & np.uint32(0xFFFF)] += 1


def key_value(key: int) -> np.float32:
    """The float32 of an ordered key: keys are in the order of the numbers."""
    bits = key & 0x7FFFFFFF if key >> 31 else ~key & 0xFFFFFFFF
    return np.array([bits], np.uint32).view(np.float32)[0]
