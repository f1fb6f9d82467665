"""Sequential occupancy on tiles: the loops of Algorithm 1, lines 14–16.

A call takes a run of tiles. Kernels read θ_d and θ_ref as they are stored and form the task vector
strip by strip, so that it never leaves the first-level cache.

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

from sigmerge.kernels import SAMPLE_RUN, STRIP, Array, rooms
from sigmerge.kernels.jit import kernel, part
from sigmerge.kernels.philox import fill
from sigmerge.kernels.raw import bits_as
from sigmerge.kernels.select import LOW_BINS, LOW_BITS, MAGNITUDE, high_place
from sigmerge.kernels.stored import F32, address_of, load, load_difference, save
from sigmerge.kernels.window import (
    MEMORY,
    NO_DRAIN,
    VALUE_BYTES,
    WINDOW_SIZE,
    Drain,
    check_read,
    drained,
    none_failed,
    read,
)

ABOVE: Final = np.uint8(253)
TIED: Final = np.uint8(254)
FREE: Final = np.uint8(255)
MAX_DOMAINS: Final = 253

_LANES = 64
CLAIM_TILE: Final = 1 << 17
"""Coordinates of a tile: what it reads stays in the second-level cache, and calls are few."""
ADD, SPARSE, REPLACE = 0, 1, 2


NO_FILES: Final = np.zeros((0, 0, 2), np.int64)
"""Where tiles lie in files, int64 (members, tiles, 2): a descriptor, or MEMORY, and the position of
the first value. Without members all lie in memory."""


class TileTable(NamedTuple):
    """Where the tiles of a block lie: their edges in flat order, addresses and types by tile.

    With a `key` (1, and two words) the score is not Δ_d but random bits of the flat index. `files`
    are the expert's and the reference's; see NO_FILES.
    """

    edges: Array
    expert: Array
    expert_kinds: Array
    reference: Array
    reference_kinds: Array
    key: Array
    files: Array = NO_FILES


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
    return rooms.room(size, dtype, "admitted")


def count_free(owner: Array) -> int:
    return int(np.count_nonzero(owner == FREE))


class _Spare(NamedTuple):
    """Room of the calling thread: strips of float32 and uint32, lanes, and windows by member.

    `failed` as of a `Window`.
    """

    strips: Array
    drawn: Array
    lanes: Array
    windows: Array
    place: int
    """The address of the first window."""
    failed: Array


def _spare(members: int) -> _Spare:
    windows = rooms.room((members, WINDOW_SIZE * VALUE_BYTES), np.uint8, "window")
    return _Spare(
        rooms.room((3, SAMPLE_RUN), np.float32, "strips"),
        rooms.room(SAMPLE_RUN, np.uint32, "inside"),
        rooms.room(_LANES, np.float64, "lanes"),
        windows,
        address_of(windows),
        none_failed(),
    )


@part
def _at(
    address: np.uint64, kind: int, files: Array, member: int, tile: int, begin: int, end: int,
    spare: _Spare,
) -> np.uint64:  # fmt: skip
    """The address of a tile's first value, as it is while coordinates [begin, end) are used.

    Those of a tile in a file are read into the member's window.
    """
    if len(files) == 0 or files[member, tile, 0] == MEMORY:
        return address
    width = 4 if kind == F32 else 2
    skip, place = width * begin, spare.place + member * spare.windows.shape[1]
    position, count = files[member, tile, 1] + skip, width * (end - begin)
    read(files[member, tile, 0], position, place, count, spare.failed)
    return np.uint64(place - skip)


@part
def _pair(
    table: TileTable, tile: int, begin: int, end: int, spare: _Spare
) -> tuple[np.uint64, np.uint64]:
    """Where the expert's values and the reference's begin, while [begin, end) are used."""
    if table.key[0]:
        return table.expert[tile], table.reference[tile]
    left = _at(
        table.expert[tile], table.expert_kinds[tile], table.files, 0, tile, begin, end, spare
    )
    right = _at(
        table.reference[tile], table.reference_kinds[tile], table.files, 1, tile, begin, end, spare
    )
    return left, right


@part
def _score(
    table: TileTable, tile: int, pair: tuple[np.uint64, np.uint64], begin: int, room: Array,
    out: Array,
) -> bool:  # fmt: skip
    """What a strip is ranked by: Δ_d or random bits; False if not all that was read is finite."""
    if table.key[0]:
        fill((table.key[1], table.key[2]), table.edges[tile] + begin, out.view(np.uint32))
        return True
    kinds = (table.expert_kinds[tile], table.reference_kinds[tile])
    return bool(load_difference(pair[0], kinds[0], pair[1], kinds[1], begin, room, out))


@part
def _least_free(before: Settlement, tile: int) -> np.uint8:
    """The least code of a free coordinate, when `before` is not settled yet.

    Of a tile some of whose ties are claimed, all count as free: few tiles, which a sample may have.
    """
    if before.ties.size == 0:
        return ABOVE
    return FREE if before.ties[tile] == before.counts[tile, 1] else TIED


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

    In HIGH_PLACES, as `select.count_high` does.
    """
    spare = _spare(2)
    _count_high(table, owner, first, last, every, before, histogram, spare)
    check_read(spare.failed)


@kernel
def _count_high(
    table: TileTable, owner: Array, first: int, last: int, every: int, before: Settlement,
    histogram: Array, spare: _Spare,
) -> None:  # fmt: skip
    room, deltas = spare.strips[0], spare.strips[1]
    for tile in range(first, last):
        here = owner[table.edges[tile] : table.edges[tile + 1]]
        least = _least_free(before, tile)
        pair = (np.uint64(0), np.uint64(0))
        for begin in range(0, here.size, SAMPLE_RUN * every):
            mine = here[begin : begin + SAMPLE_RUN]
            delta = deltas[: mine.size]
            if every > 1 or begin % WINDOW_SIZE == 0:
                pair = _pair(table, tile, begin, _end(begin, every, here.size), spare)
            _score(table, tile, pair, begin, room, delta)
            bits = bits_as(delta, np.uint32)
            for i in range(mine.size):
                # Adding 0 or 1 keeps the loop free of a branch that no one can predict.
                histogram[high_place(bits[i])] += np.uint32(mine[i] >= least)


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
    spare = _spare(2)
    _count_low(table, owner, first, last, every, before, high, histogram, spare)
    check_read(spare.failed)


@kernel
def _count_low(
    table: TileTable, owner: Array, first: int, last: int, every: int, before: Settlement,
    high: int, histogram: Array, spare: _Spare,
) -> None:  # fmt: skip
    room, deltas = spare.strips[0], spare.strips[1]
    inside, wanted = spare.drawn, np.uint32(high)
    for tile in range(first, last):
        here = owner[table.edges[tile] : table.edges[tile + 1]]
        least = _least_free(before, tile)
        pair = (np.uint64(0), np.uint64(0))
        for begin in range(0, here.size, SAMPLE_RUN * every):
            mine = here[begin : begin + SAMPLE_RUN]
            delta = deltas[: mine.size]
            if every > 1 or begin % WINDOW_SIZE == 0:
                pair = _pair(table, tile, begin, _end(begin, every, here.size), spare)
            _score(table, tile, pair, begin, room, delta)
            bits, count = bits_as(delta, np.uint32), 0
            for i in range(mine.size):
                magnitude = bits[i] & MAGNITUDE
                inside[count] = magnitude & np.uint32(LOW_BINS - 1)
                count += (magnitude >> np.uint32(LOW_BITS) == wanted) & (mine[i] >= least)
            for i in range(count):
                histogram[inside[i]] += np.uint32(1)


@part
def _end(begin: int, every: int, size: int) -> int:
    """Up to where values are read from `begin` on: a run of a sample, or a window."""
    return min(begin + (WINDOW_SIZE if every == 1 else SAMPLE_RUN), size)


@part
def _add_mass(values: Array, owner: Array, code: np.uint8, lanes: Array) -> None:
    """Add |value| where the owner is `code`: float64, entry i to lane i mod 64.

    The lanes are spelled out because their number fixes the order of addition on every machine.
    """
    for start in range(0, values.size, _LANES):
        some = values[start : start + _LANES]
        codes = owner[start : start + _LANES]
        for lane in range(some.size):
            lanes[lane] += np.float64(abs(some[lane]) if codes[lane] == code else np.float32(0))


@part
def _total(lanes: Array) -> float:
    total = 0.0
    for lane in range(lanes.size):
        total += lanes[lane]
    return total


@part
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
    spare = _spare(2)
    wrong = _mark(table, owner, first, last, before, threshold, counts, mass, spare)
    check_read(spare.failed)
    return int(wrong)


@kernel
def _mark(
    table: TileTable, owner: Array, first: int, last: int, before: Settlement, threshold: int,
    counts: Array, mass: Array, spare: _Spare,
) -> int:  # fmt: skip
    room, deltas = spare.strips[0], spare.strips[1]
    lanes, wrong = spare.lanes, -1
    for tile in range(first, last):
        here = owner[table.edges[tile] : table.edges[tile + 1]]
        if before.ties.size:
            _settle(here, np.uint8(before.domain), before.ties[tile], before.counts[tile, 1])
        lanes[:] = 0
        counts[tile, 0], counts[tile, 1] = 0, 0
        pair = (np.uint64(0), np.uint64(0))
        for begin in range(0, here.size, STRIP):
            mine = here[begin : begin + STRIP]
            delta = deltas[: mine.size]
            if begin % WINDOW_SIZE == 0:
                pair = _pair(table, tile, begin, _end(begin, 1, here.size), spare)
            if not _score(table, tile, pair, begin, room, delta) and wrong < 0:
                wrong = tile
            above, tied = _code(delta, mine, np.int32(threshold))
            counts[tile, 0] += above
            counts[tile, 1] += tied
            _add_mass(delta, mine, ABOVE, lanes)
        mass[tile] = _total(lanes)
    return wrong


@kernel
def settle(edges: Array, owner: Array, first: int, last: int, marks: Settlement) -> None:
    """Hand the marked coordinates out; the ties that are left over are free again."""
    for tile in range(first, last):
        here = owner[edges[tile] : edges[tile + 1]]
        _settle(here, np.uint8(marks.domain), marks.ties[tile], marks.counts[tile, 1])


@part
def _settle(owner: Array, code: np.uint8, ties: int, tied: int) -> None:
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


def tally(
    table: TileTable, owner: Array, first: int, last: int, code: int, support: Array, mass: Array
) -> int:
    """Support (nonzero entries) and ℓ1 mass by tile of the scores where the owner is `code`.

    Returns the first tile on which something read is not finite, or -1.
    """
    spare = _spare(2)
    wrong = _tally(table, owner, first, last, code, support, mass, spare)
    check_read(spare.failed)
    return int(wrong)


@kernel
def _tally(
    table: TileTable, owner: Array, first: int, last: int, code: int, support: Array, mass: Array,
    spare: _Spare,
) -> int:  # fmt: skip
    room, deltas = spare.strips[0], spare.strips[1]
    lanes, wanted, wrong = spare.lanes, np.uint8(code), -1
    for tile in range(first, last):
        here = owner[table.edges[tile] : table.edges[tile + 1]]
        lanes[:] = 0
        support[tile] = 0
        pair = (np.uint64(0), np.uint64(0))
        for begin in range(0, here.size, STRIP):
            mine = here[begin : begin + STRIP]
            delta = deltas[: mine.size]
            if begin % WINDOW_SIZE == 0:
                pair = _pair(table, tile, begin, _end(begin, 1, here.size), spare)
            if not _score(table, tile, pair, begin, room, delta) and wrong < 0:
                wrong = tile
            support[tile] += _support(delta, mine, wanted)
            _add_mass(delta, mine, wanted, lanes)
        mass[tile] = _total(lanes)
    return wrong


@part
def _support(values: Array, owner: Array, code: np.uint8) -> int:
    count = np.int32(0)
    for i in range(values.size):
        found = np.int32((owner[i] == code) & (values[i] != np.float32(0)))
        count = np.int32(count + found)
    return int(count)


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


def admit(
    update: Admission,
    edges: Array,
    owner: Array,
    first: int,
    last: int,
    addresses: Array,
    kinds: Array,
    out: np.uint64,
    kind: int,
    files: Array = NO_FILES,
    drain: Drain = NO_DRAIN,
) -> tuple[bool, bool]:
    """The repaired values of a run of tiles, rounded to their stored type at `out`.

    Rows of `addresses`, `kinds` and `files`: the domains', the reference's, the anchor's, by tile.
    With a drain they are written to a file, and `out` is room for so many as it says. Returns
    whether the anchor is finite, and whether the result is, and is written.
    """
    where, places = (addresses, kinds, files), np.empty(len(addresses), np.uint64)
    given = update, edges, owner, first, last, where, places, out, kind
    spare = _spare(len(addresses))
    fine, stored = _admit(*given, spare, drain)
    check_read(spare.failed)
    return bool(fine), bool(stored)


@kernel
def _admit(
    update: Admission, edges: Array, owner: Array, first: int, last: int, where: Any,
    places: Array, out: np.uint64, kind: int, spare: _Spare, drain: Drain,
) -> tuple[bool, bool]:  # fmt: skip
    """`places` is room for the address of each member."""
    addresses, kinds, _ = where
    room, values, deltas = spare.strips[0], spare.strips[1], spare.strips[2]
    reference, anchor = len(addresses) - 2, len(addresses) - 1
    fine, stored, scale = True, True, np.float32(update.scale)
    begun, size = 0, edges[last] - edges[first]
    for tile in range(first, last):
        here = owner[edges[tile] : edges[tile + 1]]
        for begin in range(0, here.size, STRIP):
            mine = here[begin : begin + STRIP]
            some, delta = values[: mine.size], deltas[: mine.size]
            if begin % WINDOW_SIZE == 0:
                _places(update, where, tile, begin, _end(begin, 1, here.size), spare, places)
            fine &= load(places[anchor], kinds[anchor, tile], begin, some)
            for row in range(len(update.domains)):
                domain = update.domains[row]
                code = np.uint8(domain)
                address, own = places[domain], kinds[domain, tile]
                if update.form == REPLACE:
                    load(address, own, begin, delta)
                    _replace(some, mine, code, delta, scale)
                    continue
                base, base_kind = places[reference], kinds[reference, tile]
                load_difference(address, own, base, base_kind, begin, room, delta)
                if update.form == SPARSE:
                    draws = spare.drawn[: mine.size]
                    fill((update.keys[row, 0], update.keys[row, 1]), edges[tile] + begin, draws)
                    _add_kept(some, mine, code, delta, scale, draws, update.below)
                else:
                    _add(some, mine, code, delta, scale)
            at = edges[tile] - edges[first] + begin
            stored &= save(some, out, kind, at - begun)
            end, right = at + mine.size, fine and stored
            begun = drained(drain, out, begun, end, STRIP, size, right)
            if begun < 0:
                return fine, False
    return fine, stored


@part
def _places(
    update: Admission, where: Any, tile: int, begin: int, end: int, spare: _Spare, places: Array
) -> None:
    """Where the values of the members that the update reads begin, while [begin, end) are used."""
    addresses, kinds, files = where
    members = len(addresses)
    for d in range(members):
        wanted = d == members - 1 or (d == members - 2 and update.form != REPLACE)
        for row in range(len(update.domains)):
            wanted |= update.domains[row] == d
        if wanted:
            place, kind = addresses[d, tile], kinds[d, tile]
            places[d] = _at(place, kind, files, d, tile, begin, end, spare)


@part
def _add(values: Array, owner: Array, code: np.uint8, delta: Array, factor: np.float32) -> None:
    for i in range(values.size):
        values[i] = values[i] + factor * delta[i] if owner[i] == code else values[i]


@part
def _add_kept(
    values: Array,
    owner: Array,
    code: np.uint8,
    delta: Array,
    factor: np.float32,
    draws: Array,
    below: int,
) -> None:
    """`_add`, but an entry whose draw lies below the bound is dropped."""
    bound = np.uint64(below)
    for i in range(values.size):
        kept = (owner[i] == code) & (np.uint64(draws[i]) >= bound)
        values[i] = values[i] + factor * delta[i] if kept else values[i]


@part
def _replace(values: Array, owner: Array, code: np.uint8, own: Array, factor: np.float32) -> None:
    """Move from the anchor's value to the expert's by `factor` where the owner is `code`.

    At factor 1 the expert's own value is taken, which anchor + (expert − anchor) may miss.
    """
    for i in range(values.size):
        moved = values[i] + factor * (own[i] - values[i])
        target = own[i] if factor == np.float32(1) else moved
        values[i] = target if owner[i] == code else values[i]
