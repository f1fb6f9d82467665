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
from sigmerge.kernels.triton_passes import (
    BLOCK,
    EXACT,
    UNROLL,
    drawn,
    magnitude_of,
    note_wrong,
    save,
    widened,
)

TILE_ROW = 6
"""Numbers of a tile in its row of the table, before the addresses of domains."""
_TILE_ROW = tl.constexpr(TILE_ROW)
_BF16, _F16 = tl.constexpr(BF16), tl.constexpr(F16)
_ABOVE, _TIED, _FREE = (tl.constexpr(int(c)) for c in (claim.ABOVE, claim.TIED, claim.FREE))
_SPARSE, _REPLACE = tl.constexpr(claim.SPARSE), tl.constexpr(claim.REPLACE)


@triton.jit
def _stored(address, kind: tl.constexpr):
    """The address as a pointer to stored values."""
    if kind == _BF16:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif kind == _F16:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return pointer


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
def _settled(code, ties, tied, seen, domain):
    """The codes after a domain's marks are handed out, and the ties seen so far."""
    among = code == _TIED
    taken = among & (ties == tied)
    if (ties > 0) & (ties < tied):
        rank = seen + tl.cumsum(among.to(tl.int32), 0)
        taken = among & (rank <= ties)
    claimed = (code == _ABOVE) | taken
    code = tl.where(claimed, domain, tl.where(among, _FREE, code))
    return code, seen + tl.sum(among.to(tl.int32), 0)


@triton.jit(do_not_specialize=["domain", "threshold", "key0", "key1"])
def _mark(
    table, width, owner, counts, mass, wrong, domain, threshold, key0, key1, settles: tl.constexpr,
    random: tl.constexpr, kind: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
    longest: tl.constexpr,
):  # fmt: skip
    """`claim.mark` of one tile: counts above and tied, the lanes of its mass."""
    tile = tl.program_id(0)
    row, lane = table + tile * width, tl.arange(0, lanes)
    begin, size = tl.load(row + 2), tl.load(row + 3)
    ties, tied, seen = tl.load(row + 4), tl.load(row + 5), tl.zeros((), tl.int32)
    total, bad = tl.zeros([lanes], tl.float64), tl.zeros([lanes], tl.float32)
    above, equal = tl.zeros([lanes], tl.int32), tl.zeros([lanes], tl.int32)
    for step in range(0, longest, lanes * unroll):
        for part in tl.static_range(unroll):
            at = step + part * lanes + lane
            there = at < size
            code = tl.load(owner + begin + at, mask=there, other=0).to(tl.int32)
            if settles:
                code, seen = _settled(code, ties, tied, seen, domain)
            score = _score(row, begin, at, there, key0, key1, random, kind)
            magnitude = magnitude_of(score)
            new = tl.where(magnitude == threshold, _TIED, _FREE)
            new = tl.where(magnitude > threshold, _ABOVE, new)
            code = tl.where(code >= _ABOVE, new, code)
            above += (there & (code == _ABOVE)).to(tl.int32)
            equal += (there & (code == _TIED)).to(tl.int32)
            if not random:
                bad += score - score
                total += tl.where(there & (code == _ABOVE), tl.abs(score), 0.0).to(tl.float64)
            tl.store(owner + begin + at, code.to(tl.uint8), mask=there)
    note_wrong(bad, wrong + tile, 1)
    tl.store(counts + 2 * tile, tl.sum(above, 0))
    tl.store(counts + 2 * tile + 1, tl.sum(equal, 0))
    tl.store(mass + tile * lanes + lane, total)


@triton.jit(do_not_specialize=["domain"])
def _settle(
    table, width, owner, domain, lanes: tl.constexpr, longest: tl.constexpr
):  # fmt: skip
    """`claim.settle` of one tile."""
    row = table + tl.program_id(0) * width
    begin, size = tl.load(row + 2), tl.load(row + 3)
    ties, tied, seen = tl.load(row + 4), tl.load(row + 5), tl.zeros((), tl.int32)
    for step in range(0, longest, lanes):
        at = step + tl.arange(0, lanes)
        there = at < size
        code = tl.load(owner + begin + at, mask=there, other=0).to(tl.int32)
        code, seen = _settled(code, ties, tied, seen, domain)
        tl.store(owner + begin + at, code.to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["code"])
def _tally(
    table, width, owner, support, mass, wrong, code, kind: tl.constexpr, lanes: tl.constexpr,
    unroll: tl.constexpr, longest: tl.constexpr,
):  # fmt: skip
    """`claim.tally` of one tile."""
    tile = tl.program_id(0)
    row, lane = table + tile * width, tl.arange(0, lanes)
    begin, size = tl.load(row + 2), tl.load(row + 3)
    total, bad = tl.zeros([lanes], tl.float64), tl.zeros([lanes], tl.float32)
    found, key = tl.zeros([lanes], tl.int32), tl.zeros((), tl.int32)
    for step in range(0, longest, lanes * unroll):
        for part in tl.static_range(unroll):
            at = step + part * lanes + lane
            there = at < size
            mine = tl.load(owner + begin + at, mask=there, other=0).to(tl.int32) == code
            score = _score(row, begin, at, there, key, key, False, kind)
            bad += score - score
            found += (there & mine & (score != 0)).to(tl.int32)
            total += tl.where(there & mine, tl.abs(score), 0.0).to(tl.float64)
    note_wrong(bad, wrong + tile, 1)
    tl.store(support + tile, tl.sum(found, 0))
    tl.store(mass + tile * lanes + lane, total)


@triton.jit(do_not_specialize=["every", "high", "key0", "key1"])
def _count(
    table, width, owner, histogram, every, high, key0, key1, lower: tl.constexpr,
    random: tl.constexpr, kind: tl.constexpr, strip: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`claim.count_high`, or with `lower` `claim.count_low`, of one block of one strip."""
    parts: tl.constexpr = strip // block
    row = table + tl.program_id(1) * width
    begin, size, least = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    number = tl.program_id(0)
    at = (number // parts) * strip * every + (number % parts) * block + tl.arange(0, block)
    there = at < size
    code = tl.load(owner + begin + at, mask=there, other=0).to(tl.int32)
    score = _score(row, begin, at, there, key0, key1, random, kind)
    magnitude = magnitude_of(score)
    wanted = there & (code >= least)
    if lower:
        place = magnitude & 0x7FFF
        wanted = wanted & ((magnitude >> 15) == high)
    else:
        place = ((magnitude >> 15) << 1) + ((magnitude & 0x7FFF) != 0).to(tl.int32)
    tl.atomic_add(histogram + place, 1, mask=wanted, sem="relaxed")


@triton.jit(do_not_specialize=["scale", "below", "base"])
def _admit(
    table, width, owner, out, flag, domains, keys, scale, below, base, form: tl.constexpr,
    count: tl.constexpr, kind: tl.constexpr, result: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`claim.admit` of one block of a tile. Addresses in a row: anchor, reference, domains."""
    row = table + tl.program_id(1) * width
    begin, size = tl.load(row + 2), tl.load(row + 3)
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
            rows[:, 4] = [_least_free(before, tile) for tile in range(first, last)]
            found = torch.zeros(len(histogram), dtype=torch.int32, device=self._device)
            strips = triton.cdiv(int(rows[:, 3].max()), STRIP * every) * (STRIP // BLOCK)
            _count[(strips, len(rows))](
                self._there(rows), rows.shape[1], owner, found, every, high or 0, *_key(table),
                high is not None, bool(table.key[0]), kind, STRIP, BLOCK, **EXACT,
            )  # fmt: skip
            np.add(histogram, found.cpu().numpy(), out=histogram, casting="unsafe")
            del held

        self._halving(first, last, one)

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
            rows, held = self._rows(table, first, last, before)
            tiles, random = len(rows), bool(table.key[0])
            found, bad = self._numbers(tiles, 2), self._numbers(tiles)
            sums = torch.empty((tiles, LANES), dtype=torch.float64, device=self._device)
            _mark[(tiles,)](
                self._there(rows), rows.shape[1], owner, found, sums, bad, before.domain, threshold,
                *_key(table), bool(before.ties.size), random, kind, LANES, UNROLL,
                _longest(rows), num_warps=1, **EXACT,
            )  # fmt: skip
            counts[first:last] = found.cpu().numpy()
            mass[first:last] = tensors.totals(sums)
            wrong.extend(first + np.flatnonzero(bad.cpu().numpy()))
            del held

        self._halving(first, last, one)
        return int(min(wrong, default=-1))

    def settle(self, edges: Array, owner: Tensor, first: int, last: int, marks: Settlement) -> None:
        def one(first: int, last: int) -> None:
            rows = _tiles(edges, first, last, marks)
            _settle[(len(rows),)](
                self._there(rows), rows.shape[1], owner, marks.domain, LANES, _longest(rows),
                num_warps=1,
            )  # fmt: skip

        self._halving(first, last, one)

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
            found, bad = self._numbers(len(rows)), self._numbers(len(rows))
            sums = torch.empty((len(rows), LANES), dtype=torch.float64, device=self._device)
            _tally[(len(rows),)](
                self._there(rows), rows.shape[1], owner, found, sums, bad, code, kind, LANES,
                UNROLL, _longest(rows), num_warps=1, **EXACT,
            )  # fmt: skip
            support[first:last] = found.cpu().numpy()
            mass[first:last] = tensors.totals(sums)
            wrong.extend(first + np.flatnonzero(bad.cpu().numpy()))
            del held

        self._halving(first, last, one)
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
            members = [-1, -2, *update.domains.tolist()]
            held = [self._each(addresses[m], kinds[m], edges, first, last) for m in members]
            places = np.array([[tile.data_ptr() for tile in each] for each in held], np.int64)
            rows = np.concatenate([_tiles(edges, first, last), places[2:].T], 1)
            rows[:, :2] = places[:2].T
            stored = torch.empty(
                int(edges[last]) - int(edges[first]), dtype=_RESULT[kind], device=self._device
            )
            flag = self._numbers(1)
            _admit[(triton.cdiv(_longest(rows), BLOCK), len(rows))](
                self._there(rows), rows.shape[1], owner, stored, flag,
                torch.from_numpy(update.domains.astype(np.int32)).to(self._device),
                torch.from_numpy(update.keys.astype(np.uint32).view(np.int32)).to(self._device),
                float(np.float32(update.scale)), int(update.below), int(edges[first]), update.form,
                len(update.domains), int(kinds[0, first]), kind, BLOCK, **EXACT,
            )  # fmt: skip
            found = int(flag.item())
            fine[0] &= not found & 1
            fine[1] &= not found & 2
            self._give(stored, int(out) + width * (int(edges[first]) - base))

        self._halving(first, last, one)
        return fine[0], fine[1]

    def _rows(
        self, table: TileTable, first: int, last: int, before: Settlement = claim.SETTLED
    ) -> tuple[Array, list[Any]]:
        """The table's rows, and the copies that they point to."""
        rows, held = _tiles(table.edges, first, last, before), []
        if not table.key[0]:
            for place, (addresses, kinds) in enumerate((
                (table.expert, table.expert_kinds), (table.reference, table.reference_kinds)
            )):  # fmt: skip
                held.append(self._each(addresses, kinds, table.edges, first, last))
                rows[:, place] = [tile.data_ptr() for tile in held[-1]]
        return rows, held

    def _there(self, rows: Array) -> Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)


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


def _tiles(edges: Array, first: int, last: int, marks: Settlement = claim.SETTLED) -> Array:
    """A row per tile: two addresses, begin, size, ties that are claimed and all ties."""
    rows = np.zeros((last - first, TILE_ROW), np.int64)
    rows[:, 2], rows[:, 3] = edges[first:last], np.diff(edges[first : last + 1])
    if marks.ties.size:
        rows[:, 4], rows[:, 5] = marks.ties[first:last], marks.counts[first:last, 1]
    return rows


def _least_free(before: Settlement, tile: int) -> int:
    """As `claim._least_free`."""
    if not before.ties.size:
        return int(claim.ABOVE)
    return int(claim.FREE if before.ties[tile] == before.counts[tile, 1] else claim.TIED)


def _longest(rows: Array) -> int:
    """Of the tiles, as a power of two: few programs are compiled."""
    return 1 << max(9, (int(rows[:, 3].max()) - 1).bit_length())
