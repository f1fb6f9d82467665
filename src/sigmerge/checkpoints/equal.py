"""Whether tensors hold the same bytes."""

from __future__ import annotations

from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.lazy import FormedTensor
from sigmerge.files.objects import open_stored


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and same_bytes(one, other)


def same_bytes(one: Tensor, other: Tensor, step: int = 1 << 20) -> bool:
    """Whether two tensors of the same length hold the same bytes; most differ in the first."""
    if isinstance(one, FormedTensor) or isinstance(other, FormedTensor):
        return one == other
    if (one.file, one.begin, one.end) == (other.file, other.begin, other.end):
        return True  # one tensor under two names
    with open_stored(one.file) as left, open_stored(other.file) as right:
        left.seek(one.begin)
        right.seek(other.begin)
        remaining = one.nbytes
        while remaining > 0:
            count = min(step, remaining)
            if left.read(count) != right.read(count):
                return False
            remaining -= count
    return True
