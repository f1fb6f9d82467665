"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11).

A draw depends on (key, index) alone, so any tile of any tensor can be drawn anywhere in any order
and gives the same bits. Index i is lane i mod 4 of counter i div 4.
"""

from __future__ import annotations

import hashlib

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import inlined, kernel, part

Word = np.uint32
Counter = tuple[Word, Word, Word, Word]


def key_of(seed: int, *names: str) -> tuple[int, int]:
    """The two key words of a stream that is named by a seed and strings."""
    digest = hashlib.sha256("\0".join([str(seed), *names]).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


@inlined
def _round4(c0: Word, c1: Word, c2: Word, c3: Word, k0: Word, k1: Word) -> Counter:
    product0 = np.uint64(0xD2511F53) * np.uint64(c0)
    product1 = np.uint64(0xCD9E8D57) * np.uint64(c2)
    high0 = np.uint32(product0 >> np.uint64(32))
    high1 = np.uint32(product1 >> np.uint64(32))
    return (
        np.uint32(high1 ^ c1 ^ k0),
        np.uint32(product1),
        np.uint32(high0 ^ c3 ^ k1),
        np.uint32(product0),
    )


@inlined
def _draw4(counter: np.uint64, key: tuple[int, int]) -> Counter:
    """The four draws of one counter."""
    c0, c1 = np.uint32(counter), np.uint32(counter >> np.uint64(32))
    c2, c3 = np.uint32(0), np.uint32(0)
    k0, k1 = np.uint32(key[0]), np.uint32(key[1])
    for _ in range(10):
        c0, c1, c2, c3 = _round4(c0, c1, c2, c3, k0, k1)
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    return c0, c1, c2, c3


@kernel
def fill(key: tuple[int, int], start: int, out: Array) -> None:
    """Random uint32 for the indices start, start+1, …, whatever the start."""
    head = min(-start % 4, out.size)
    groups = (out.size - head) // 4
    tail = head + 4 * groups
    _fill_some(key, start, out[:head])
    _fill_groups(key, (start + head) // 4, groups, out[head:tail])
    _fill_some(key, start + tail, out[tail:])


@part
def _fill_groups(key: tuple[int, int], first: int, groups: int, out: Array) -> None:
    """All four lanes of every counter from `first` on, in a loop that runs in vectors."""
    for group in range(groups):
        c0, c1, c2, c3 = _draw4(np.uint64(first + group), key)
        out[4 * group] = c0
        out[4 * group + 1] = c1
        out[4 * group + 2] = c2
        out[4 * group + 3] = c3


@part
def _fill_some(key: tuple[int, int], start: int, out: Array) -> None:
    for i in range(out.size):
        out[i] = _draw4(np.uint64((start + i) // 4), key)[(start + i) % 4]


def keep_below(probability: float) -> int:
    """A draw below this integer happens with the given probability (exactly 2**32 for 1)."""
    return int(probability * 2**32)
