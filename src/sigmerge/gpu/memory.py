"""Arrays of a GPU: made there, sent there, brought back."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from sigmerge.core import Array
from sigmerge.core.dtypes import BF16, F16, F32

STORED = {BF16: torch.int16, F16: torch.float16, F32: torch.float32}
"""The type of stored values in programs: those of bfloat16 are patterns of 16 bits."""
ROW_GRAIN = 64
"""Coordinates of which a row of a matrix takes whole multiples."""


def matrix(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for rows of at least this size, which begin where a GPU reads many numbers at once."""
    wide = -(-size // ROW_GRAIN) * ROW_GRAIN
    return torch.empty((count, wide), dtype=dtype, device=device)


def no_flag(device: torch.device) -> Tensor:
    """What a program sets where something is not finite."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def there(numbers: Array, like: Tensor) -> Tensor:
    """Numbers on a device; nothing waits for them, since the system stages so few at once."""
    return torch.from_numpy(numbers).to(like.device, non_blocking=True)


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
