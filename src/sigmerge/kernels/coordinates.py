"""Rules that look at one coordinate of all members at a time, in float32."""

from __future__ import annotations

import numpy as np

from sigmerge.kernels import LANES, Array
from sigmerge.kernels.jit import kernel


@kernel
def variance(values: Array, out: Array) -> None:
    """The variance of each coordinate over the rows, computed in float64, row by row."""
    rows = len(values)
    mean, total = np.zeros(out.size), np.zeros(out.size)
    for d in range(rows):
        row = values[d]
        for i in range(out.size):
            mean[i] += np.float64(row[i])
    for i in range(out.size):
        mean[i] /= rows
    for d in range(rows):
        row = values[d]
        for i in range(out.size):
            apart = np.float64(row[i]) - mean[i]
            total[i] += apart * apart
    for i in range(out.size):
        out[i] = np.float32(total[i] / rows)


@kernel
def clear_where_zero(values: Array, chosen: Array) -> None:
    """Zero every row where `chosen` is zero."""
    for d in range(len(values)):
        for i in range(chosen.size):
            values[d, i] = values[d, i] if chosen[i] != 0 else np.float32(0)


@kernel
def agreeing_mean(values: Array, weights: Array, out: Array) -> None:
    """The weighted mean of the entries whose sign is that of their plain sum; a sum of 0 is +."""
    rows = len(values)
    for i in range(out.size):
        total = np.float32(0)
        for d in range(rows):
            total += values[d, i]
        sign = np.float32(1) if total >= 0 else np.float32(-1)
        merged, share = np.float32(0), np.float32(0)
        for d in range(rows):
            if values[d, i] * sign > 0:
                merged += values[d, i] * weights[d]
                share += weights[d]
        out[i] = merged / max(share, np.float32(1e-6))


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


@kernel
def count_patterns(values: Array, upper: int, counts: Array) -> None:
    """Count magnitudes by the upper 16 bits of their 31-bit pattern, or by the lower 15.

    The lower ones of those whose upper bits are `upper`, unless that is −1; then the last place
    counts zeros.
    """
    bits = values.view(np.uint32)
    for i in range(bits.size):
        pattern = bits[i] & np.uint32(0x7FFFFFFF)
        if upper < 0:
            counts[pattern >> np.uint32(15)] += 1
            counts[-1] += int(pattern == 0)
        elif np.int64(pattern >> np.uint32(15)) == upper:
            counts[pattern & np.uint32(0x7FFF)] += 1


@kernel
def add_squares(values: Array, total: Array) -> None:
    """Σ v² of every row in float64, in lanes."""
    lanes = np.empty(LANES)
    for d in range(len(values)):
        lanes[:] = 0
        row = values[d]
        for begin in range(0, row.size, LANES):
            part = row[begin : begin + LANES]
            for i in range(part.size):
                lanes[i] += np.float64(part[i]) * np.float64(part[i])
        for i in range(LANES):
            total[d] += lanes[i]
