"""The passes over a chunk as torch programs, for a GPU: the same bits as the compiled loops.

Every step is an operation of its own that rounds once, in the order of the loops; no multiplication
is fused with an addition, and nothing is divided by a plain number, which a GPU would replace by a
product with its reciprocal. Counts are integers. Sums of float64 run in the same lanes. Values that
are not finite are left to the loops: then a pass returns None or False and has changed nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sigmerge.kernels import LANES, SAMPLE_RUN, Array, geometry, select
from sigmerge.kernels import merge as loops
from sigmerge.kernels.dtypes import BF16, F16, F32
from sigmerge.kernels.merge import (
    ALL,
    ANY_TIES,
    BAND,
    DISJOINT,
    DROP,
    KEEP_ALL,
    LEAD,
    MARKED,
    NORM,
    PRUNE,
    RANK,
    SELECT,
    SUM,
    TRIM,
    Formula,
)
from sigmerge.kernels.partial_sums import PartMarks, PartSums
from sigmerge.kernels.signature import signature

Tensors: TypeAlias = Sequence[Tensor] | Tensor
"""The members' values of a chunk as they are stored, in the order of a kernel's table: the rows of
a matrix, or where types differ a list."""

LEFT_TO_LOOPS = {BAND, MARKED, RANK, SELECT}
"""Ways of thinning that have no program here."""
STORED = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32}
LOW_WORD = 0xFFFFFFFF
ROW_GRAIN = 64
"""Coordinates of which a row of a matrix takes whole multiples."""


def merge(
    formula: Formula, rows: Tensors, start: int, tile: int, kind: int, flag: Tensor
) -> Tensor | None:
    """What `kernels.merge` leaves: stored values, or the lanes of NORM by tile, or LEAD's count.

    Where something is not finite, before or after, it is None or the flag is not zero.
    """
    if kind != LEAD and (block := fused(rows)) is not None and _simple(formula):
        return _fused_merge(formula, block, start, tile, kind, flag)
    if not _finite(rows):
        return None
    experts = len(formula.weights)
    base = rows[experts].float() if len(rows) > experts else None
    taken = torch.zeros(len(rows[0]), dtype=torch.bool, device=rows[0].device)
    thinned = []
    for d in range(experts):
        row = rows[d].float()
        if formula.vectors:
            row = row - base
        row = _thin(formula, d, row, start, taken)
        thinned.append(_rescaled(row, *formula.rescale[d].tolist()))
    if kind == LEAD:
        sums = _election(formula, thinned)
        return (sums > 0).sum() - (sums < 0).sum()
    out = _combine(formula, thinned)
    for divisor, factor, share in formula.after.tolist():
        if divisor != 1 or factor != 1:
            out = out / _number(divisor, out) * factor
        if share != 0:
            out = out + base * share
    if kind == NORM:
        return lanes(out.abs().double(), tile)
    stored = out.to(STORED[kind])
    return stored if _finite([stored]) else None


def _simple(formula: Formula) -> bool:
    """Whether a few launches do it."""
    return formula.combine in (SUM, DISJOINT) and formula.thin in (KEEP_ALL, TRIM, DROP)


def _fused_merge(
    formula: Formula, block: Tensor, start: int, tile: int, kind: int, flag: Tensor
) -> Tensor:
    out: Tensor = passes().merged(formula, block, start, kind, flag)
    return passes().lane_sums(out[None], tile)[0] if kind == NORM else out


def fused(rows: Tensors) -> Tensor | None:
    """The rows as one matrix for programs of a launch or two; None where there are none."""
    if not isinstance(rows, Tensor) or not in_triton(rows.device):
        return None
    return rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows


def in_triton(device: torch.device) -> bool:
    """Whether a device runs programs in Triton."""
    return device.type in FUSED and passes() is not None


@cache
def passes() -> Any:
    """Programs in Triton, where it is installed."""
    try:
        from sigmerge.kernels import triton_passes
    except ImportError:
        return None
    return triton_passes


FUSED = {"cuda"}
"""Kinds of device that run them."""


def no_flag(device: torch.device) -> Tensor:
    """What a program sets where something is not finite."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def matrix(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for rows of at least this size, which begin where a GPU reads many numbers at once."""
    wide = -(-size // ROW_GRAIN) * ROW_GRAIN
    return torch.empty((count, wide), dtype=dtype, device=device)


def part(rows: Tensors, begin: int, length: int) -> Tensors:
    """A run of every row."""
    if isinstance(rows, Tensor):
        return rows[:, begin : begin + length]
    return [row[begin : begin + length] for row in rows]


class _Pinned(threading.local):
    """Memory of a thread that a GPU writes to directly."""

    room = torch.empty(0, dtype=torch.uint8)


_pinned = _Pinned()


def fetched(found: Tensor) -> Array:
    """Numbers of a device in memory; the calling thread's next ones overwrite them."""
    if found.device.type == "cpu":
        return found.numpy()
    if _pinned.room.nbytes < found.nbytes:
        _pinned.room = torch.empty(found.nbytes, dtype=torch.uint8, pin_memory=True)
    place = _pinned.room[: found.nbytes].view(found.dtype).view(found.shape)
    place.copy_(found, non_blocking=True)
    torch.cuda.current_stream(found.device).synchronize()
    return place.numpy()


def cuts_left(formula: Formula, rows: Tensors) -> Array:
    """The cuts for the part of a chunk that comes next: the ties kept so far are used up."""
    cuts = formula.cuts.copy()
    for d, (cut, ties) in enumerate(formula.cuts.tolist()):
        if cut != ALL and 0 < ties < ANY_TIES:
            row = rows[d].float() - rows[-1].float() if formula.vectors else rows[d].float()
            cuts[d, 1] = max(0, ties - int((_magnitude(row) == cut).sum()))
    return cuts


def _thin(formula: Formula, expert: int, row: Tensor, place: int, taken: Tensor) -> Tensor:
    if formula.thin == TRIM and formula.cuts[expert, 0] != ALL:
        return _trim(row, *map(int, formula.cuts[expert]))
    if formula.thin == DROP and formula.draws[expert, 2] != ALL:
        first, second, keep = map(int, formula.draws[expert])
        return torch.where(draws((first, second), place, len(row), row.device) < keep, row, 0)
    if formula.thin == PRUNE:
        return _prune(row, taken, *map(int, formula.groups))
    return row


def _rescaled(row: Tensor, factor: float, divisor: float) -> Tensor:
    row = row * factor if factor != 1 else row
    return row / _number(divisor, row) if divisor != 1 else row


def _trim(row: Tensor, cut: int, ties: int) -> Tensor:
    """Of the entries on the cut the first `ties` stay."""
    magnitude = _magnitude(row)
    kept = magnitude > cut
    if ties >= ANY_TIES:
        kept = magnitude >= cut
    elif ties:
        tied = magnitude == cut
        kept |= tied & (tied.cumsum(0) <= ties)
    return torch.where(kept, row, 0)


def _prune(row: Tensor, taken: Tensor, n: int, m: int, overlap: int) -> Tensor:
    """A group of m keeps its n largest free entries, the lowest index first; as `prune_groups`."""
    whole = len(row) // m * m
    grouped, held = row[:whole].view(-1, m), taken[:whole].view(-1, m)
    magnitude = _magnitude(grouped).long()
    scores = torch.where(held, -1, magnitude)
    free = (~held).sum(1, keepdim=True)
    wanted = torch.full_like(free, min(n, m)) if overlap else free.clamp(max=n)
    if overlap:
        scores = torch.where(free < n, torch.where(held, magnitude, 1 << 31), scores)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(m, device=row.device).expand_as(order))
    kept = rank < wanted
    held |= kept
    out = torch.zeros_like(row)
    out[:whole] = torch.where(kept, grouped, 0).flatten()
    return out


def _combine(formula: Formula, rows: Tensors) -> Tensor:
    weights = formula.weights.tolist()
    if formula.combine == SUM:
        out = rows[0] * weights[0]
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            out = out + row * weight
        return out
    if formula.combine == DISJOINT:
        return _disjoint(formula, rows, weights)
    total = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights, strict=True):
        total = total + row * weight
    agreeing, count = torch.zeros_like(total), torch.zeros_like(total)
    for row, weight in zip(rows, weights, strict=True):
        entry = row * weight
        agrees = ((entry > 0) & (total >= 0)) | ((entry < 0) & (total < 0))
        agreeing = torch.where(agrees, agreeing + entry, agreeing)
        count = count + agrees
    return torch.where(count > 0, agreeing / count.clamp(min=1), 0)


def _disjoint(formula: Formula, rows: Tensors, weights: Sequence[float]) -> Tensor:
    sums = _election(formula, rows)
    level = (sums == 0) * float(np.float32(formula.cancelled))
    sign = torch.where(sums > 0, 1.0, torch.where(sums < 0, -1.0, level))
    total, share = torch.zeros_like(sums), torch.zeros_like(sums)
    for row, weight in zip(rows, weights, strict=True):
        entry = row * weight
        agrees = entry * sign > 0
        total = total + torch.where(agrees, entry, 0)
        share = share + agrees * weight
    return total / torch.where(share != 0, share, 1) if formula.normalize else total


def _election(formula: Formula, rows: Tensors) -> Tensor:
    sums = torch.zeros_like(rows[0])
    for row, weight in zip(rows, formula.weights.tolist(), strict=True):
        sums = sums + (row * weight if formula.weighted else row)
    return sums


def count_high(rows: Tensors, start: int, experts: Array, every: int, counts: Array) -> bool:
    """As `select.count_high`."""
    if (block := fused(rows)) is not None:
        numbers = fetched(passes().count_high(block, experts, every))
        if numbers[-1]:
            return False
        counts += numbers[:-1].reshape(counts.shape).view(counts.dtype)
        return True
    rows = _sampled(rows, every)
    if not _finite(rows):
        return False
    found = [
        torch.bincount(high_place(magnitude), minlength=select.HIGH_PLACES)
        for magnitude in _magnitudes(rows, experts)
    ]
    counts += torch.stack(found).cpu().numpy().astype(counts.dtype)
    return True


def selected(rows: Tensors, experts: Array, ranks: Array) -> Array | None:
    """By expert its magnitude at a rank, how many of it lie within the rank, how many there are.

    None if something is not finite.
    """
    if (block := fused(rows)) is not None:
        from sigmerge.kernels import triton_select

        found = fetched(triton_select.selected(block, experts, ranks))
        return None if found[-1].any() else found[:-1, 1:].astype(np.int64)
    if not _finite(rows):
        return None
    numbers = []
    for magnitude, rank in zip(_magnitudes(rows, experts), ranks.tolist(), strict=True):
        pattern = magnitude.kthvalue(len(magnitude) - rank + 1).values
        above = (magnitude > pattern).sum()
        numbers.append(torch.stack([pattern, rank - above, (magnitude == pattern).sum()]))
    return torch.stack(numbers).cpu().numpy()


def high_place(magnitude: Any) -> Any:
    """As `select.high_place`."""
    others = magnitude & (select.LOW_BINS - 1) != 0
    return 2 * (magnitude >> select.LOW_BITS) + others


def count_inside(
    rows: Tensors,
    start: int,
    experts: Array,
    every: int,
    ranges: Array,
    counts: Array,
    left_out: Array,
    above: Array,
) -> bool:
    """As `select.count_inside`."""
    if (block := fused(rows)) is not None:
        places = counts.shape[1]
        numbers = fetched(passes().count_inside(block, experts, every, ranges, places))
        if numbers[-1]:
            return False
        counts += numbers[: counts.size].reshape(counts.shape).view(counts.dtype)
        if ranges[:, 2].any():
            bits = numbers[counts.size : 2 * counts.size]
            left_out |= bits.reshape(counts.shape).astype(left_out.dtype)
        above += numbers[-1 - len(above) : -1]
        return True
    rows = _sampled(rows, every)
    if not _finite(rows):
        return False
    for row, magnitude in enumerate(_magnitudes(rows, experts)):
        lowest, width, shift = map(int, ranges[row])
        inside = (magnitude >= lowest) & (magnitude < lowest + width)
        above[row] += int((magnitude >= lowest + width).sum())
        if width == 1:
            counts[row, 0] += int(inside.sum())
            continue
        offsets = magnitude[inside] - lowest
        places = counts.shape[1]
        found = torch.bincount(offsets >> shift, minlength=places)
        counts[row] += found.cpu().numpy().astype(counts.dtype)
        for bit in range(shift):
            ones = torch.bincount(offsets[offsets >> bit & 1 == 1] >> shift, minlength=places)
            set_, clear = (ones > 0).cpu().numpy(), (ones < found).cpu().numpy()
            left_out[row] |= (set_ << bit | clear << (bit + 8)).astype(left_out.dtype)
    return True


def _norms_of_thinning(
    rows: Tensors,
    start: int,
    formula: Formula,
    tile: int,
    strip: int,
    norms: PartSums,
    marks: PartMarks,
) -> bool:
    """Of draws alone: what a cut keeps depends on the parts of a chunk before. Nothing is marked:
    to draw again costs less than to fetch the marks."""
    if formula.thin != DROP:
        return False
    if (block := fused(rows)) is not None:
        found = fetched(passes().norms_of_drops(formula, block, start, tile))
        if not np.isfinite(found[0]).all():
            return False
    elif not _finite(rows):
        return False
    else:
        base, values = rows[-1].float(), []
        for d in range(len(formula.weights)):
            row = rows[d].float() - base
            values += [row, _thin(formula, d, row, start, row)]
        each = totals(lanes(torch.stack(values).abs().double(), tile))
        found = np.stack([each[0::2], each[1::2]])
    norms.add(np.moveaxis(found, -1, 0), tile)
    return True


def _signature(rows: Tensors, start: int, tile: int, dots: PartSums, mass: PartSums) -> bool:
    if (block := fused(rows)) is not None:
        found = fetched(passes().signature(block, tile))
        if not _add_products(found[:-2], tile, dots):
            return False
        mass.add(found[-2:].T, tile)
        return True
    if not _finite(rows):
        return False
    deltas = torch.stack([row.float() for row in rows[:-1]]) - rows[-1].float()
    _add_products(_products(deltas.double(), tile), tile, dots)
    high, low = deltas.amax(0).clamp(min=0), deltas.amin(0).clamp(max=0)
    largest = torch.maximum(high, -low).double()
    contested = torch.where((high > 0) & (low < 0), largest, 0)
    mass.add(totals(lanes(torch.stack([contested, largest]), tile)).T, tile)
    return True


def _gram(rows: Tensors, start: int, vectors: bool, tile: int, dots: PartSums) -> bool:
    count = dots.sums.shape[-1]
    if (block := fused(rows)) is not None:
        return _add_products(fetched(passes().products(block, count, vectors, tile)), tile, dots)
    if not _finite(rows):
        return False
    values = torch.stack([row.float() for row in rows[:count]])
    deltas = values - rows[-1].float() if vectors else values
    return _add_products(_products(deltas.double(), tile), tile, dots)


def _products(values: Tensor, tile: int) -> Array:
    """Inner products of all pairs a ≤ b of rows by tile, whose float32 factors make them exact."""
    left, right = np.triu_indices(len(values))
    pairs = zip(left.tolist(), right.tolist(), strict=True)
    return np.stack([totals(lanes(values[a] * values[b], tile)) for a, b in pairs])


def _add_products(found: Array, tile: int, dots: PartSums) -> bool:
    """Add what `_products` gives; False if it is not finite, which shows in the squares."""
    left, right = np.triu_indices(dots.sums.shape[-1])
    if not np.isfinite(found[left == right]).all():
        return False
    tiles = np.empty((found.shape[1], *dots.sums.shape[1:]))
    tiles[:, left, right] = tiles[:, right, left] = found.T
    dots.add(tiles, tile)
    return True


def lanes(values: Tensor, tile: int) -> Tensor:
    """Sums of float64 (…, size) in lanes: (…, tiles, LANES), entries of a lane in their order."""
    size = values.shape[-1]
    tiles = -(-size // tile)
    long = -(-min(tile, size) // LANES) * LANES
    if tiles == 1 or long == tile:
        padded = torch.nn.functional.pad(values, (0, tiles * long - size))
    else:
        padded = torch.nn.functional.pad(values, (0, tiles * tile - size))
        padded = padded.view(*values.shape[:-1], tiles, tile)
        padded = torch.nn.functional.pad(padded, (0, long - tile))
    steps = padded.reshape(*values.shape[:-1], tiles, long // LANES, LANES)
    total = torch.zeros_like(steps[..., 0, :])
    for step in steps.unbind(-2):
        total = total + step
    return total


def totals(found: Tensor) -> Array:
    """The lanes added from 0 up."""
    by_lane = fetched(found)
    total: Array = np.zeros(by_lane.shape[:-1])
    for lane in range(LANES):
        total = total + by_lane[..., lane]
    return total


def add_number(found: Tensor, kind: int, total: Array) -> None:
    """Add what `merge` gave: for NORM tile by tile, for LEAD at once."""
    for part in totals(found).tolist() if kind == NORM else [int(found)]:
        total[0] += part


def draws(key: tuple[int, int], start: int, size: int, device: torch.device) -> Tensor:
    """`philox.fill` as int64 values from 0 to 2**32 − 1."""
    first = start // 4
    counter = torch.arange(first, -(-(start + size) // 4), device=device)
    nothing = torch.zeros_like(counter)
    words = [counter & LOW_WORD, counter >> 32, nothing, nothing]
    k0, k1 = key
    for _ in range(10):
        # Products are taken modulo 2**64, and a shift is masked: the sign does not matter.
        product0, product1 = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (product1 >> 32 & LOW_WORD) ^ words[1] ^ k0,
            product1 & LOW_WORD,
            (product0 >> 32 & LOW_WORD) ^ words[3] ^ k1,
            product0 & LOW_WORD,
        ]
        k0, k1 = k0 + 0x9E3779B9 & LOW_WORD, k1 + 0xBB67AE85 & LOW_WORD
    drawn = torch.stack(words, 1).flatten()
    return drawn[start - 4 * first :][:size]


def _sampled(rows: Tensors, every: int) -> Tensors:
    """One strip in `every`."""
    if every == 1:
        return rows
    period = SAMPLE_RUN * every
    whole = len(rows[0]) // period * period
    return [
        torch.cat(
            [row[:whole].view(-1, period)[:, :SAMPLE_RUN].flatten(), row[whole:][:SAMPLE_RUN]]
        )
        for row in rows
    ]


def _magnitude(values: Tensor) -> Tensor:
    return values.view(torch.int32) & int(select.MAGNITUDE)


def _magnitudes(rows: Tensors, experts: Array) -> list[Tensor]:
    base = rows[-1].float()
    return [_magnitude(rows[d].float() - base) for d in experts.tolist()]


def _finite(rows: Tensors) -> bool:
    return bool(torch.stack([torch.isfinite(row).all() for row in rows]).all())


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


COUNTERPARTS: dict[Any, Callable[..., bool]] = {
    select.count_high: count_high,
    select.count_inside: count_inside,
    loops.norms_of_thinning: _norms_of_thinning,
    signature: _signature,
    geometry.gram: _gram,
}
"""Kernel that reads a chunk -> the same as a torch program: (rows, start, *arguments) -> done."""
