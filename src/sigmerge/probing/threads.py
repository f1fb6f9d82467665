"""One thread of torch for each of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """While open, torch does not split work over threads in the calling thread.

    Sums then have one order, so results do not depend on the number of cores; and on busy cores two
    threads wait for each other at every small product, one does not.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
