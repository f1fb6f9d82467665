"""Sequential occupancy on a tile: the loops of Algorithm 1, lines 14–16.

Kernels read θ_d and θ_ref as they are stored (bfloat16 bit patterns, or float32) and form the task
vector strip by strip, so that it never leaves the first-level cache.

The owner map is one byte per coordinate: a domain's index, or FREE. While a domain claims, the free
coordinates carry two provisional codes as well, ABOVE and TIED, so that a claim whose threshold was
guessed can be marked again, and ties can be counted over all tiles before the first of them is
handed out. Every code from ABOVE on is therefore free.

Magnitudes are the 31-bit patterns of select.py; no selection reads a score as a number, so random
bits, given as `expert` with an empty `reference`, serve as well as task vectors do.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sigmerge.kernels.convert import all_finite, widen_bf16
from sigmerge.kernels.jit import kernel
from sigmerge.kernels.select import LOW_BINS, LOW_BITS

Array = np.ndarray[Any, Any]

ABOVE: Final = np.uint8(253)
TIED: Final = np.uint8(254)
FREE: Final = np.uint8(255)
MAX_DOMAINS: Final = 253

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LANES = 64
TILE: Final = 1 << 17
"""Coordinates of a tile: what it reads stays in the second-level cache, and calls are few."""
STRIP: Final = 4096
"""Coordinates whose task vector is held at a time."""


@kernel
def score(expert: Array, reference: Array, out: Array) -> bool:
    """Δ_d on a strip, or the bits of `expert` if the reference is empty; False if not finite."""
    if reference.size == 0:
        out[:] = expert
        return True
    if expert.itemsize == 2:
        return bool(delta_bf16(expert, reference, out))
    for i in range(out.size):
        out[i] = np.float32(expert[i]) - np.float32(reference[i])
    return bool(all_finite(expert) & all_finite(reference))


@kernel
def count_high(expert: Array, reference: Array, owner: Array, histogram: Array, every: int) -> None:
    """select.count_high over the free coordinates of one strip in `every`."""
    room = np.empty(STRIP, np.float32)
    for begin in range(0, owner.size, STRIP * every):
        end = min(begin + STRIP, owner.size)
        mine, delta = owner[begin:end], room[: end - begin]
        score(expert[begin:end], reference[begin:end], delta)
        bits = delta.view(np.uint32)
        for i in range(mine.size):
            # Adding 0 or 1 keeps the loop free of a branch that no one can predict.
            histogram[(bits[i] & _MAGNITUDE) >> np.uint32(LOW_BITS)] += np.int64(mine[i] >= ABOVE)


@kernel
def count_low(
    expert: Array, reference: Array, owner: Array, histogram: Array, every: int, high: int
) -> None:
    """select.count_low over the free coordinates of one strip in `every`."""
    room, inside = np.empty(STRIP, np.float32), np.empty(STRIP, np.uint16)
    wanted = np.uint32(high)
    for begin in range(0, owner.size, STRIP * every):
        end = min(begin + STRIP, owner.size)
        mine, delta = owner[begin:end], room[: end - begin]
        score(expert[begin:end], reference[begin:end], delta)
        bits = delta.view(np.uint32)
        count = 0
        for i in range(mine.size):
            magnitude = bits[i] & _MAGNITUDE
            inside[count] = magnitude & np.uint32(LOW_BINS - 1)
            count += (magnitude >> np.uint32(LOW_BITS) == wanted) & (mine[i] >= ABOVE)
        for i in range(count):
            histogram[inside[i]] += 1


@kernel
def _add_mass(values: Array, owner: Array, code: np.uint8, lanes: Array) -> None:
    """Add |value| where the owner is `code`: float64, entry i to lane i mod 64.

    The lanes are spelled out because their number fixes the order of addition on every machine.
    """
    for start in range(0, values.size, _LANES):
        some = values[start : start + _LANES]
        codes = owner[start : start + _LANES]
        for lane in range(some.size):
            lanes[lane] += np.float64(abs(some[lane]) if codes[lane] == code else np.float32(0))


@kernel
def _total(lanes: Array) -> float:
    total = 0.0
    for lane in range(lanes.size):
        total += lanes[lane]
    return total


@kernel
def _code(delta: Array, owner: Array, cut: np.int32) -> tuple[int, int]:
    """Mark one strip; how many are above and how many tied."""
    bits = delta.view(np.int32)
    for i in range(bits.size):
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        code = ABOVE if magnitude > cut else (TIED if magnitude == cut else FREE)
        owner[i] = code if owner[i] >= ABOVE else owner[i]
    # A strip's counts fit into 16 bits, of which a vector holds many.
    above, tied = np.uint16(0), np.uint16(0)
    for i in range(owner.size):
        above = np.uint16(above + np.uint16(owner[i] == ABOVE))
        tied = np.uint16(tied + np.uint16(owner[i] == TIED))
    return int(above), int(tied)


@kernel
def mark(
    expert: Array, reference: Array, owner: Array, threshold: int
) -> tuple[int, int, float, bool]:
    """Mark the free coordinates ABOVE the threshold, TIED with it, or FREE.

    Returns how many are above, how many tied, the sum of |score| over those above, and whether
    everything that was read is finite.
    """
    room, lanes = np.empty(STRIP, np.float32), np.zeros(_LANES)
    above, tied, finite = 0, 0, True
    for begin in range(0, owner.size, STRIP):
        end = min(begin + STRIP, owner.size)
        mine, delta = owner[begin:end], room[: end - begin]
        finite &= score(expert[begin:end], reference[begin:end], delta)
        more_above, more_tied = _code(delta, mine, np.int32(threshold))
        above, tied = above + more_above, tied + more_tied
        _add_mass(delta, mine, ABOVE, lanes)
    return above, tied, _total(lanes), finite


@kernel
def settle(owner: Array, domain: int, ties: int, tied: int) -> None:
    """Hand the marked coordinates out: those above and the first `ties` of the `tied` are claimed.

    The other ties are free again.
    """
    code = np.uint8(domain)
    end = owner.size if ties == tied else 0
    left = ties if ties < tied else 0
    while left > 0:
        left -= owner[end] == TIED
        end += 1
    # Slices rather than ranges: only loops from zero are vectorised.
    first, rest = owner[:end], owner[end:]
    for i in range(first.size):
        first[i] = code if (first[i] == ABOVE) | (first[i] == TIED) else first[i]
    for i in range(rest.size):
        rest[i] = code if rest[i] == ABOVE else (FREE if rest[i] == TIED else rest[i])


@kernel
def tally(expert: Array, reference: Array, owner: Array, code: int) -> tuple[int, float, bool]:
    """Support (nonzero entries) and ℓ1 mass of the task vector where the owner is `code`.

    And whether everything that was read is finite.
    """
    room, lanes = np.empty(STRIP, np.float32), np.zeros(_LANES)
    wanted, support, finite = np.uint8(code), np.int32(0), True
    for begin in range(0, owner.size, STRIP):
        end = min(begin + STRIP, owner.size)
        mine, delta = owner[begin:end], room[: end - begin]
        finite &= score(expert[begin:end], reference[begin:end], delta)
        for i in range(delta.size):
            support += np.int32((mine[i] == wanted) & (delta[i] != np.float32(0)))
        _add_mass(delta, mine, wanted, lanes)
    return int(support), _total(lanes), finite


@kernel
def add(
    values: Array, owner: Array, domain: int, expert: Array, reference: Array, scale: float
) -> None:
    """Eq. (occupancy): add scale · Δ_d where `domain` owns, in float32."""
    code, factor = np.uint8(domain), np.float32(scale)
    room = np.empty(STRIP, np.float32)
    for begin in range(0, owner.size, STRIP):
        end = min(begin + STRIP, owner.size)
        mine, some, delta = owner[begin:end], values[begin:end], room[: end - begin]
        score(expert[begin:end], reference[begin:end], delta)
        for i in range(some.size):
            some[i] = some[i] + factor * delta[i] if mine[i] == code else some[i]


@kernel
def add_sparse(
    values: Array,
    owner: Array,
    domain: int,
    expert: Array,
    reference: Array,
    scale: float,
    draws: Array,
    below: int,
) -> None:
    """`add`, but an entry whose draw lies below the bound is dropped."""
    code, factor, bound = np.uint8(domain), np.float32(scale), np.uint64(below)
    room = np.empty(STRIP, np.float32)
    for begin in range(0, owner.size, STRIP):
        end = min(begin + STRIP, owner.size)
        mine, some, delta = owner[begin:end], values[begin:end], room[: end - begin]
        drawn = draws[begin:end]
        score(expert[begin:end], reference[begin:end], delta)
        for i in range(some.size):
            kept = (mine[i] == code) & (np.uint64(drawn[i]) >= bound)
            some[i] = some[i] + factor * delta[i] if kept else some[i]


@kernel
def replace(values: Array, owner: Array, domain: int, expert: Array, scale: float) -> None:
    """Move from the anchor's value to the expert's by `scale` where `domain` owns.

    At scale 1 the expert's own value is taken, which anchor + (expert − anchor) may miss.
    """
    code, factor = np.uint8(domain), np.float32(scale)
    room = np.empty(STRIP, np.float32)
    for begin in range(0, owner.size, STRIP):
        end = min(begin + STRIP, owner.size)
        mine, some, own = owner[begin:end], values[begin:end], room[: end - begin]
        if expert.itemsize == 2:
            widen_bf16(expert[begin:end], own)
        else:
            for i in range(own.size):
                own[i] = np.float32(expert[begin + i])
        for i in range(some.size):
            moved = some[i] + factor * (own[i] - some[i])
            target = own[i] if factor == np.float32(1) else moved
            some[i] = target if mine[i] == code else some[i]
