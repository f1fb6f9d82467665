"""A checksum of bytes at the speed of memory, to detect accidents: truncated, zeroed, mixed up.

NH, the inner part of UMAC: the two halves of every 64-bit word, each with a number added that
depends on the word's position, are multiplied, and the products are added modulo 2^64. Equal sums
of different bytes are a matter of chance, 2^-32 at worst. It is no protection against a forger.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import kernel, part

WORD = 8
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_EVEN = np.uint64(0x9E3779B1)
_ODD = np.uint64(0x85EBCA77)
_SIDE_BY_SIDE: Final = 64
"""Words that are added to sums of their own."""


@part
def add_word(word: np.uint64, place: np.uint64, total: np.uint64) -> np.uint64:
    at = place + np.uint64(1)
    low = ((word & _LOW) + at * _EVEN) & _LOW
    high = ((word >> _HALF) + at * _ODD + _EVEN) & _LOW
    return np.uint64(total + low * high)


@kernel
def sum_words(words: Array, first: np.uint64, total: np.uint64) -> np.uint64:
    """Add words, of which the first has the place `first`.

    The numbers of _SIDE_BY_SIDE words are made once: those of the next are more by one number.
    """
    low_keys, high_keys = np.empty(_SIDE_BY_SIDE, np.uint64), np.empty(_SIDE_BY_SIDE, np.uint64)
    for i in range(_SIDE_BY_SIDE):
        low_keys[i], high_keys[i] = np.uint64(i + 1) * _EVEN, np.uint64(i + 1) * _ODD + _EVEN
    sums = np.zeros(_SIDE_BY_SIDE, np.uint64)
    whole = words.size // _SIDE_BY_SIDE * _SIDE_BY_SIDE
    for begin in range(0, whole, _SIDE_BY_SIDE):
        some, place = words[begin : begin + _SIDE_BY_SIDE], np.uint64(first + np.uint64(begin))
        more_low, more_high = place * _EVEN, place * _ODD
        for i in range(_SIDE_BY_SIDE):
            low = ((some[i] & _LOW) + low_keys[i] + more_low) & _LOW
            high = ((some[i] >> _HALF) + high_keys[i] + more_high) & _LOW
            sums[i] += low * high
    for i in range(_SIDE_BY_SIDE):
        total += sums[i]
    for i in range(whole, words.size):
        total = add_word(words[i], np.uint64(first + np.uint64(i)), total)
    return np.uint64(total)


def checksum(data: memoryview, position: int = 0, before: int = 0) -> int:
    """The checksum of bytes from `position` on, added to that of the bytes `before` them.

    All pieces but the last have a multiple of eight bytes.
    """
    whole = data.nbytes // WORD * WORD
    stored = np.frombuffer(data, np.uint8)
    words = stored[:whole]
    if words.ctypes.data % WORD:
        words = words.copy()
    total = sum_words(words.view(np.uint64), np.uint64(position // WORD), np.uint64(before))
    if whole < data.nbytes:
        last = np.zeros(WORD, np.uint8)
        last[: data.nbytes - whole] = stored[whole:]
        at = np.uint64((position + whole) // WORD)
        total = sum_words(last.view(np.uint64), at, np.uint64(total))
    return int(total)
