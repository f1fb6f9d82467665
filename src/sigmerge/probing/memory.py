"""Memory of a GPU or of this machine: what is free now, and what to do when it is full."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sigmerge.engine.machine import free_memory
from sigmerge.errors import MemoryFull
from sigmerge.messages import size

_T = TypeVar("_T")
FULL = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # when its handle finds no room
)
"""What torch says, on one processor or another, when a memory is full."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that a memory is full; on processor cores it has no class."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)


def free_now(device: str) -> int:
    """Bytes that this process can take now, on a GPU those that torch keeps for it included."""
    if device != "cuda":
        return free_memory()
    import torch

    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(torch.cuda.mem_get_info()[0] + kept)


def free_cached() -> None:
    """Give other processes what torch keeps of a GPU and does not use."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def full(where: str, error: BaseException) -> MemoryFull:
    """The error of a full memory: where, how much is free, who holds it, what to do."""
    if "CU" not in str(error):  # CUDA's own and its libraries' errors say so
        return MemoryFull(
            f"{where}: the memory is full; {size(free_memory())} are free. End what holds it, use "
            "a larger machine, or --dtype bfloat16."
        )
    import torch

    state = ""
    with suppress(RuntimeError, AssertionError):  # a GPU so full that it does not even answer
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
        state = (
            f"; of {size(total)}, {size(free)} are free, this process holds {size(own)}, and "
            f"other processes and CUDA {size(total - free - own)}"
        )
    return MemoryFull(
        f"{where}: the memory of the GPU is full{state}. Wait for the other processes or run fewer "
        "side by side, use a larger GPU, or --dtype bfloat16."
    )


@contextmanager
def in_memory(where: str) -> Iterator[None]:
    """In this context an error that says that a memory is full is MemoryFull, and says where."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise full(where, error) from error


def in_halves(work: Callable[..., _T], most: int, where: str) -> _T:
    """Call `work` with `most`; where a memory is full, with half of it, and so on.

    With 1 it is tried twice: other processes may have given some memory back.
    """
    last = False
    while True:
        try:
            return work(most)
        except RuntimeError as error:
            if not is_full(error):
                raise
            if last:
                raise full(f"{where}: not even one item fits", error) from None
        gc.collect()
        free_cached()
        last, most = most == 1, max(1, most // 2)
