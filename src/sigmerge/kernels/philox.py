"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11).

A draw depends on (key, index) alone, so any tile of any tensor can be drawn anywhere in any order
and gives the same bits. Index i is lane i mod 4 of counter i div 4.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import Intrinsic, kernel, part
from sigmerge.kernels.lanes import WORD_LANES, Words, words_to_multiply

DRAWN_AT_ONCE: Final = 4 * WORD_LANES
"""Draws that are made together."""


def key_of(seed: int, *names: str) -> tuple[int, int]:
    """The two key words of a stream that is named by a seed and strings."""
    digest = hashlib.sha256("\0".join([str(seed), *names]).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


@kernel
def fill(key: tuple[int, int], start: int, out: Array) -> None:
    """Random uint32 for the indices start, start+1, …, whatever the start."""
    head = min(-start % DRAWN_AT_ONCE, out.size)
    tail = head + (out.size - head) // DRAWN_AT_ONCE * DRAWN_AT_ONCE
    _fill_some(key, start, out[:head])
    _fill_blocks(key, (start + head) // DRAWN_AT_ONCE, out[head:tail])
    _fill_some(key, start + tail, out[tail:])


@part
def _fill_some(key: tuple[int, int], start: int, out: Array) -> None:
    """Some draws of one block."""
    if out.size > 0:
        block = np.empty(DRAWN_AT_ONCE, np.uint32)
        _fill_blocks(key, start // DRAWN_AT_ONCE, block)
        for i in range(out.size):
            out[i] = block[start % DRAWN_AT_ONCE + i]


@part
def _fill_blocks(key: tuple[int, int], first: int, out: Array) -> None:
    k0, k1 = np.uint32(key[0]), np.uint32(key[1])
    for block in range(out.size // DRAWN_AT_ONCE):
        _fill_block(k0, k1, np.uint64((first + block) * WORD_LANES), out, block * DRAWN_AT_ONCE)


@Intrinsic
def _fill_block(typing_context: Any, k0: Any, k1: Any, counter: Any, out: Any, begin: Any) -> Any:
    """The four draws of WORD_LANES counters from one on, stored from `begin` on.

    The first counter is a multiple of WORD_LANES, so that all have the same high word.
    """
    from numba import types

    draws = types.Array(types.uint32, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *key, first, array, place = arguments
        words, do = Words(builder), words_to_multiply(builder)
        word = do.type.element
        low = do.spread(builder.trunc(first, word))
        high = do.spread(builder.trunc(builder.lshr(first, first.type(32)), word))
        counter = do.sum(low, do.type(list(range(WORD_LANES)))), high, do.every(0), do.every(0)
        drawn = _rounds(do, counter, [do.spread(builder.zext(one, word)) for one in key])
        data = context.make_array(draws)(context, builder, value=array).data
        for row in words.transposed([builder.trunc(one, words.type) for one in drawn]):
            at = builder.bitcast(builder.gep(data, [place]), row.type.as_pointer())
            builder.store(row, at).align = 4
            place = builder.add(place, place.type(WORD_LANES))
        return context.get_dummy_value()

    return types.void(types.uint32, types.uint32, types.uint64, draws, types.intp), generate


def _rounds(do: Words, counter: tuple[Any, ...], key: list[Any]) -> tuple[Any, ...]:
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = do.product(c0, 0xD2511F53)
        high1, low1 = do.product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = do.xor(high1, do.xor(c1, k0)), low1, do.xor(high0, do.xor(c3, k1)), low0
        k0, k1 = do.sum(k0, do.every(0x9E3779B9)), do.sum(k1, do.every(0xBB67AE85))
    return c0, c1, c2, c3


def keep_below(probability: float) -> int:
    """A draw below this integer happens with the given probability (exactly 2**32 for 1)."""
    return int(probability * 2**32)
