"""Rules for one coordinate of all members at a time, in float32 (native/coordinates.cpp)."""

from __future__ import annotations

import numpy as np

from sigmerge import _native
from sigmerge.core import Array


def count_variances(members: Array, start: int, size: int, upper: int, counts: Array) -> bool:
    """Count the task vectors' variances by the upper 16 bits of their 31-bit pattern, or the lower.

    The lower 15 of those whose upper bits are `upper`, unless that is −1; then the last place
    counts zeros. Members are the experts and the reference; returns whether all is finite.
    """
    return _native.count_variances(members, size, upper, counts)


def squares_of_varying(
    members: Array, start: int, size: int, threshold: int, ties: int, tile: int, total: Array
) -> bool:
    """Add each task vector's Σ Δ² over the coordinates whose variance a cut keeps.

    In float64, in lanes of a tile. Members are the experts and the reference; returns whether
    everything read is finite.
    """
    return _native.squares_of_varying(members, size, threshold, ties, tile, total)


def swap_near(other: Array, base: Array, t: float, out: Array) -> None:
    """The base, moved by t towards the other value, or to it where that is nearer."""
    _native.swap_near(other, base, t, out)


def count_changes(values: Array, least: float, alone: Array, shared: Array) -> None:
    """By row, how many entries above `least` stand alone at their coordinate, and how many not."""
    _native.count_changes(values, least, alone, shared)


def reinforce(values: Array, least: float, factors: Array, out: Array) -> None:
    """The mean of the entries above `least`; one that stands alone is multiplied by its factor."""
    _native.reinforce(values, least, factors, out)


def divergences(values: Array, base: Array, length: int, out: Array) -> None:
    """The Kullback-Leibler divergence of the softmaxes of every row of `length`, in float64.

    Probabilities are raised by 1e-8 first.
    """
    _native.divergences(values, base, length, out)


def scale_rows(values: Array, length: int, factors: Array, out: Array) -> None:
    """|v| times the factor of its row."""
    _native.scale_rows(values, length, factors, out)


def keep_from(values: Array, scores: Array, least: float, out: Array) -> None:
    """The values whose score reaches `least`; zero elsewhere."""
    _native.keep_from(values, scores, least, out)


def count_keys(values: Array, upper: int, counts: Array) -> None:
    """Count numbers by half of their ordered 32-bit key (see `key_value`).

    The upper half with upper = −1; else the lower half of those with that upper half.
    """
    _native.count_keys(values, upper, counts)


def key_value(key: int) -> np.float32:
    """The float32 of an ordered key: keys are in the order of the numbers."""
    bits = key & 0x7FFFFFFF if key >> 31 else ~key & 0xFFFFFFFF
    return np.array([bits], np.uint32).view(np.float32)[0]
