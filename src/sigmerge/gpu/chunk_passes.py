"""The passes over a chunk on a GPU, called as the loops are: the same bits.

`rows` are the members' stored values on the device, one matrix. A pass that meets a value that is
not finite raises a flag, or returns None or False and has changed nothing; the caller leaves the
chunk to the loops then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from sigmerge.core import Array, products, select
from sigmerge.core import merge as loops
from sigmerge.core.merge import DISJOINT, DROP, KEEP_ALL, NORM, SUM, TRIM, Formula
from sigmerge.core.partial_sums import PartMarks, PartSums
from sigmerge.core.products import signature
from sigmerge.gpu import triton_passes, triton_select
from sigmerge.gpu.memory import fetched


def has_program(formula: Formula) -> bool:
    """Whether a program merges so; all others are the processor's."""
    return formula.thin in (KEEP_ALL, TRIM, DROP) and formula.combine in (SUM, DISJOINT)


def merge(formula: Formula, rows: Tensor, start: int, tile: int, kind: int, flag: Tensor) -> Tensor:
    """What `loops.merge` leaves: stored values, or NORM's sums by tile, or LEAD's count."""
    out = triton_passes.merged(formula, rows, start, kind, flag)
    return triton_passes.norm(out, tile) if kind == NORM else out


def add_number(found: Tensor, total: Array) -> None:
    """Add NORM's sums tile by tile, or LEAD's count."""
    for part in found.tolist():
        total[0] += part


def cuts_left(formula: Formula, rows: Tensor) -> Array:
    """The cuts for the part of a chunk that comes next: the ties kept so far are used up."""
    cuts, counted = formula.cuts.copy(), triton_passes.counted_out(formula)
    if counted.any():
        used = fetched(triton_passes.tied(formula, rows).sum(1))
        cuts[counted, 1] = np.maximum(cuts[:, 1] - used, 0)[counted]
    return cuts


def selected(rows: Tensor, experts: Array, ranks: Array) -> Array | None:
    """By expert its magnitude at a rank, how many of it lie within the rank, how many there are."""
    found = fetched(triton_select.selected(rows, experts, ranks))
    return None if found[-1].any() else found[:-1, 1:].astype(np.int64)


def count_high(rows: Tensor, start: int, experts: Array, every: int, counts: Array) -> bool:
    """As `select.count_high`."""
    numbers = fetched(triton_passes.count_high(rows, experts, every))
    if numbers[-1]:
        return False
    counts += numbers[:-1].reshape(counts.shape).view(counts.dtype)
    return True


def count_inside(
    rows: Tensor,
    start: int,
    experts: Array,
    every: int,
    ranges: Array,
    counts: Array,
    left_out: Array,
    above: Array,
) -> bool:
    """As `select.count_inside`."""
    numbers = fetched(triton_passes.count_inside(rows, experts, every, ranges, counts.shape[1]))
    if numbers[-1]:
        return False
    counts += numbers[: counts.size].reshape(counts.shape).view(counts.dtype)
    if ranges[:, 2].any():
        bits = numbers[counts.size : 2 * counts.size]
        left_out |= bits.reshape(counts.shape).astype(left_out.dtype)
    above += numbers[-1 - len(above) : -1]
    return True


def _norms_of_thinning(
    rows: Tensor,
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
    found = fetched(triton_passes.norms_of_drops(formula, rows, start, tile))
    if not np.isfinite(found[0]).all():
        return False
    norms.add(np.moveaxis(found, -1, 0), tile)
    return True


def _signature(rows: Tensor, start: int, tile: int, dots: PartSums, mass: PartSums) -> bool:
    found = fetched(triton_passes.signature(rows, tile))
    if not _add_products(found[:-2], tile, dots):
        return False
    mass.add(found[-2:].T, tile)
    return True


def _gram(rows: Tensor, start: int, vectors: bool, tile: int, dots: PartSums) -> bool:
    count = dots.sums.shape[-1]
    return _add_products(fetched(triton_passes.products(rows, count, vectors, tile)), tile, dots)


def _add_products(found: Array, tile: int, dots: PartSums) -> bool:
    """Add inner products of pairs a ≤ b by tile; False if they are not finite, which shows in the
    squares."""
    left, right = np.triu_indices(dots.sums.shape[-1])
    if not np.isfinite(found[left == right]).all():
        return False
    tiles = np.empty((found.shape[1], *dots.sums.shape[1:]))
    tiles[:, left, right] = tiles[:, right, left] = found.T
    dots.add(tiles, tile)
    return True


COUNTERPARTS: dict[Any, Callable[..., bool]] = {
    select.count_high: count_high,
    select.count_inside: count_inside,
    loops.norms_of_thinning: _norms_of_thinning,
    signature: _signature,
    products.gram: _gram,
}
"""Kernel that reads a chunk -> the same on a GPU: (rows, start, *arguments) -> done."""
