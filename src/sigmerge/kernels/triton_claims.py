"""The loops of `claim` on a GPU, one launch each: the same counts, marks and values.

A program takes one tile, or one strip of it. It finds the stored values by a table of addresses on
the device, which has a row for every tile. Runs whose tiles are stored in different types are left
to the programs in torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sigmerge.kernels import LANES, STRIP, Array, claim, tensors
from sigmerge.kernels.claim import Admission, Settlement, TileTable
from sigmerge.kernels.stored import BF16, F16, F32
from sigmerge.kernels.tensor_claims import TensorClaims
from sigmerge.kernels.tensors import fetched
from sigmerge.kernels.triton_passes import (
    BLOCK,
    EXACT,
    drawn,
    high_place,
    launch,
    magnitude_of,
    note_wrong,
    sampled,
    save,
    there,
    wide,
    widened,
)

TILE_ROW = 5
"""Numbers of a tile in its row of the table, before the addresses of domains: two addresses, its
begin, its size, and the least code of what is free."""
DEPTH = 16
"""Steps of the lanes whose entries are loaded before the first is used: a GPU's memory answers
late. The time to compile grows with its square."""
TAIL = 1
"""The same for the entries at the end of a tile that fill no such steps."""
_TILE_ROW = tl.constexpr(TILE_ROW)
_BF16, _F16 = tl.constexpr(BF16), tl.constexpr(F16)
_ABOVE, _TIED, _FREE = (tl.constexpr(int(c)) for c in (claim.ABOVE, claim.TIED, claim.FREE))
_SPARSE, _REPLACE = tl.constexpr(claim.SPARSE), tl.constexpr(claim.REPLACE)


@triton.jit
def _stored(address, kind: tl.constexpr):
    """The address as a pointer to stored values; copies begin at multiples of 256 bytes."""
    if kind == _BF16:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif kind == _F16:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _begin(row, aligned: tl.constexpr):
    """Where a tile begins in the owner map; a multiple of 16 if all tiles begin there."""
    begin = tl.load(row + 2)
    return tl.multiple_of(begin, 16) if aligned else begin


@triton.jit
def _score(row, begin, at, there, key0, key1, random: tl.constexpr, kind: tl.constexpr):
    """Δ_d, or random bits of the flat index."""
    if random:
        score = drawn(key0, key1, begin + at).to(tl.float32, bitcast=True)
    else:
        own = widened(_stored(tl.load(row), kind), at, there)
        score = own - widened(_stored(tl.load(row + 1), kind), at, there)
    return score


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
def _ahead(pointer, step, size, lanes: tl.constexpr, depth: tl.constexpr, masked: tl.constexpr):
    """The entries of the next steps of the lanes, as they are stored."""
    found = ()
    for part in tl.static_range(depth):
        at = step + part * lanes + tl.arange(0, lanes)
        if masked:
            found = found + (tl.load(pointer + at, mask=at < size, other=0),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            found = found + (tl.load(pointer + at),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _scores(
    row, begin, step, size, key0, key1, random: tl.constexpr, kind: tl.constexpr,
    lanes: tl.constexpr, depth: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """What the entries of the next steps are ranked by."""
    found = ()
    if random:
        for part in tl.static_range(depth):
            place = begin + step + part * lanes + tl.arange(0, lanes)
            found = found + (drawn(key0, key1, place).to(tl.float32, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        own = _ahead(_stored(tl.load(row), kind), step, size, lanes, depth, masked)
        base = _ahead(_stored(tl.load(row + 1), kind), step, size, lanes, depth, masked)
        for part in tl.static_range(depth):
            found = found + (wide(own[part]) - wide(base[part]),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _mark_run(
    row, owner, begin, size, first, end, last_tie, domain, threshold, key0, key1, total, bad,
    above, equal, random: tl.constexpr, kind: tl.constexpr,
    lanes: tl.constexpr, depth: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Mark a run of a tile, once the marks of the domain before are handed out."""
    step = first
    while step < end:  # an interpreter takes no number of a device for a range
        codes = _ahead(owner + begin, step, size, lanes, depth, masked)
        scores = _scores(
            row, begin, step, size, key0, key1, random, kind, lanes, depth, masked
        )  # fmt: skip
        for part in tl.static_range(depth):
            at = step + part * lanes + tl.arange(0, lanes)
            code = _settled(codes[part].to(tl.int32), at, last_tie, domain)
            score = scores[part]
            magnitude = magnitude_of(score)
            new = tl.where(magnitude == threshold, _TIED, _FREE)
            new = tl.where(magnitude > threshold, _ABOVE, new)
            code = tl.where(code >= _ABOVE, new, code)
            if masked:
                code = tl.where(at < size, code, 0)
                tl.store(owner + begin + at, code.to(tl.uint8), mask=at < size)
            else:
                tl.store(owner + begin + at, code.to(tl.uint8))
            above += (code == _ABOVE).to(tl.int32)
            equal += (code == _TIED).to(tl.int32)
            if not random:
                bad += score - score
                total += tl.where(code == _ABOVE, tl.abs(score), 0.0).to(tl.float64)
        step += lanes * depth
    return total, bad, above, equal


@triton.jit(do_not_specialize=["domain", "threshold", "key0", "key1"])
def _mark(
    table, width, owner, edge, counts, mass, domain, threshold, key0, key1, random: tl.constexpr,
    kind: tl.constexpr, lanes: tl.constexpr, depth: tl.constexpr, tail: tl.constexpr,
):  # fmt: skip
    """`claim.mark` of one tile: counts above, tied and not finite, the lanes of its mass."""
    tile = tl.program_id(0)
    row, begin = table + tile * width, tl.load(table + tile * width + 2)
    size = tl.load(row + 3).to(tl.int32)
    last_tie = _last_tie(edge, begin)
    total, bad = tl.zeros([lanes], tl.float64), tl.zeros([lanes], tl.float32)
    above, equal = tl.zeros([lanes], tl.int32), tl.zeros([lanes], tl.int32)
    whole = size // (lanes * depth) * (lanes * depth)
    total, bad, above, equal = _mark_run(
        row, owner, begin, size, size - size, whole, last_tie, domain, threshold, key0, key1, total,
        bad, above, equal, random, kind, lanes, depth, False,
    )  # fmt: skip
    total, bad, above, equal = _mark_run(
        row, owner, begin, size, whole, size, last_tie, domain, threshold, key0, key1, total, bad,
        above, equal, random, kind, lanes, tail, True,
    )  # fmt: skip
    tl.store(counts + 3 * tile, tl.sum(above, 0))
    tl.store(counts + 3 * tile + 1, tl.sum(equal, 0))
    tl.store(counts + 3 * tile + 2, tl.sum((bad != 0).to(tl.int32), 0))
    tl.store(mass + tile * lanes + tl.arange(0, lanes), total)


@triton.jit(do_not_specialize=["domain"])
def _settle(
    table, width, owner, edge, domain, aligned: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """`claim.settle` of one block of a tile."""
    row = table + tl.program_id(1) * width
    begin, size = _begin(row, aligned), tl.load(row + 3).to(tl.int32)
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
    size, key = tl.load(row + 3).to(tl.int32), tl.zeros((), tl.int32)
    total, bad = tl.zeros([lanes], tl.float64), tl.zeros([lanes], tl.float32)
    found = tl.zeros([lanes], tl.int32)
    step = size - size
    while step < size:
        codes = _ahead(owner + begin, step, size, lanes, depth, True)
        scores = _scores(row, begin, step, size, key, key, False, kind, lanes, depth, True)
        for part in tl.static_range(depth):
            at = step + part * lanes + tl.arange(0, lanes)
            mine, score = (codes[part].to(tl.int32) == code) & (at < size), scores[part]
            bad += score - score
            found += (mine & (score != 0)).to(tl.int32)
            total += tl.where(mine, tl.abs(score), 0.0).to(tl.float64)
        step += lanes * depth
    tl.store(counts + 2 * tile, tl.sum(found, 0))
    tl.store(counts + 2 * tile + 1, tl.sum((bad != 0).to(tl.int32), 0))
    tl.store(mass + tile * lanes + tl.arange(0, lanes), total)


@triton.jit(do_not_specialize=["every", "high", "key0", "key1"])
def _count(
    table, width, owner, histogram, every, high, key0, key1, lower: tl.constexpr,
    random: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr, strip: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """`claim.count_high`, or with `lower` `claim.count_low`, of one block of one strip."""
    row = table + tl.program_id(1) * width
    begin, size, least = _begin(row, aligned), tl.load(row + 3).to(tl.int32), tl.load(row + 4)
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
    begin, size = _begin(row, aligned), tl.load(row + 3).to(tl.int32)
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    mine = tl.load(owner + begin + at, mask=there, other=_FREE).to(tl.int32)
    some = widened(_stored(tl.load(row), kind), at, there)
    note_wrong(some, flag, 1)
    for number in tl.static_range(count):
        chosen = there & (mine == tl.load(domains + number))
        own = widened(_stored(tl.load(row + _TILE_ROW + number), kind), at, chosen)
        if form == _REPLACE:
            moved = tl.where(scale == 1.0, own, some + (own - some) * scale)
        else:
            reference = widened(_stored(tl.load(row + 1), kind), at, chosen)
            moved = some + scale * (own - reference)
        if form == _SPARSE:
            key = keys + 2 * number
            draw = drawn(tl.load(key), tl.load(key + 1), begin + at).to(tl.int64)
            chosen = chosen & (draw >= below)
        some = tl.where(chosen, moved, some)
    save(out + (begin - base), at, there, some, flag, result)


class TritonClaims(TensorClaims):
    """`TensorClaims` with one launch for each loop."""

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
        if (kind := _kind(table, first, last)) is None:
            return super().count_high(table, owner, first, last, every, before, histogram)
        self._counted(table, owner, first, last, every, before, histogram, kind)
        return None

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
        if (kind := _kind(table, first, last)) is None:
            return super().count_low(table, owner, first, last, every, before, high, histogram)
        self._counted(table, owner, first, last, every, before, histogram, kind, high)
        return None

    def _counted(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        every: int,
        before: Settlement,
        histogram: Array,
        kind: int,
        high: int | None = None,
    ) -> None:
        def one(first: int, last: int) -> None:
            rows, held = self._rows(table, first, last)
            rows[:, 4] = _least_free(before, first, last)
            found = torch.zeros(len(histogram), dtype=torch.int32, device=self._device)
            strips = triton.cdiv(int(rows[:, 3].max()), STRIP * every) * (STRIP // BLOCK)
            launch(
                _count, (strips, len(rows)), there(rows, owner), rows.shape[1], owner, found,
                every, high or 0, *_key(table), high is not None, bool(table.key[0]), kind,
                _aligned(table.edges), STRIP, BLOCK, **EXACT,
            )  # fmt: skip
            np.add(histogram, fetched(found), out=histogram, casting="unsafe")
            del held

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
        if (kind := _kind(table, first, last)) is None:
            return super().mark(table, owner, first, last, before, threshold, counts, mass)
        wrong: list[int] = []

        def one(first: int, last: int) -> None:
            rows, held = self._rows(table, first, last)
            tiles = len(rows)
            found = torch.empty((tiles, 3), dtype=torch.int32, device=self._device)
            sums = torch.empty((tiles, LANES), dtype=torch.float64, device=self._device)
            # Where nothing is left to settle, marks of a wrong guess are free again.
            domain = before.domain if before.ties.size else int(claim.FREE)
            launch(
                _mark, (tiles,), there(rows, owner), rows.shape[1], owner,
                self._edge(table.edges, owner, first, last, before), found, sums, domain,
                threshold, *_key(table), bool(table.key[0]), kind, LANES, DEPTH, TAIL,
                num_warps=2, **EXACT,
            )  # fmt: skip
            mass[first:last] = tensors.totals(sums)
            numbers = fetched(found)
            counts[first:last] = numbers[:, :2]
            wrong.extend(first + np.flatnonzero(numbers[:, 2]))
            del held

        self._place.halved(first, last, one)
        return int(min(wrong, default=-1))

    def settle(self, edges: Array, owner: Tensor, first: int, last: int, marks: Settlement) -> None:
        def one(first: int, last: int) -> None:
            rows = _tiles(edges, first, last)
            launch(
                _settle, _blocks(rows), there(rows, owner), rows.shape[1], owner,
                self._edge(edges, owner, first, last, marks), marks.domain, _aligned(edges), BLOCK,
            )  # fmt: skip

        self._place.halved(first, last, one)

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
        if (kind := _kind(table, first, last)) is None:
            return super().tally(table, owner, first, last, code, support, mass)
        wrong: list[int] = []

        def one(first: int, last: int) -> None:
            rows, held = self._rows(table, first, last)
            found = torch.empty((len(rows), 2), dtype=torch.int32, device=self._device)
            sums = torch.empty((len(rows), LANES), dtype=torch.float64, device=self._device)
            launch(
                _tally, (len(rows),), there(rows, owner), rows.shape[1], owner, found, sums, code,
                kind, LANES, DEPTH, num_warps=2, **EXACT,
            )  # fmt: skip
            mass[first:last] = tensors.totals(sums)
            numbers = fetched(found)
            support[first:last] = numbers[:, 0]
            wrong.extend(first + np.flatnonzero(numbers[:, 1]))
            del held

        self._place.halved(first, last, one)
        return int(min(wrong, default=-1))

    def admit(
        self,
        update: Admission,
        edges: Array,
        owner: Tensor,
        first: int,
        last: int,
        addresses: Array,
        kinds: Array,
        out: np.uint64,
        kind: int,
    ) -> tuple[bool, bool]:
        if len(np.unique(kinds[:, first:last])) > 1:
            return super().admit(update, edges, owner, first, last, addresses, kinds, out, kind)
        fine, width, base = [True, True], 4 if kind == F32 else 2, int(edges[first])

        def one(first: int, last: int) -> None:
            begin, end = int(edges[first]), int(edges[last])
            rows = np.zeros((last - first, TILE_ROW + len(update.domains)), np.int64)
            rows[:, :TILE_ROW] = _tiles(edges, first, last)
            held = []
            columns = [0, 1, *range(TILE_ROW, rows.shape[1])]
            for column, member in zip(columns, [-1, -2, *update.domains.tolist()], strict=True):
                copy, rows[:, column] = self._where(
                    addresses[member], kinds[member], edges, first, last, alone=True
                )
                held.append(copy)
            stored = torch.empty(end - begin, dtype=_RESULT[kind], device=self._device)
            flag = tensors.no_flag(self._device)
            launch(
                _admit, _blocks(rows), there(rows, owner), rows.shape[1], owner, stored, flag,
                there(update.domains.astype(np.int32), owner),
                there(update.keys.astype(np.uint32).view(np.int32), owner),
                float(np.float32(update.scale)), int(update.below), begin, update.form,
                len(update.domains), int(kinds[0, first]), kind, _aligned(edges), BLOCK, **EXACT,
            )  # fmt: skip
            self._place.give_at(stored, int(out) + width * (begin - base))
            found = int(flag.item())
            fine[0] &= not found & 1
            fine[1] &= not found & 2
            del held

        self._place.halved(first, last, one)
        return fine[0], fine[1]

    def _rows(self, table: TileTable, first: int, last: int) -> tuple[Array, list[Any]]:
        """The table's rows, and the copies that they point to."""
        rows, held = _tiles(table.edges, first, last), []
        if not table.key[0]:
            for column, (addresses, kinds) in enumerate((
                (table.expert, table.expert_kinds), (table.reference, table.reference_kinds)
            )):  # fmt: skip
                copy, rows[:, column] = self._where(addresses, kinds, table.edges, first, last)
                held.append(copy)
        return rows, held

    def _where(
        self,
        addresses: Array,
        kinds: Array,
        edges: Array,
        first: int,
        last: int,
        *,
        alone: bool = False,
    ) -> tuple[Tensor, Array]:
        """A copy of a member's tiles, and the address of each."""
        copy, places = self._copies(addresses, kinds, edges, first, last, alone=alone)
        return copy, copy.data_ptr() + places

    def _edge(
        self, edges: Array, owner: Tensor, first: int, last: int, marks: Settlement
    ) -> Tensor:
        """The flat index of the last tie that is claimed, on the device.

        Ties go from the lowest index on, so that at most one tile has only some of its own claimed.
        """
        if not marks.ties.size:
            return there(np.array([-1]), owner)
        ties, tied = marks.ties[first:last], marks.counts[first:last, 1]
        some, full = np.flatnonzero((ties > 0) & (ties < tied)), np.flatnonzero(ties > 0)
        if not some.size:
            last_one = int(edges[first + full[-1] + 1]) - 1 if full.size else -1
            return there(np.array([last_one]), owner)
        begin, end = (int(edge) for edge in edges[first + some[0] :][:2])
        rank = (owner[begin:end] == int(claim.TIED)).cumsum(0)
        return torch.searchsorted(rank, int(ties[some[0]])).reshape(1) + begin


_RESULT = {BF16: torch.int16, F16: torch.float16, F32: torch.float32}


def _kind(table: TileTable, first: int, last: int) -> int | None:
    """The one type in which the tiles of a run are stored; None if there are several."""
    if table.key[0]:
        return F32
    kinds = np.unique([table.expert_kinds[first:last], table.reference_kinds[first:last]])
    return int(kinds[0]) if len(kinds) == 1 else None


def _key(table: TileTable) -> tuple[int, int]:
    first, second = (int(np.uint32(word).view(np.int32)) for word in table.key[1:])
    return first, second


def _tiles(edges: Array, first: int, last: int) -> Array:
    """A row per tile, with its begin and size."""
    rows = np.zeros((last - first, TILE_ROW), np.int64)
    rows[:, 2], rows[:, 3] = edges[first:last], np.diff(edges[first : last + 1])
    return rows


def _blocks(rows: Array) -> tuple[int, int]:
    """A grid of BLOCKs of tiles."""
    return triton.cdiv(int(rows[:, 3].max()), BLOCK), len(rows)


def _aligned(edges: Array) -> bool:
    return not (edges[:-1] % 16).any()


def _least_free(before: Settlement, first: int, last: int) -> Any:
    """As `claim._least_free`, of every tile."""
    if not before.ties.size:
        return int(claim.ABOVE)
    all_claimed = before.ties[first:last] == before.counts[first:last, 1]
    return np.where(all_claimed, int(claim.FREE), int(claim.TIED))
