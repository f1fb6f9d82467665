"""SHA-256 of sixteen runs of bytes at a time, one in each lane of a processor's wide registers.

Every step of SHA-256 waits for the one before, so that one run leaves most of a core idle, also
with the instructions that are made for it. Names and numbers of equations are those of FIPS 180-4.
"""

from __future__ import annotations

import functools
from itertools import count, islice
from typing import Any, Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import Intrinsic, kernel
from sigmerge.kernels.rooms import room
from sigmerge.kernels.window import MEMORY, none_failed, read

HASH_LANES: Final = 16
_BLOCK: Final = 64
"""Bytes that are taken at a time."""
LANE_WINDOW: Final = 1 << 14
"""Bytes of each run that are read at a time: those of all lanes fit into the second-level cache."""
_APART: Final = LANE_WINDOW + _BLOCK
"""Bytes between the windows of two lanes; at powers of two they would push each other out."""


def hashes(length: int, total: int) -> bool:
    """Whether runs of a length, which are so many bytes together, are hashed side by side here."""
    return total == HASH_LANES * length and length % LANE_WINDOW == 0 and _is_wide()


@functools.cache
def _is_wide() -> bool:
    """Whether a register holds sixteen words. Where it does not, hashlib is faster."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512f"))


def lane_digests(descriptor: int, position: int, length: int) -> bytes | None:
    """The SHA-256 of each of HASH_LANES runs that follow one another in a file.

    None if the file ends before. A run has `length` bytes, a multiple of LANE_WINDOW.
    """
    windows, failed = room(HASH_LANES * _APART, np.uint8, "lanes"), none_failed()
    state = np.repeat(np.array(_constants(2, 8), np.uint32), HASH_LANES).reshape(8, HASH_LANES)
    last = np.frombuffer(_padding(length), np.uint8)
    places = [one.__array_interface__["data"][0] for one in (windows, state, last)]
    _hash(descriptor, position, length, *places, failed)
    return state.T.astype(">u4").tobytes() if failed[0] == MEMORY else None


def _padding(length: int) -> bytes:
    """Section 5.1.1: the block that ends a run of whole blocks."""
    return b"\x80" + bytes(_BLOCK - 9) + (8 * length).to_bytes(8, "big")


def _constants(root: int, number: int) -> list[int]:
    """Sections 4.2.2 and 5.3.3: the first 32 bits of the fractions of roots of the first primes."""
    primes = (n for n in count(2) if all(n % d for d in range(2, n)))
    return [_floor_root(prime << 32 * root, root) % 2**32 for prime in islice(primes, number)]


def _floor_root(value: int, root: int) -> int:
    low, high = 0, value
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**root <= value else (low, middle - 1)
    return low


@Intrinsic
def _mix(typing_context: Any, data: Any, apart: Any, state: Any, blocks: Any) -> Any:
    """Section 6.2.2 for so many blocks of every lane, of which the first begin `apart` at `data`.

    `state` is the address of eight rows of a word for each lane.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    words = ir.VectorType(ir.IntType(32), HASH_LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, step, rows, number = arguments
        rows = builder.inttoptr(rows, words.as_pointer())

        def row(place: Any) -> Any:
            found = builder.load(place)
            found.align = 4
            return found

        with cgutils.for_range(builder, number) as loop:
            places = [builder.gep(rows, [ir.IntType(32)(i)]) for i in range(8)]
            before = [row(place) for place in places]
            at = builder.add(first, builder.mul(loop.index, loop.index.type(_BLOCK)))
            lanes = []
            for _ in range(HASH_LANES):
                lanes.append(row(builder.inttoptr(at, words.as_pointer())))
                at = builder.add(at, step)
            after = _rounds(_Words(builder, words), before, lanes)
            for place, old, new in zip(places, before, after, strict=True):
                builder.store(builder.add(old, new), place).align = 4
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.intp), generate


class _Words:
    """Instructions on a word of each lane."""

    def __init__(self, builder: Any, words: Any) -> None:
        self._builder, self._words = builder, words
        self.xor, self.both, self.either = builder.xor, builder.and_, builder.or_

    def every(self, number: int) -> Any:
        return self._words([number] * HASH_LANES)

    def sum(self, *values: Any) -> Any:
        return functools.reduce(self._builder.add, values)

    def rotated(self, value: Any, right: int) -> Any:
        return self._call("fshl", value, value, self.every(32 - right))

    def shifted(self, value: Any, right: int) -> Any:
        return self._builder.lshr(value, self.every(right))

    def swapped(self, value: Any) -> Any:
        """With the bytes of each word in the other order."""
        return self._call("bswap", value)

    def zipped(self, one: Any, other: Any, half: int) -> Any:
        """The words of a half of each, by turns."""
        begin = half * HASH_LANES // 2
        turns = [
            word for i in range(begin, begin + HASH_LANES // 2) for word in (i, HASH_LANES + i)
        ]
        return self._builder.shuffle_vector(one, other, self._words(turns))

    def _call(self, name: str, *given: Any) -> Any:
        from llvmlite import ir
        from numba.core import cgutils

        kind = ir.FunctionType(self._words, [self._words] * len(given))
        full = f"llvm.{name}.v{HASH_LANES}i32"
        function = cgutils.get_or_insert_function(self._builder.module, kind, full)
        return self._builder.call(function, given)


def _rounds(do: _Words, state: list[Any], lanes: list[Any]) -> list[Any]:
    """The working variables after the 64 rounds of one block, whose words each lane has."""
    schedule = [do.swapped(words) for words in _transposed(do, lanes)]
    a, b, c, d, e, f, g, h = state
    for t, constant in enumerate(_constants(3, 64)):
        if t >= HASH_LANES:
            w2, w7, w15, w16 = (schedule[t - i] for i in (2, 7, 15, 16))
            sigma0 = do.xor(do.xor(do.rotated(w15, 7), do.rotated(w15, 18)), do.shifted(w15, 3))
            sigma1 = do.xor(do.xor(do.rotated(w2, 17), do.rotated(w2, 19)), do.shifted(w2, 10))
            schedule.append(do.sum(sigma1, w7, sigma0, w16))
        choice = do.xor(g, do.both(e, do.xor(f, g)))
        majority = do.either(do.both(a, b), do.both(c, do.either(a, b)))
        large1 = do.xor(do.xor(do.rotated(e, 6), do.rotated(e, 11)), do.rotated(e, 25))
        large0 = do.xor(do.xor(do.rotated(a, 2), do.rotated(a, 13)), do.rotated(a, 22))
        t1 = do.sum(h, do.every(constant), schedule[t], choice, large1)
        t2 = do.sum(large0, majority)
        a, b, c, d, e, f, g, h = do.sum(t1, t2), a, b, c, do.sum(d, t1), e, f, g
    return [a, b, c, d, e, f, g, h]


def _transposed(do: _Words, rows: list[Any]) -> list[Any]:
    """Row i has word i of every lane. Each turn makes neighbours of what was half of all apart."""
    half = HASH_LANES // 2
    for _ in range(HASH_LANES.bit_length() - 1):
        rows = [do.zipped(rows[i], rows[i + half], part) for i in range(half) for part in (0, 1)]
    return rows


@kernel
def _hash(
    descriptor: int, position: int, length: int, windows: int, state: int, last: int, failed: Array
) -> None:
    for done in range(0, length, LANE_WINDOW):
        for lane in range(HASH_LANES):
            begin = position + lane * length + done
            read(descriptor, begin, windows + lane * _APART, LANE_WINDOW, failed)
        _mix(np.uint64(windows), np.uint64(_APART), np.uint64(state), LANE_WINDOW // _BLOCK)
    _mix(np.uint64(last), np.uint64(0), np.uint64(state), 1)
