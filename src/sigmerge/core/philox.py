"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11; native/philox.cpp).

A draw depends on (key, index) alone, so any tile of any tensor can be drawn anywhere in any order
and gives the same bits. Index i is lane i mod 4 of counter i div 4.
"""

from __future__ import annotations

import hashlib

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
