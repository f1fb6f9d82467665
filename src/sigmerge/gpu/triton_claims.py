"""The loops of `claim` on a GPU, one launch each: the same counts, marks and values.

A program takes a part of a tile. It finds the stored values by a table on the device, which has a
row for every tile: addresses, and in their last two bits the types. Nothing is changed before all
of a run of tiles is computed, so that one that does not fit the memory can be taken again in
halves. The loops add masses entry after entry; where a sum is exact, its order is of no account,
and all parts of a tile add theirs at once (`exact_below`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sigmerge.core import LANES, SAMPLE_RUN, Array, claim
from sigmerge.core.claim import Admission, Admitted, Settlement, TileTable
from sigmerge.core.dtypes import BF16, F16, F32, MEMORY
from sigmerge.gpu.memory import STORED, fetched, no_flag, there
from sigmerge.gpu.staging import Drain
from sigmerge.gpu.triton_passes import (
    BLOCK,
    EXACT,
    added,
    drawn,
    high_place,
    launch,
    magnitude_of,
    note_wrong,
    sampled,
    save,
    wide,
    widened,
)

TILE_ROW = 4
"""Numbers of a tile in its row of the table, before the addresses of domains: two addresses, its
begin and its size."""
MARK_BLOCK, MARK_WARPS = 2048, 4
MARK_STEPS = 4
"""Blocks that one program marks; with 16,384 coordinates at most, since it counts in 16 bits."""
MARK_TOGETHER = 16
"""Coordinates that lie together and that a thread marks: their codes are one load, if tiles begin
at multiples of 16."""
COUNT_BLOCK, COUNT_WARPS = 1024, 4
SETTLE_BLOCK, SETTLE_WARPS = 8192, 4
"""Coordinates and warps of a program; a block of those that count is a part of a sample's run."""
COPIES = 16
"""Histograms that programs count in by turns: differences of bfloat16 numbers have few places, and
a GPU adds to one place once at a time."""
DEPTH = 16
"""Steps of the lanes whose entries are loaded before the first is used: a GPU's memory answers
late. The time to compile grows with its square."""
ENOUGH = 1 << 22
"""Coordinates of a sample; of a block that has more, strips of fewer tiles are counted."""
SEVERAL = 3
"""Stands for a type where tiles of a run are stored in different ones."""
_TILE_ROW, _SEVERAL = tl.constexpr(TILE_ROW), tl.constexpr(SEVERAL)
_BF16, _F16, _F32 = tl.constexpr(BF16), tl.constexpr(F16), tl.constexpr(F32)
_ABOVE, _TIED, _FREE = (tl.constexpr(int(c)) for c in (claim.ABOVE, claim.TIED, claim.FREE))
_SPARSE, _REPLACE = tl.constexpr(claim.SPARSE), tl.constexpr(claim.REPLACE)


@triton.jit
def _pointer(address, kind: tl.constexpr):
    """To stored values; copies begin at multiples of 256 bytes."""
    if kind == _BF16:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif kind == _F16:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _stored(cell, at, there, kind: tl.constexpr):
    """Values of a tile as they are stored, or where types are mixed as float32."""
    address = cell & -4
    if kind == _SEVERAL:
        if (cell & 3) == _BF16:
            found = widened(_pointer(address, _BF16), at, there)
        elif (cell & 3) == _F16:
            found = widened(_pointer(address, _F16), at, there)
        else:
            found = widened(_pointer(address, _F32), at, there)
    else:
        found = tl.load(_pointer(address, kind) + at, mask=there, other=0)
    return found


@triton.jit
def _values(cell, at, there, kind: tl.constexpr):
    """Values of a tile, which its cell of the table tells."""
    return wide(_stored(tl.load(cell), at, there, kind))


@triton.jit
def _begin(row, aligned: tl.constexpr):
    """Where a tile begins in the owner map; a multiple of 16 if all tiles begin there."""
    begin = tl.load(row + 2)
    return tl.multiple_of(begin, 16) if aligned else begin


@triton.jit
def _size(row, aligned: tl.constexpr):
    """Coordinates of a tile; where they are a multiple of 16, threads load many at once."""
    size = tl.load(row + 3).to(tl.int32)
    return tl.multiple_of(size, 16) if aligned else size


@triton.jit
def _score(row, begin, at, there, key0, key1, random: tl.constexpr, kind: tl.constexpr):
    """Δ_d, or random bits of the flat index."""
    if random:
        score = drawn(key0, key1, begin + at).to(tl.float32, bitcast=True)
    else:
        score = _values(row, at, there, kind) - _values(row + 1, at, there, kind)
    return score


@triton.jit
def _least(begin, size, claimed, least):
    """The least code of a free coordinate: `least`, but where the tile ends at `claimed` or before.

    All ties of such a tile are claimed.
    """
    return tl.where(begin + size <= claimed, _FREE, least)


@triton.jit
def _last_tie(edge, begin):
    """The last tie that is claimed, by its place in a tile."""
    return tl.minimum(tl.maximum(tl.load(edge) - begin, -1), 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _settled(code, at, last_tie, domain):
    """The codes after a domain's marks are handed out."""
    claimed = (code == _ABOVE) | ((code == _TIED) & (at <= last_tie))
    return tl.where(claimed, domain, tl.where(code == _TIED, _FREE, code))


@triton.jit
def _ahead(cell, step, size, kind: tl.constexpr, lanes: tl.constexpr, depth: tl.constexpr):
    """The entries of the next steps of the lanes, as they are stored."""
    found = ()
    for part in tl.static_range(depth):
        at = step + part * lanes + tl.arange(0, lanes)
        found = found + (_stored(cell, at, at < size, kind),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _codes_ahead(owner, step, size, lanes: tl.constexpr, depth: tl.constexpr):
    found = ()
    for part in tl.static_range(depth):
        at = step + part * lanes + tl.arange(0, lanes)
        found = found + (tl.load(owner + at, mask=at < size, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["domain", "claimed", "least", "threshold", "key0", "key1"])
def _mark(
    table, width, owner, counts, mass, domain, claimed, least, threshold, key0, key1,
    random: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
    steps: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    """`claim.mark` of some blocks of a tile, all or none of whose ties are claimed already.

    A row of four numbers a tile gains how many are above, how many tied, whether any is not finite,
    and the mass. A thread takes so many coordinates `together`.
    """
    tile = tl.program_id(1)
    row, counts = table + tile * width, counts + 4 * tile
    begin, size = _begin(row, aligned), _size(row, aligned)
    least = _least(begin, size, claimed, least)
    threads: tl.constexpr = block // together
    total, found = tl.zeros([threads], tl.float64), tl.zeros([threads], tl.int32)
    largest = tl.zeros([threads], tl.int32)
    for step in range(steps):
        start = (tl.program_id(0) * steps + step) * block
        at = start + tl.arange(0, threads)[:, None] * together + tl.arange(0, together)[None, :]
        there = at < size
        code = tl.load(owner + begin + at, mask=there, other=0).to(tl.int32)
        score = _score(row, begin, at, there, key0, key1, random, kind)
        magnitude, free = magnitude_of(score), code >= least
        settled = tl.where(free, _FREE, tl.where(code >= _ABOVE, domain, code))
        ranked = tl.where(free, magnitude, -1)
        # What a mark takes off FREE, and above it a count; of the difference a byte is stored.
        taken = tl.where(ranked > threshold, _FREE - _ABOVE + 0x10000, 0)
        taken = tl.where(ranked == threshold, _FREE - _TIED, taken)
        tl.store(owner + begin + at, (settled - taken).to(tl.uint8), mask=there)
        found += tl.sum(taken, 1)
        if not random:
            kept = tl.where(ranked > threshold, magnitude, 0).to(tl.float32, bitcast=True)
            total += tl.sum(kept.to(tl.float64), 1)
            largest = tl.maximum(largest, tl.max(magnitude, 1))
    marks = tl.sum(found, 0)
    above = marks >> 16
    if marks > 0:
        tl.atomic_add(counts, above.to(tl.int64), sem="relaxed")
        tied = (marks & 0xFFFF) - above * (_FREE - _ABOVE)
        tl.atomic_add(counts + 1, tied.to(tl.int64), sem="relaxed")
    if not random:
        mine = tl.sum(total, 0)
        if above > 0:
            tl.atomic_add(mass + 4 * tile + 3, mine, sem="relaxed")
        if tl.max(largest, 0) >= 0x7F800000:
            tl.atomic_add(counts + 2, tl.full((), 1, tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["domain"])
def _settle(
    table, width, owner, edge, domain, aligned: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """`claim.settle` of one block of a tile."""
    row = table + tl.program_id(1) * width
    begin, size = _begin(row, aligned), _size(row, aligned)
    at = tl.program_id(0) * block + tl.arange(0, block)
    code = tl.load(owner + begin + at, mask=at < size, other=0).to(tl.int32)
    code = _settled(code, at, _last_tie(edge, begin), domain)
    tl.store(owner + begin + at, code.to(tl.uint8), mask=at < size)


@triton.jit(do_not_specialize=["code"])
def _tally(
    table, width, owner, counts, mass, code, kind: tl.constexpr, lanes: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """`claim.tally` of one tile: support, how many are not finite, the lanes of its mass."""
    tile = tl.program_id(0)
    row, begin = table + tile * width, tl.load(table + tile * width + 2)
    size = tl.load(row + 3).to(tl.int32)
    total, bad = tl.zeros([lanes], tl.float64), tl.zeros([lanes], tl.float32)
    found = tl.zeros([lanes], tl.int32)
    step = size - size
    while step < size:
        codes = _codes_ahead(owner + begin, step, size, lanes, depth)
        own = _ahead(tl.load(row), step, size, kind, lanes, depth)
        base = _ahead(tl.load(row + 1), step, size, kind, lanes, depth)
        for part in tl.static_range(depth):
            at = step + part * lanes + tl.arange(0, lanes)
            mine = (codes[part].to(tl.int32) == code) & (at < size)
            score = wide(own[part]) - wide(base[part])
            bad += score - score
            found += (mine & (score != 0)).to(tl.int32)
            total += tl.where(mine, tl.abs(score), 0.0).to(tl.float64)
        step += lanes * depth
    tl.store(counts + 2 * tile, tl.sum(found, 0))
    tl.store(counts + 2 * tile + 1, tl.sum((bad != 0).to(tl.int32), 0))
    tl.store(mass + tile * lanes + tl.arange(0, lanes), total)


@triton.jit(do_not_specialize=["claimed", "least", "every", "high", "key0", "key1"])
def _count(
    table, width, owner, histograms, places, claimed, least, every, high, key0, key1,
    lower: tl.constexpr, random: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr,
    copies: tl.constexpr, strip: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`claim.count_high`, or with `lower` `claim.count_low`, of one block of one strip."""
    row = table + tl.program_id(1) * width
    begin, size = _begin(row, aligned), _size(row, aligned)
    least = _least(begin, size, claimed, least)
    number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    histogram = histograms + (number % copies) * places
    at, there = sampled(size, every, strip, block)
    code = tl.load(owner + begin + at, mask=there, other=0).to(tl.int32)
    score = _score(row, begin, at, there, key0, key1, random, kind)
    wanted = there & (code >= least)
    if lower:
        magnitude = magnitude_of(score)
        place = magnitude & 0x7FFF
        wanted = wanted & ((magnitude >> 15) == high)
    else:
        place = high_place(score)
    tl.atomic_add(histogram + place, 1, mask=wanted, sem="relaxed")


@triton.jit(do_not_specialize=["scale", "below", "base"])
def _admit(
    table, width, owner, out, flag, domains, keys, scale, below, base, form: tl.constexpr,
    count: tl.constexpr, kind: tl.constexpr, result: tl.constexpr, aligned: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """`claim.admit` of one block of a tile. Addresses in a row: anchor, reference, domains."""
    row = table + tl.program_id(1) * width
    begin, size = _begin(row, aligned), _size(row, aligned)
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    mine = tl.load(owner + begin + at, mask=there, other=_FREE).to(tl.int32)
    some = _values(row, at, there, kind)
    note_wrong(some, flag, 1)
    for number in tl.static_range(count):
        chosen = there & (mine == tl.load(domains + number))
        own = _values(row + _TILE_ROW + number, at, chosen, kind)
        if form == _REPLACE:
            moved = tl.where(scale == 1.0, own, some + (own - some) * scale)
        else:
            reference = _values(row + 1, at, chosen, kind)
            moved = some + scale * (own - reference)
        if form == _SPARSE:
            key = keys + 2 * number
            draw = drawn(tl.load(key), tl.load(key + 1), begin + at).to(tl.int64)
            chosen = chosen & (draw >= below)
        some = tl.where(chosen, moved, some)
    start = begin - base
    start = tl.multiple_of(start, 16) if aligned else start
    save(out + start, at, there, some, flag, result)


class TileCopies(Protocol):
    """Finds or makes copies of a member's tiles on the device."""

    def __call__(
        self, rows: Array, edges: Array, first: int, last: int, *, alone: bool = False
    ) -> tuple[Tensor, Array]:
        """Bytes on the device, and where in them tiles [first, last) begin, for a pass.

        `rows` (tiles, 3) and `edges` are those of all tiles of the block; see `claim.TileTable`.
        `alone`: in a thread that must not hand work to others.
        """

    def bring(self, rows: Array, edges: Array) -> None:
        """Copy members whole, a row of each for each tile, if there is room for all."""


class ClaimDevice(Protocol):
    """The device as loops see it."""

    def stream(self) -> AbstractContextManager[None]:
        """The calling thread's own; all that it was given is done in the end."""

    def halved(self, first: int, last: int, program: Callable[[int, int], None]) -> None:
        """Run program(first, last) or, where memory is short, the program on both halves."""

    def give_at(self, values: Tensor, address: int) -> None:
        """Copy results to an address, where they are when the program has ended."""

    def room(self, size: int) -> Array:
        """The calling thread's own room for so many float32."""

    def drain(self, values: Tensor, target: Drain, begun: int) -> bool:
        """Write results into a file, from so many bytes behind its place on; whether it could."""

    def launches_of_others(self) -> AbstractContextManager[None]:
        """What a program waits in: others may launch meanwhile."""


class TritonClaims:
    """What `sigmerge.core.claim` has, by the same names; the owner map is on the device."""

    most_parts = 1
    """Parts of a block: a launch takes all its tiles at once."""
    longer = 4
    """How many times as many tiles as a worker of the loops rewrites are rewritten at a time."""
    _last: _Tiles | None = None

    def __init__(self, device: torch.device, copies: TileCopies, place: ClaimDevice) -> None:
        self._device, self._copies, self._place = device, copies, place

    def room(self, size: int, dtype: Any) -> Array:
        """The calling thread's own, where results are copied to."""
        kind = np.dtype(dtype)
        return self._place.room(-(-size * kind.itemsize // 4)).view(kind)[:size]

    def bring(self, rows: Array, edges: Array) -> None:
        """Have the tiles of some members on the device before they are read, if there is room."""
        with self._place.stream():
            self._copies.bring(rows, edges)

    def free_map(self, size: int) -> Tensor:
        with self._place.stream():
            return torch.full((size,), int(claim.FREE), dtype=torch.uint8, device=self._device)

    def count_free(self, owner: Tensor) -> int:
        return int((owner == int(claim.FREE)).sum())

    def count_high(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        every: int,
        before: Settlement,
        histogram: Array,
    ) -> None:
        self._counted(table, owner, first, last, every, before, histogram)

    def count_low(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        every: int,
        before: Settlement,
        high: int,
        histogram: Array,
    ) -> None:
        self._counted(table, owner, first, last, every, before, histogram, high)

    def _counted(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        every: int,
        before: Settlement,
        histogram: Array,
        high: int | None = None,
    ) -> None:
        """Where a sample would be larger than ENOUGH, it is that of one tile in some."""

        def one(first: int, last: int) -> None:
            tiles, edges = self._rows(table, owner, first, last), table.edges
            size = int(edges[last] - edges[first])
            step = max(1, size // (every * ENOUGH)) if every > 1 else 1
            strips = triton.cdiv(tiles.longest, SAMPLE_RUN * every) * (SAMPLE_RUN // COUNT_BLOCK)
            found = torch.zeros(
                (COPIES, len(histogram)), dtype=torch.int32, device=self._device
            )  # fmt: skip
            launch(
                _count, (strips, triton.cdiv(last - first, step)), tiles.there, step * TILE_ROW,
                owner, found, len(histogram), *_free(edges, before, first, last), every, high or 0,
                *_key(table), high is not None, bool(table.key[0]), _kind(table, first, last),
                _aligned(edges), COPIES, SAMPLE_RUN, COUNT_BLOCK, num_warps=COUNT_WARPS, **EXACT,
            )  # fmt: skip
            counted = fetched(found.sum(0, dtype=torch.int32))
            np.add(histogram, counted.view(np.uint32), out=histogram)

        self._place.halved(first, last, one)

    def mark(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        before: Settlement,
        threshold: int,
        counts: Array,
        mass: Array,
    ) -> int:
        wrong: list[int] = []

        def one(first: int, last: int) -> None:
            tiles, kind = self._rows(table, owner, first, last), _kind(table, first, last)
            aligned = _aligned(table.edges)
            found = torch.zeros((last - first, 4), dtype=torch.float64, device=self._device)
            some = _first_left(before, first, last)
            if some < last and before.ties[some]:
                self._settled(table.edges, owner, some, some + 1, before)
            launch(
                _mark, _blocks(tiles.longest, MARK_BLOCK * MARK_STEPS, last - first),
                tiles.there, TILE_ROW, owner, found.view(torch.int64), found, before.domain,
                *_free(table.edges, before, first, last), threshold, *_key(table),
                bool(table.key[0]), kind, aligned, MARK_BLOCK, MARK_STEPS,
                MARK_TOGETHER if aligned else 1, num_warps=MARK_WARPS, **EXACT,
            )  # fmt: skip
            sums = fetched(found).copy()
            numbers = sums.view(np.int64)
            again = np.flatnonzero(~(sums[:, 3] < exact_below(threshold)))
            if again.size:
                sums[again, 3] = self._tallied(tiles.rows[again], owner, int(claim.ABOVE), kind)[0]
            counts[first:last], mass[first:last] = numbers[:, :2], sums[:, 3]
            wrong.extend(first + np.flatnonzero(numbers[:, 2]))

        self._place.halved(first, last, one)
        return int(min(wrong, default=-1))

    def settle(self, edges: Array, owner: Tensor, first: int, last: int, marks: Settlement) -> None:
        def one(first: int, last: int) -> None:
            self._settled(edges, owner, first, last, marks)

        self._place.halved(first, last, one)

    def _settled(
        self, edges: Array, owner: Tensor, first: int, last: int, marks: Settlement
    ) -> None:
        rows = _tiles(edges, first, last)
        launch(
            _settle, _blocks(int(rows[:, 3].max()), SETTLE_BLOCK, len(rows)), there(rows, owner),
            TILE_ROW, owner, self._edge(edges, owner, first, last, marks), marks.domain,
            _aligned(edges), SETTLE_BLOCK, num_warps=SETTLE_WARPS,
        )  # fmt: skip

    def tally(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        code: int,
        support: Array,
        mass: Array,
    ) -> int:
        wrong: list[int] = []

        def one(first: int, last: int) -> None:
            rows = self._rows(table, owner, first, last).rows
            kind = _kind(table, first, last)
            mass[first:last], numbers = self._tallied(rows, owner, code, kind)
            support[first:last] = numbers[:, 0]
            wrong.extend(first + np.flatnonzero(numbers[:, 1]))

        self._place.halved(first, last, one)
        return int(min(wrong, default=-1))

    def _tallied(self, rows: Array, owner: Tensor, code: int, kind: int) -> tuple[Array, Array]:
        """By tile: the mass, added in the order of the loops; support and how many not finite."""
        found = torch.empty((len(rows), 2), dtype=torch.int32, device=self._device)
        sums = torch.empty((len(rows), LANES), dtype=torch.float64, device=self._device)
        launch(
            _tally, (len(rows),), there(rows, owner), TILE_ROW, owner, found, sums, code, kind,
            LANES, DEPTH, num_warps=2, **EXACT,
        )  # fmt: skip
        return fetched(added(sums)).copy(), fetched(found)

    def admit(
        self,
        update: Admission,
        edges: Array,
        owner: Tensor,
        first: int,
        last: int,
        members: Array,
        target: Array,
    ) -> Admitted:
        kind, drain = int(target[0]), drain_to(target)
        fine, base = [True, True], int(edges[first])

        def one(first: int, last: int) -> None:
            begin, end = int(edges[first]), int(edges[last])
            rows = np.zeros((last - first, TILE_ROW + len(update.domains)), np.int64)
            rows[:, :TILE_ROW] = _tiles(edges, first, last)
            held = []
            columns = [0, 1, *range(TILE_ROW, rows.shape[1])]
            for column, member in zip(columns, [-1, -2, *update.domains.tolist()], strict=True):
                copy, rows[:, column] = self._where(members[member], edges, first, last, alone=True)
                held.append(copy)
            stored = torch.empty(end - begin, dtype=STORED[kind], device=self._device)
            flag = no_flag(self._device)
            launch(
                _admit, _blocks(int(rows[:, 3].max()), BLOCK, len(rows)), there(rows, owner),
                rows.shape[1], owner, stored, flag, there(update.domains.astype(np.int32), owner),
                there(update.keys.astype(np.uint32).view(np.int32), owner),
                float(np.float32(update.scale)), int(update.below), begin, update.form,
                len(update.domains), _one(members[:, first:last, 0]), kind, _aligned(edges), BLOCK,
                **EXACT,
            )  # fmt: skip
            found = int(flag.item())
            del held
            fine[0] &= not found & 1
            fine[1] &= not found & 2
            begun = drain.width * (begin - base)
            fine[1] &= self._delivered(stored, begun, drain, right=all(fine))

        self._place.halved(first, last, one)
        return Admitted(fine[0], fine[1], int(drain.checksum[0]))

    def _delivered(self, values: Tensor, begun: int, drain: Drain, *, right: bool) -> bool:
        """Put results, so many bytes behind the first of all, where they belong.

        Into a file only if they are `right`; False if they are not there.
        """
        if drain.descriptor == MEMORY:
            self._place.give_at(values, drain.position + begun)
            return True
        if not right:
            return False
        with self._place.launches_of_others():
            return self._place.drain(values, drain, begun)

    def _rows(self, table: TileTable, owner: Tensor, first: int, last: int) -> _Tiles:
        """The table's rows; those of the pass before, if that read the same copies."""
        copies, places = [], []
        if not table.key[0]:
            for member in (table.expert, table.reference):
                copy, place = self._where(member, table.edges, first, last)
                copies.append(copy)
                places.append(place)
        key = (first, last, *(int(place[0]) for place in places))
        if self._last is None or self._last.key != key:
            rows = _tiles(table.edges, first, last)
            for column, place in enumerate(places):
                rows[:, column] = place
            self._last = _Tiles(key, rows, int(rows[:, 3].max()), there(rows, owner), copies)
        return self._last

    def _where(
        self, rows: Array, edges: Array, first: int, last: int, *, alone: bool = False
    ) -> tuple[Tensor, Array]:
        """A copy of a member's tiles, and the cell of each in the table."""
        copy, places = self._copies(rows, edges, first, last, alone=alone)
        return copy, copy.data_ptr() + places + rows[first:last, 0]

    def _edge(
        self, edges: Array, owner: Tensor, first: int, last: int, marks: Settlement
    ) -> Tensor:
        """The flat index of the last tie that is claimed, on the device.

        Ties go from the lowest index on, so that at most one tile has only some of its own claimed.
        """
        some = _first_left(marks, first, last)
        if some == last or not marks.ties[some]:
            return there(edges[some : some + 1] - 1, owner)
        begin, end = (int(edge) for edge in edges[some : some + 2])
        rank = (owner[begin:end] == int(claim.TIED)).cumsum(0)
        return torch.searchsorted(rank, int(marks.ties[some])).reshape(1) + begin


class _Tiles(NamedTuple):
    """The table of a pass: what it was made from, its rows here and on the device."""

    key: tuple[int, ...]
    rows: Array
    longest: int
    there: Tensor
    copies: list[Tensor]
    """What the rows point to."""


def exact_below(threshold: int) -> float:
    """A float64 sum of magnitudes above a threshold that is less than this is exact.

    float32 numbers above a threshold are whole multiples of its last bit's value, the unit, and so
    are their sums, which float64 holds exactly up to 2⁵³ units. Rounding is monotonic and nothing
    is negative, so that a partial sum of 2⁵³ units or more leaves a total of as many: a total below
    proves that nothing was rounded, and that every other order gives the same number.
    """
    return math.ldexp(1.0, 53 + max(threshold >> 23, 1) - 150)


def drain_to(target: Array) -> Drain:
    """A row of members as a drain; of memory its position is the address."""
    kind, descriptor, position = target.tolist()
    return Drain(descriptor, position, 4 if kind == F32 else 2, np.zeros(1, np.uint64))


def sizes(kinds: Array, edges: Array) -> Array:
    """Bytes of tiles of a member."""
    return np.diff(edges) * np.where(kinds == F32, 4, 2)


def _kind(table: TileTable, first: int, last: int) -> int:
    """The one type in which the tiles of a run are stored, or SEVERAL."""
    if table.key[0]:
        return F32
    return _one(np.stack([table.expert[first:last, 0], table.reference[first:last, 0]]))


def _one(kinds: Array) -> int:
    least = int(kinds.min())
    return least if least == kinds.max() else SEVERAL


def _key(table: TileTable) -> tuple[int, int]:
    first, second = (int(np.uint32(word).view(np.int32)) for word in table.key[1:])
    return first, second


def _tiles(edges: Array, first: int, last: int) -> Array:
    """A row per tile, with its begin and size."""
    rows = np.zeros((last - first, TILE_ROW), np.int64)
    rows[:, 2], rows[:, 3] = edges[first:last], np.diff(edges[first : last + 1])
    return rows


def _blocks(longest: int, block: int, tiles: int) -> tuple[int, int]:
    """A grid of blocks of tiles."""
    return triton.cdiv(longest, block), tiles


def _aligned(edges: Array) -> bool:
    return not (edges % 16).any()


def _free(edges: Array, before: Settlement, first: int, last: int) -> tuple[int, int]:
    """What `_least` reads: where the tiles end all of whose ties are claimed, and the least code.

    Of a tile some of whose ties are claimed, all count as free, as in the loops.
    """
    if not before.ties.size:
        return -1, int(claim.ABOVE)
    return int(edges[_first_left(before, first, last)]), int(claim.TIED)


def _first_left(marks: Settlement, first: int, last: int) -> int:
    """The first tile not all of whose ties are claimed; those behind it have none claimed."""
    left = np.flatnonzero(marks.ties[first:last] < marks.counts[first:last, 1])
    return first + int(left[0]) if left.size else last
