"""Passes over a chunk on a GPU, a launch or two each: the bits of the compiled loops.

Rows are the members' stored values below one another, one matrix; bfloat16 as 16-bit patterns.
Every step rounds once, in the order of the loops: no product is fused with a sum, and quotients are
rounded as IEEE 754 says. Sums of float64 run in the lanes of the loops: a program adds the entries
of its lanes from the first to the last. What is not finite sets a flag, or shows in a sum; the
caller then leaves the chunk to the loops.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sigmerge.core import LANES, SAMPLE_RUN, Array, select
from sigmerge.core.dtypes import BF16, F16, F32
from sigmerge.core.merge import ALL, ANY_TIES, DISJOINT, DROP, LEAD, NORM, TRIM, Formula
from sigmerge.gpu.memory import STORED, there

BLOCK = 1024
"""Coordinates of one program where entries do not depend on one another."""
UNROLL = 8
"""Steps of a lane whose entries are loaded together."""
ADDED = 32
"""Sums whose lanes one program adds."""
EXACT = {"enable_fp_fusion": False}
THINNING = 6
"""Numbers in a row of `_thinning`."""

_TRIM, _DROP = tl.constexpr(TRIM), tl.constexpr(DROP)
_BF16, _F16 = tl.constexpr(BF16), tl.constexpr(F16)
_LEAD, _THINNING = tl.constexpr(LEAD), tl.constexpr(THINNING)


@triton.jit
def widened(row, at, there):
    """Stored values as float32; zeros where there are none."""
    return wide(tl.load(row + at, mask=there, other=0))


@triton.jit
def wide(stored):
    """Stored numbers as float32; patterns of 16 bits are those of bfloat16."""
    if stored.dtype == tl.int16:
        found = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        found = stored.to(tl.float32)
    return found


@triton.jit
def entry(rows, stride, expert, at, there, members: tl.constexpr, vectors: tl.constexpr):
    """θ_d or Δ_d."""
    value = widened(rows + expert * stride.to(tl.int64), at, there)
    if vectors:
        value = value - widened(rows + (members - 1) * stride.to(tl.int64), at, there)
    return value


@triton.jit
def magnitude_of(value):
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def note_wrong(value, flag, bit):
    """Set a bit of the flag if a value is not finite."""
    wrong = (magnitude_of(value) >= 0x7F800000).to(tl.int32)
    if tl.max(wrong, 0) > 0:
        tl.atomic_or(flag, bit)


@triton.jit
def drawn(first_key, second_key, place):
    """Philox 4x32-10 at flat indices: `philox.fill`."""
    counter, word = place >> 2, place & 3
    w0, w1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    w2, w3 = tl.zeros_like(w0), tl.zeros_like(w0)
    left, right = tl.full(w0.shape, 0xD2511F53, tl.uint64), tl.full(w0.shape, 0xCD9E8D57, tl.uint64)
    k0 = tl.zeros_like(w0) + first_key.to(tl.uint32, bitcast=True)
    k1 = tl.zeros_like(w0) + second_key.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        wide0, wide1 = w0.to(tl.uint64) * left, w2.to(tl.uint64) * right
        w0 = (wide1 >> 32).to(tl.uint32) ^ w1 ^ k0
        w2 = (wide0 >> 32).to(tl.uint32) ^ w3 ^ k1
        w1, w3 = wide1.to(tl.uint32), wide0.to(tl.uint32)
        k0 = k0 + tl.full(w0.shape, 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full(w0.shape, 0xBB67AE85, tl.uint32)
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def save(out, at, there, value, flag, kind: tl.constexpr):
    """Round once to the stored type, as the loops do; bit 1 of the flag if that is not finite."""
    if kind == _BF16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        note_wrong((rounded << 16).to(tl.float32, bitcast=True), flag, 2)
        tl.store(out + at, rounded.to(tl.int16), mask=there)
    elif kind == _F16:
        half = value.to(tl.float16)
        note_wrong(half.to(tl.float32), flag, 2)
        tl.store(out + at, half, mask=there)
    else:
        note_wrong(value, flag, 2)
        tl.store(out + at, value, mask=there)


@triton.jit(do_not_specialize=["size"])
def _count_ties(
    rows, stride, numbers, ties, size, members: tl.constexpr, vectors: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """How many entries of one expert and block lie on its cut."""
    expert = tl.program_id(1)
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    value = entry(rows, stride, expert, at, there, members, vectors)
    tied = there & (magnitude_of(value) == tl.load(numbers + expert * _THINNING) - 1)
    place = expert * tl.num_programs(0) + tl.program_id(0)
    tl.store(ties + place, tl.sum(tied.to(tl.int32), 0))


@triton.jit
def _kept(
    value, row, earlier, at, start, thin: tl.constexpr, counted: tl.constexpr
):  # fmt: skip
    """Entries of one expert, less what it loses before the combination, rescaled.

    `earlier`: how many entries before the block lie on the cut, where ties are `counted` out.
    """
    if thin == _TRIM:
        least, magnitude = tl.load(row), magnitude_of(value)
        kept = magnitude >= least
        if counted:
            tied = magnitude == least - 1
            before = tl.load(earlier)
            kept = kept | (tied & (before + tl.cumsum(tied.to(tl.int32), 0) <= tl.load(row + 1)))
        value = tl.where(kept, value, 0.0)
    elif thin == _DROP:
        mode, last = tl.load(row), tl.load(row + 3).to(tl.uint32, bitcast=True)
        if mode > 0:
            draw = drawn(tl.load(row + 1), tl.load(row + 2), start + at.to(tl.int64))
            value = tl.where((draw <= last) & (mode == 1), value, 0.0)
    # Factors and divisors of 1 change nothing.
    value = value * _number(row + 4)
    return tl.div_rn(value, tl.zeros_like(value) + _number(row + 5))


@triton.jit
def _number(place):
    """A float32 that is stored as its pattern."""
    return tl.load(place).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["cancelled", "start", "size"])
def _merge(
    rows, stride, out, flag, numbers, earlier, cancelled, start, size, members: tl.constexpr,
    experts: tl.constexpr, vectors: tl.constexpr, thin: tl.constexpr, counted: tl.constexpr,
    reads: tl.constexpr, disjoint: tl.constexpr, weighted: tl.constexpr, normalize: tl.constexpr,
    steps: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One block of the merge: entries thinned, `weighted_sum` or `disjoint`, the steps after it.

    Of LEAD only how many more coordinates elect + than −, which `out` gains.
    `numbers` are rows of `_thinning`, then the experts' weights, then the steps.
    """
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    weights, after = numbers + experts * _THINNING, numbers + experts * (_THINNING + 1)
    entries = ()
    for d in tl.static_range(experts):
        value = entry(rows, stride, d, at, there, members, vectors)
        note_wrong(value, flag, 1)
        before = earlier + d * tl.num_programs(0) + tl.program_id(0)
        value = _kept(value, numbers + d * _THINNING, before, at, start, thin, counted)
        entries = entries + (value,)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.zeros([block], tl.float32)
    if disjoint:
        sums, share = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
        for d in tl.static_range(experts):
            sums = sums + (entries[d] * _number(weights + d) if weighted else entries[d])
        if kind == _LEAD:
            plus, minus = (sums > 0).to(tl.int32), (sums < 0).to(tl.int32)
            tl.atomic_add(out, tl.sum(plus - minus, 0), sem="relaxed")
        level = tl.where(sums == 0, cancelled, 0.0)
        sign = tl.where(sums > 0, 1.0, tl.where(sums < 0, -1.0, level))
        for d in tl.static_range(experts):
            weight = _number(weights + d)
            value = entries[d] * weight
            agrees = value * sign > 0
            total = total + tl.where(agrees, value, 0.0)
            share = share + tl.where(agrees, weight, 0.0)
        if normalize:
            total = tl.div_rn(total, tl.where(share != 0, share, 1.0))
    else:
        total = entries[0] * _number(weights)  # type: ignore[misc]
        for d in tl.static_range(1, experts):
            total = total + entries[d] * _number(weights + d)
    for step in tl.static_range(steps):
        divisor, factor = _number(after + 3 * step), _number(after + 3 * step + 1)
        total = tl.div_rn(total, tl.zeros_like(total) + divisor) * factor
        if reads:
            part = _number(after + 3 * step + 2)
            reference = widened(rows + experts * stride.to(tl.int64), at, there)
            note_wrong(reference, flag, 1)
            total = tl.where(part != 0, total + reference * part, total)
    if kind != _LEAD:
        save(out, at, there, total, flag, kind)


@triton.jit(do_not_specialize=["size"])
def _sum_lanes(
    values, out, size, tile: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr
):  # fmt: skip
    """Σ|value| of one tile of float32, by lane."""
    first, lane = tl.program_id(0).to(tl.int64) * tile, tl.arange(0, lanes)
    end = tl.minimum(first + tile, size)
    total = tl.zeros([lanes], tl.float64)
    begin = first
    while begin < end:
        for step in tl.static_range(unroll):
            at = begin + step * lanes + lane
            total += tl.abs(tl.load(values + at, mask=at < end, other=0.0)).to(tl.float64)
        begin += lanes * unroll
    tl.store(out + tl.program_id(0) * lanes + lane, total)


@triton.jit(do_not_specialize=["count"])
def _add_lanes(found, out, count, lanes: tl.constexpr, block: tl.constexpr):
    """Some sums that lie by lane, added from lane 0 up."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float64)
    for lane in range(lanes):
        total += tl.load(found + at * lanes + lane, mask=at < count, other=0.0)
    tl.store(out + at, total, mask=at < count)


@triton.jit(do_not_specialize=["start", "size"])
def _norms(
    rows, stride, numbers, out, start, size, members: tl.constexpr, tile: tl.constexpr,
    lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Σ|Δ_d| of one tile and expert, and that of what its draws keep."""
    expert, first = tl.program_id(1), tl.program_id(0).to(tl.int64) * tile
    end, lane = tl.minimum(first + tile, size), tl.arange(0, lanes)
    row = numbers + expert * _THINNING
    mode, last = tl.load(row), tl.load(row + 3).to(tl.uint32, bitcast=True)
    first_key, second_key = tl.load(row + 1), tl.load(row + 2)
    before, after = tl.zeros([lanes], tl.float64), tl.zeros([lanes], tl.float64)
    begin = first
    while begin < end:
        for step in tl.static_range(unroll):
            at = begin + step * lanes + lane
            value = tl.abs(entry(rows, stride, expert, at, at < end, members, True))
            draw = drawn(first_key, second_key, start + at)
            kept = (mode == 0) | ((draw <= last) & (mode == 1))
            before += value.to(tl.float64)
            after += tl.where(kept, value, 0.0).to(tl.float64)
        begin += lanes * unroll
    place = expert * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + place * lanes + lane, before)
    tl.store(out + (tl.num_programs(1) * tl.num_programs(0) + place) * lanes + lane, after)


@triton.jit
def _pair(number, count: tl.constexpr):
    """The rows a ≤ b of a pair, counted from (0, 0), (0, 1) on."""
    a, b = number * 0, number
    for row in tl.static_range(1, count):
        further = b >= count
        a, b = tl.where(further, row, a), tl.where(further, b - count + row, b)
    return a, b


@triton.jit(do_not_specialize=["size"])
def _products(
    rows, stride, out, size, members: tl.constexpr, count: tl.constexpr, vectors: tl.constexpr,
    tile: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Σ of products of two of the first `count` rows over one tile; those of float32 are exact."""
    number, first = tl.program_id(1), tl.program_id(0).to(tl.int64) * tile
    end, wide, lane = tl.minimum(first + tile, size), stride.to(tl.int64), tl.arange(0, lanes)
    one, other = _pair(number, count)
    left, right = rows + one * wide, rows + other * wide
    total = tl.zeros([lanes], tl.float64)
    begin = first
    while begin < end:
        for step in tl.static_range(unroll):
            at = begin + step * lanes + lane
            a, b = widened(left, at, at < end), widened(right, at, at < end)
            if vectors:
                reference = widened(rows + (members - 1) * wide, at, at < end)
                a, b = a - reference, b - reference
            total += a.to(tl.float64) * b.to(tl.float64)
        begin += lanes * unroll
    place = number * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + place * lanes + lane, total)


@triton.jit(do_not_specialize=["size"])
def _masses(
    rows, stride, out, size, members: tl.constexpr, tile: tl.constexpr, lanes: tl.constexpr,
    unroll: tl.constexpr,
):  # fmt: skip
    """Σ m_j c_j and Σ m_j of one tile; see `signature`."""
    first = tl.program_id(0).to(tl.int64) * tile
    end, wide, lane = tl.minimum(first + tile, size), stride.to(tl.int64), tl.arange(0, lanes)
    contested, total = tl.zeros([lanes], tl.float64), tl.zeros([lanes], tl.float64)
    begin = first
    while begin < end:
        for step in tl.static_range(unroll):
            at = begin + step * lanes + lane
            reference = widened(rows + (members - 1) * wide, at, at < end)
            high, low = tl.zeros([lanes], tl.float32), tl.zeros([lanes], tl.float32)
            for d in tl.static_range(members - 1):
                value = widened(rows + d * wide, at, at < end) - reference
                high, low = tl.maximum(high, value), tl.minimum(low, value)
            largest = tl.maximum(high, -low).to(tl.float64)
            total += largest
            contested += tl.where((high > 0) & (low < 0), largest, 0.0)
        begin += lanes * unroll
    tl.store(out + tl.program_id(0) * lanes + lane, contested)
    tl.store(out + (tl.num_programs(0) + tl.program_id(0)) * lanes + lane, total)


@triton.jit
def sampled(size, every, strip: tl.constexpr, block: tl.constexpr):
    """The coordinates of a program's block in one strip of `every`, and which are there."""
    parts: tl.constexpr = strip // block
    number = tl.program_id(0)
    at = (number // parts) * strip * every + (number % parts) * block + tl.arange(0, block)
    return at, at < size


@triton.jit(do_not_specialize=["size", "every"], do_not_specialize_on_alignment=["flag"])
def _count_high(
    rows, stride, wanted, counts, flag, size, every, members: tl.constexpr, places: tl.constexpr,
    strip: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Count where one block of one expert's differences belongs."""
    row = tl.program_id(1)
    at, there = sampled(size, every, strip, block)
    value = entry(rows, stride, tl.load(wanted + row), at, there, members, True)
    note_wrong(value, flag, 1)
    tl.atomic_add(counts + row * places + high_place(value), 1, mask=there, sem="relaxed")


@triton.jit
def high_place(value):
    """As `select.high_place`."""
    magnitude = magnitude_of(value)
    return ((magnitude >> 15) << 1) + ((magnitude & 0x7FFF) != 0).to(tl.int32)


@triton.jit(
    do_not_specialize=["size", "every", "places"],
    do_not_specialize_on_alignment=["left_out", "above", "flag"],
)
def _count_inside(
    rows, stride, wanted, counts, left_out, above, flag, size, every, members: tl.constexpr,
    places, strip: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Count one block of one expert's differences inside its range and above it."""
    row = tl.program_id(1)
    mine = wanted + 4 * row
    at, there = sampled(size, every, strip, block)
    value = entry(rows, stride, tl.load(mine), at, there, members, True)
    note_wrong(value, flag, 1)
    lowest, width, shift = tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
    offset = magnitude_of(value).to(tl.int64) - lowest
    inside = there & (offset >= 0) & (offset < width)
    more = tl.sum((there & (offset >= width)).to(tl.int32), 0)
    if more > 0:
        tl.atomic_add(above + row, more, sem="relaxed")
    if width == 1:
        hits = tl.sum(inside.to(tl.int32), 0)
        if hits > 0:
            tl.atomic_add(counts + row.to(tl.int64) * places, hits, sem="relaxed")
    else:
        place = row.to(tl.int64) * places + (offset >> shift)
        tl.atomic_add(counts + place, 1, mask=inside, sem="relaxed")
        mask = (tl.full([1], 1, tl.int64) << shift) - 1
        last = offset & mask
        bits = (last | ((last ^ mask) << 8)).to(tl.int32)
        tl.atomic_or(left_out + place, bits, mask=inside & (shift > 0), sem="relaxed")


def tied(formula: Formula, rows: Tensor, numbers: Tensor | None = None) -> Tensor:
    """By expert and block, how many entries lie on the cut, whose ties are counted out."""
    grid = (triton.cdiv(rows.shape[1], BLOCK), len(formula.weights))
    found = torch.empty(grid[::-1], dtype=torch.int32, device=rows.device)
    numbers = there(_thinning(formula), rows) if numbers is None else numbers
    launch(
        _count_ties, grid, rows, rows.stride(0), numbers, found, rows.shape[1], len(rows),
        formula.vectors, BLOCK, **EXACT,
    )  # fmt: skip
    return found


def launch(program: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
    """Run a program on all of a grid; threads that need it first at the same time compile it once.

    Triton itself has every thread compile its own.
    """
    key = (program.__name__, given[0].dtype, *(given[at] for at in _constants(program)))
    if key in _compiled:
        program[grid](*given, **options)
        return
    with _compiling:
        program[grid](*given, **options)
        _compiled.add(key)


_compiling = threading.Lock()
_compiled: set[tuple[Any, ...]] = set()


@cache
def _constants(program: Any) -> list[int]:
    """Which arguments are constants of a program; an interpreted one compiles nothing."""
    return [p.num for p in getattr(program, "params", ()) if p.is_constexpr]


def counted_out(formula: Formula) -> Array:
    """By expert, whether it keeps some of the entries on its cut, from the lowest index on."""
    cuts, ties = formula.cuts[:, 0], formula.cuts[:, 1]
    found: Array = (cuts != ALL) & (ties > 0) & (ties < ANY_TIES)
    return found if formula.thin == TRIM else np.zeros_like(found)


def _thinning(formula: Formula) -> Array:
    """What `_kept` reads, a row per expert: how it thins, then the patterns of its rescaling.

    TRIM: the least magnitude that stays, and how many of those just below do. DROP: mode (0 keeps
    all, 1 by draw, 2 nothing), the two key words, the last draw that keeps.
    """
    table = np.zeros((len(formula.weights), THINNING), np.int64)
    if formula.thin == TRIM:
        cuts, ties = formula.cuts[:, 0], formula.cuts[:, 1]
        least = np.where(ties < ANY_TIES, np.minimum(cuts, 0x7FFFFFFE) + 1, cuts)
        table[:, 0] = np.where(cuts == ALL, 0, least)
        table[:, 1] = np.where((cuts == ALL) | (ties >= ANY_TIES), 0, ties)
    elif formula.thin == DROP:
        keep = formula.draws[:, 2]
        table[:, 0] = np.where(keep == ALL, 0, np.where(keep <= 0, 2, 1))
        table[:, 1:3], table[:, 3] = formula.draws[:, :2], np.maximum(keep - 1, 0)
    table[:, 4:6] = formula.rescale.astype(np.float32).view(np.int32)
    return table.astype(np.uint32).view(np.int32)


def merged(formula: Formula, rows: Tensor, start: int, kind: int, flag: Tensor) -> Tensor:
    """The merge in its stored type, in float32 where its norm is wanted; or LEAD's count."""
    experts, size = len(formula.weights), rows.shape[1]
    kind = F32 if kind == NORM else kind
    if kind == LEAD:
        out = torch.zeros(1, dtype=torch.int32, device=rows.device)
    else:
        out = torch.empty(size, dtype=STORED[kind], device=rows.device)
    others = (np.asarray(some, np.float32).ravel() for some in (formula.weights, formula.after))
    patterns = [_thinning(formula).ravel(), *(some.view(np.int32) for some in others)]
    numbers, counted = there(np.concatenate(patterns), rows), bool(counted_out(formula).any())
    earlier = numbers
    if counted:
        ties = tied(formula, rows, numbers)
        earlier = ties.cumsum(1, dtype=torch.int32) - ties
    launch(
        _merge, (triton.cdiv(size, BLOCK),), rows, rows.stride(0), out, flag, numbers, earlier,
        float(formula.cancelled), start, size, len(rows), experts, formula.vectors, formula.thin,
        counted, bool(formula.after[:, 2].any()), formula.combine == DISJOINT or kind == LEAD,
        formula.weighted, formula.normalize, len(formula.after), kind, BLOCK, **EXACT,
    )  # fmt: skip
    return out


def norm(values: Tensor, tile: int) -> Tensor:
    """Σ|value| of float32 values by tile."""
    size = len(values)
    found = _by_lane((triton.cdiv(size, tile),), values)
    launch(_sum_lanes, found.shape[:1], values, found, size, tile, LANES, UNROLL, num_warps=1)
    return added(found)


def norms_of_drops(formula: Formula, rows: Tensor, start: int, tile: int) -> Tensor:
    """Norms before (row 0) and after draws, by expert and tile: (2, experts, tiles)."""
    experts, size = len(formula.weights), rows.shape[1]
    tiles = triton.cdiv(size, tile)
    found = _by_lane((2, experts, tiles), rows)
    launch(
        _norms, (tiles, experts), rows, rows.stride(0), there(_thinning(formula), rows), found,
        start, size, len(rows), tile, LANES, UNROLL, num_warps=1,
    )  # fmt: skip
    return added(found)


def products(rows: Tensor, count: int, vectors: bool, tile: int) -> Tensor:
    """Inner products of all pairs a ≤ b of the first rows by tile: (pairs, tiles)."""
    pairs = count * (count + 1) // 2
    found = _by_lane((pairs, triton.cdiv(rows.shape[1], tile)), rows)
    _multiply(rows, count, vectors, tile, found)
    return added(found)


def signature(rows: Tensor, tile: int) -> Tensor:
    """Inner products of all pairs of task vectors, then Σ m_j c_j and Σ m_j: (pairs + 2, tiles)."""
    count, size = len(rows) - 1, rows.shape[1]
    pairs = count * (count + 1) // 2
    found = _by_lane((pairs + 2, triton.cdiv(size, tile)), rows)
    _multiply(rows, count, True, tile, found[:pairs])
    launch(
        _masses, found.shape[1:2], rows, rows.stride(0), found[pairs:], size, len(rows), tile,
        LANES, UNROLL, num_warps=1,
    )  # fmt: skip
    return added(found)


def _multiply(rows: Tensor, count: int, vectors: bool, tile: int, found: Tensor) -> None:
    launch(
        _products, (found.shape[1], found.shape[0]), rows, rows.stride(0), found, rows.shape[1],
        len(rows), count, vectors, tile, LANES, UNROLL, num_warps=1, **EXACT,
    )  # fmt: skip


def _by_lane(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Room for sums by lane."""
    return torch.empty((*shape, LANES), dtype=torch.float64, device=like.device)


def added(found: Tensor) -> Tensor:
    """Sums by lane, the last axis, added in the lanes' order."""
    out = torch.empty(found.shape[:-1], dtype=torch.float64, device=found.device)
    grid = (triton.cdiv(out.numel(), ADDED),)
    launch(_add_lanes, grid, found, out, out.numel(), LANES, ADDED, num_warps=1)
    return out


def count_high(rows: Tensor, experts: Array, every: int) -> Tensor:
    """As `select.count_high`: int32 counts by expert, and last what is not zero if not finite."""
    size = len(experts) * select.HIGH_PLACES
    found = torch.zeros(size + 1, dtype=torch.int32, device=rows.device)
    launch(
        _count_high, _strips(rows, every, len(experts)), rows, rows.stride(0),
        there(experts, rows), found, found[size:], rows.shape[1], every, len(rows),
        select.HIGH_PLACES, SAMPLE_RUN, BLOCK, **EXACT,
    )  # fmt: skip
    return found


def count_inside(rows: Tensor, experts: Array, every: int, ranges: Array, places: int) -> Tensor:
    """As `select.count_inside`, one int32 row after another.

    Counts by expert and place; then the bits left out, if any are; then by expert the counts above,
    and last what is not zero if not finite.
    """
    size, count = len(experts) * places, len(experts)
    both = size * (2 if ranges[:, 2].any() else 1)
    found = torch.zeros(both + count + 1, dtype=torch.int32, device=rows.device)
    wanted = np.column_stack([experts, ranges]).astype(np.int64)
    launch(
        _count_inside, _strips(rows, every, count), rows, rows.stride(0), there(wanted, rows),
        found, found[both - size :], found[both:], found[both + count :],
        rows.shape[1], every, len(rows), places, SAMPLE_RUN, BLOCK, **EXACT,
    )  # fmt: skip
    return found


def _strips(rows: Tensor, every: int, experts: int) -> tuple[int, int]:
    return triton.cdiv(rows.shape[1], SAMPLE_RUN * every) * (SAMPLE_RUN // BLOCK), experts
