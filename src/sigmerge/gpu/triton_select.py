"""The largest entries of whole task vectors on a GPU, found without asking the processor between.

Magnitudes are patterns of 31 bits. A launch counts the next eight bits of those entries that begin
like the one at the rank, a second takes the digit where that one lies; four times, and the pattern
is whole. Only three numbers for each expert leave the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sigmerge.core import Array
from sigmerge.gpu.memory import there
from sigmerge.gpu.triton_passes import EXACT, entry, launch, magnitude_of, note_wrong

SELECT_BLOCK = 4096
"""Coordinates of one program."""
DIGIT_BITS = 8
"""Bits that a pass adds to the pattern."""
_BITS = tl.constexpr(DIGIT_BITS)
_VALUES = tl.constexpr(1 << DIGIT_BITS)


@triton.jit(do_not_specialize=["size", "shift"], do_not_specialize_on_alignment=["flag"])
def _count_digit(
    rows, stride, found, counts, flag, size, shift, members: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Count the digits at `shift` of one block of one expert's differences.

    `found` has a row for each expert: its number, the pattern so far, the rank among the entries
    that begin like it, and how many there are.
    """
    row = tl.program_id(1)
    mine = found + 4 * row
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    value = entry(rows, stride, tl.load(mine), at, inside, members, True)
    note_wrong(value, flag, 1)
    begin = (magnitude_of(value) >> shift) >> _BITS
    wanted = (tl.load(mine + 1) >> shift) >> _BITS
    digit = (magnitude_of(value) >> shift) & (_VALUES - 1)
    # Entries that begin otherwise go to places that are not kept.
    seen = tl.histogram(tl.where(inside & (begin == wanted), digit, _VALUES), 2 * _VALUES)
    place = tl.arange(0, 2 * _VALUES)
    kept = (place < _VALUES) & (seen > 0)
    tl.atomic_add(counts + row * _VALUES + place, seen, mask=kept, sem="relaxed")


@triton.jit(do_not_specialize=["shift"])
def _take_digit(found, counts, shift):
    """Add the digit where the rank lies to one expert's pattern; clears the counts."""
    mine = found + 4 * tl.program_id(0)
    place = tl.arange(0, _VALUES)
    here = counts + tl.program_id(0) * _VALUES + (_VALUES - 1 - place)  # the largest first
    seen, rank = tl.load(here), tl.load(mine + 2)
    until = tl.cumsum(seen, 0)
    before = until < rank
    digit = _VALUES - 1 - tl.sum(before.to(tl.int32), 0)
    tl.store(mine + 1, tl.load(mine + 1) | (digit << shift))
    tl.store(mine + 2, rank - tl.max(tl.where(before, until, 0), 0))
    tl.store(mine + 3, tl.sum(tl.where(_VALUES - 1 - place == digit, seen, 0), 0))
    tl.store(here, tl.zeros_like(seen))


def selected(rows: Tensor, experts: Array, ranks: Array) -> Tensor:
    """By expert (number, magnitude at its rank, how many of it are within, how many there are).

    One more row: what is not zero if something is not finite.
    """
    count, size = len(experts), rows.shape[1]
    state = np.zeros((count + 1, 4), np.int32)
    state[:-1, 0], state[:-1, 2] = experts, ranks
    found = there(state, rows)
    counts = torch.zeros((count, 1 << DIGIT_BITS), dtype=torch.int32, device=rows.device)
    grid: Any = (triton.cdiv(size, SELECT_BLOCK), count)
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
        launch(
            _count_digit, grid, rows, rows.stride(0), found, counts, found[-1], size, shift,
            len(rows), SELECT_BLOCK, **EXACT,
        )  # fmt: skip
        launch(_take_digit, (count,), found, counts, shift)
    return found
