"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11; native/philox.cpp).

A draw depends on (key, index) alone, so any tile of any tensor can be drawn anywhere in any order
and gives the same bits. Index i is lane i mod 4 of counter i div 4.
"""

from __future__ import annotations

import hashlib

import numpy as np

from sigmerge import _native
from sigmerge.core import Array


def key_of(seed: int, *names: str) -> tuple[int, int]:
    """The two key words of a stream that is named by a seed and strings."""
    digest = hashlib.sha256("\0".join([str(seed), *names]).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def fill(key: tuple[int, int], start: int, out: Array) -> None:
    """Random uint32 for the indices start, start+1, …, whatever the start."""
    _native.draw(*key, start, out)


def keep_below(probability: float) -> int:
    """A draw below this integer happens with the given probability (exactly 2**32 for 1)."""
    return int(probability * 2**32)


def normal(key: tuple[int, int], start: int, out: Array) -> None:
    """Normal numbers for the indices start, start+1, …: sums of twelve uniform ones.

    Sums of integers have the same bits on every processor, as logarithms and cosines need not.
    """
    drawn = np.empty(12 * out.size, np.uint32)
    fill(key, 12 * start, drawn)
    sums = drawn.reshape(-1, 12).sum(axis=1, dtype=np.int64)
    out[:] = (sums - 6 * (2**32 - 1)) / 2.0**32


def uniform(key: tuple[int, int], start: int, out: Array) -> None:
    """Numbers in [0, 1) for the indices start, start+1, …."""
    drawn = np.empty(out.size, np.uint32)
    fill(key, start, drawn)
    out[:] = (drawn >> np.uint32(8)) / 2.0**24
