"""Sums in lanes on a GPU, in their fixed order: in torch every step would be a launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sigmerge.kernels import LANES


@triton.jit
def _add(values, out, steps, lanes: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads types
    """One row: entries of a lane from the first to the last."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    total = tl.zeros([lanes], dtype=tl.float64)
    for step in range(steps):
        total += tl.load(values + (row * steps + step) * lanes + lane)
    tl.store(out + row * lanes + lane, total)


def lane_sums(steps: Tensor) -> Tensor:
    """Sums of float64 (…, steps, LANES) over the steps."""
    given = steps.contiguous()
    out = given.new_empty((*given.shape[:-2], LANES))
    _add[(out.numel() // LANES,)](given, out, given.shape[-2], LANES)
    return out
