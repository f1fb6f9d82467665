"""Sequential occupancy on tiles: the loops of Algorithm 1, lines 14–16 (native/claim.cpp).

A call takes a run of tiles. The loops read θ_d and θ_ref as they are stored and form the task
vector strip by strip, so that it never leaves the first-level cache.

The owner map is one byte per coordinate: a domain's index, or FREE. While a domain claims, the free
coordinates carry two provisional codes as well, ABOVE and TIED, so that a claim whose threshold was
guessed can be marked again, and ties can be counted over all tiles before the first of them is
handed out. Every code from ABOVE on is therefore free, until a domain's marks are settled; that
happens while the next domain marks, tile by tile, so that it takes no pass of its own.

Magnitudes are the 31-bit patterns of select.py; no selection reads a score as a number, so random
bits serve as well as task vectors do.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from sigmerge import _native
from sigmerge.core import Array, buffers

ABOVE: Final = np.uint8(253)
TIED: Final = np.uint8(254)
FREE: Final = np.uint8(255)
MAX_DOMAINS: Final = 253

CLAIM_TILE: Final = 1 << 17
"""Coordinates of a tile: what it reads stays in the second-level cache, and calls are few."""
ADD, SPARSE, REPLACE = 0, 1, 2


class TileTable(NamedTuple):
    """The tiles of a block: their edges in flat order, and where each lies.

    Rows of `expert` and `reference` are (type, descriptor or MEMORY, position or address). With a
    `key` (1, and two words) the score is not Δ_d but random bits of the flat index.
    """

    edges: Array
    expert: Array
    reference: Array
    key: Array


class Settlement(NamedTuple):
    """What a domain claims of its marks: those above, and the first ties[t] of tile t.

    `counts` is what `mark` found. Without tiles there is nothing to settle.
    """

    domain: int
    ties: Array
    counts: Array


SETTLED: Final = Settlement(0, np.zeros(0, np.int64), np.zeros((0, 2), np.int64))


def free_map(size: int) -> Array:
    """An owner map of which nothing is claimed."""
    return np.full(size, FREE, np.uint8)


def room(size: int, dtype: Any) -> Array:
    """Where `admit` puts its results: the calling thread's own, valid until it asks again."""
    return buffers.room(size, dtype, "admitted")


def count_free(owner: Array) -> int:
    return int(np.count_nonzero(owner == FREE))


def count_high(
    table: TileTable,
    owner: Array,
    first: int,
    last: int,
    every: int,
    before: Settlement,
    histogram: Array,
) -> None:
    """Count the upper bits of free coordinates' magnitudes in one run in `every` of each tile.

    In HIGH_PLACES, as `select.count_high` does. Of a tile some of whose ties are claimed in
    `before`, all count as free: few tiles, which a sample may have.
    """
    _native.claim_high(*table, owner, first, last, every, *before, histogram)


def count_low(
    table: TileTable,
    owner: Array,
    first: int,
    last: int,
    every: int,
    before: Settlement,
    high: int,
    histogram: Array,
) -> None:
    """The same, one count each, for the lower bits of magnitudes whose upper bits are `high`."""
    _native.claim_low(*table, owner, first, last, every, *before, high, histogram)


def mark(
    table: TileTable,
    owner: Array,
    first: int,
    last: int,
    before: Settlement,
    threshold: int,
    counts: Array,
    mass: Array,
) -> int:
    """Settle what was claimed `before`; mark the free ABOVE the threshold, TIED with it, or FREE.

    Row t of `counts` becomes how many of tile t are above and how many tied, mass[t] the sum of
    |score| over those above. Returns the first tile on which something read is not finite, or -1.
    """
    return _native.claim_mark(*table, owner, first, last, *before, threshold, counts, mass)


def settle(edges: Array, owner: Array, first: int, last: int, marks: Settlement) -> None:
    """Hand the marked coordinates out; the ties that are left over are free again."""
    _native.claim_settle(edges, owner, first, last, *marks)


def tally(
    table: TileTable, owner: Array, first: int, last: int, code: int, support: Array, mass: Array
) -> int:
    """Support (nonzero entries) and ℓ1 mass by tile of the scores where the owner is `code`.

    Returns the first tile on which something read is not finite, or -1.
    """
    return _native.claim_tally(*table, owner, first, last, code, support, mass)


class Admission(NamedTuple):
    """Eq. (occupancy): what a claimed coordinate takes from its owner.

    `form` is ADD, SPARSE or REPLACE. `domains` are those that own anything; row d of `keys` are the
    key words of the draws of domains[d], and draws below `below` drop an entry (SPARSE).
    """

    form: int
    scale: float
    domains: Array
    below: int
    keys: Array


class Admitted(NamedTuple):
    """Whether the anchor is finite, and the result; the checksum of what a file got."""

    fine: bool
    stored: bool
    checksum: int


def admit(
    update: Admission,
    edges: Array,
    owner: Array,
    first: int,
    last: int,
    members: Array,
    target: Array,
) -> Admitted:
    """The repaired values of a run of tiles, rounded to their stored type.

    Rows of `members` (members, tiles, 3): the domains', the reference's, the anchor's. `target` is
    such a row as well: where the first value goes. A file gets only what is finite.
    """
    return Admitted(*_native.claim_admit(*update, edges, owner, first, last, members, target))
