"""Sequential occupancy on a tile: the loops of Algorithm 1, lines 14–16.

The owner map is one byte per coordinate: a domain's index, or FREE. While a domain claims, the free
coordinates carry two provisional codes as well, ABOVE and TIED, so that a claim whose threshold was
guessed can be marked again, and ties can be counted over all tiles before the first of them is
handed out. Every code from ABOVE on is therefore free.

Magnitudes are the 31-bit patterns of select.py; no kernel reads the score as a number, so random
bits serve as a score just as well as task vectors do.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sigmerge.kernels.jit import kernel
from sigmerge.kernels.select import LOW_BINS, LOW_BITS

Array = np.ndarray[Any, Any]

ABOVE: Final = np.uint8(253)
TIED: Final = np.uint8(254)
FREE: Final = np.uint8(255)
MAX_DOMAINS: Final = 253

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LANES = 64


@kernel
def count_high(score: Array, owner: Array, histogram: Array) -> None:
    """select.count_high over the free coordinates."""
    bits = score.view(np.uint32)
    for i in range(bits.size):
        # Adding 0 or 1 keeps the loop free of a branch that no one can predict.
        histogram[(bits[i] & _MAGNITUDE) >> np.uint32(LOW_BITS)] += np.int64(owner[i] >= ABOVE)


@kernel
def count_low(score: Array, owner: Array, high: int, histogram: Array) -> None:
    """select.count_low over the free coordinates."""
    bits = score.view(np.uint32)
    wanted = np.uint32(high)
    inside = np.empty(bits.size, np.uint16)
    count = 0
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        inside[count] = magnitude & np.uint32(LOW_BINS - 1)
        count += (magnitude >> np.uint32(LOW_BITS) == wanted) & (owner[i] >= ABOVE)
    for i in range(count):
        histogram[inside[i]] += 1


@kernel
def _mass(values: Array, owner: Array, code: np.uint8) -> float:
    """Sum of |value| where the owner is `code`: float64, in 64 lanes, then lane by lane.

    The lanes are spelled out because their number fixes the order of addition on every machine.
    """
    lanes = np.zeros(_LANES)
    for start in range(0, values.size, _LANES):
        some = values[start : start + _LANES]
        codes = owner[start : start + _LANES]
        for lane in range(some.size):
            lanes[lane] += np.float64(abs(some[lane]) if codes[lane] == code else np.float32(0))
    total = 0.0
    for lane in range(_LANES):
        total += lanes[lane]
    return total


@kernel
def mark(score: Array, owner: Array, threshold: int) -> tuple[int, int, float]:
    """Mark the free coordinates ABOVE the threshold, TIED with it, or FREE.

    Returns how many are above, how many tied, and the sum of |score| over those above.
    """
    bits = score.view(np.int32)
    cut = np.int32(threshold)
    for i in range(bits.size):
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        code = ABOVE if magnitude > cut else (TIED if magnitude == cut else FREE)
        owner[i] = code if owner[i] >= ABOVE else owner[i]
    above = np.int32(0)
    tied = np.int32(0)
    for i in range(owner.size):
        above += np.int32(owner[i] == ABOVE)
        tied += np.int32(owner[i] == TIED)
    return int(above), int(tied), _mass(score, owner, ABOVE)


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
def tally(delta: Array, owner: Array, code: int) -> tuple[int, float]:
    """Support (nonzero entries) and ℓ1 mass of the task vector where the owner is `code`."""
    wanted = np.uint8(code)
    support = np.int32(0)
    for i in range(delta.size):
        support += np.int32((owner[i] == wanted) & (delta[i] != np.float32(0)))
    return int(support), _mass(delta, owner, wanted)


@kernel
def owners(owner: Array, present: Array) -> None:
    """Set present[code] for every code in the tile."""
    for i in range(owner.size):
        present[owner[i]] = True


@kernel
def add(values: Array, owner: Array, domain: int, delta: Array, scale: float) -> None:
    """Eq. (occupancy): add scale · delta where `domain` owns, in float32."""
    code, factor = np.uint8(domain), np.float32(scale)
    for i in range(values.size):
        values[i] = values[i] + factor * delta[i] if owner[i] == code else values[i]


@kernel
def add_sparse(
    values: Array, owner: Array, domain: int, delta: Array, scale: float, draws: Array, below: int
) -> None:
    """`add`, but an entry whose draw lies below the bound is dropped."""
    code, factor, bound = np.uint8(domain), np.float32(scale), np.uint64(below)
    for i in range(values.size):
        kept = (owner[i] == code) & (np.uint64(draws[i]) >= bound)
        values[i] = values[i] + factor * delta[i] if kept else values[i]


@kernel
def replace(values: Array, owner: Array, domain: int, expert: Array, scale: float) -> None:
    """Move from the anchor's value to the expert's by `scale` where `domain` owns.

    At scale 1 the expert's own value is taken, which anchor + (expert − anchor) may miss.
    """
    code, factor = np.uint8(domain), np.float32(scale)
    for i in range(values.size):
        moved = values[i] + factor * (expert[i] - values[i])
        target = expert[i] if factor == np.float32(1) else moved
        values[i] = target if owner[i] == code else values[i]
