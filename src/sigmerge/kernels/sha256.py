"""SHA-256 of sixteen runs of bytes side by side.

Every step of SHA-256 waits for the one before, so that one run leaves most of a core idle, also
with the instructions that are made for it. A processor with wide registers takes all runs at once,
one in each lane. One with ARM's instructions for SHA-256 takes four, with an instruction of each by
turns. Names and numbers of equations are those of FIPS 180-4.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.jit import Intrinsic, kernel, part
from sigmerge.kernels.lanes import WORD_LANES, Words
from sigmerge.kernels.rooms import room
from sigmerge.kernels.window import MEMORY, none_failed, read

HASH_LANES: Final = WORD_LANES
_BLOCK: Final = 64
"""Bytes that are taken at a time."""
LANE_WINDOW: Final = 1 << 14
"""Bytes of each run that lanes read at a time: all of them fit into the second-level cache."""
_APART: Final = LANE_WINDOW + _BLOCK
"""Bytes between the windows of two lanes; at powers of two they would push each other out."""
_TURNS: Final = 4
"""Runs that are hashed by turns. Two leave time, and for eight there are too few registers."""
_TURN_WINDOW: Final = HASH_LANES // _TURNS * LANE_WINDOW
_TURN_APART: Final = _TURN_WINDOW + _BLOCK
_DIGEST: Final = 32
"""Bytes of a run's state, and of its digest."""


def hashes(length: int, total: int) -> bool:
    """Whether runs of a length, which are so many bytes together, are hashed side by side here."""
    fits = total == HASH_LANES * length and length % LANE_WINDOW == 0
    return fits and (_is_wide() or _has_instructions())


@functools.cache
def _is_wide() -> bool:
    """Whether a register holds sixteen words. With narrower ones hashlib is faster."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512f"))


@functools.cache
def _has_instructions() -> bool:
    """Whether there are ARM's instructions, and code is compiled for the processor as it is.

    LLVM ends the process where it is told to compile them for a processor that has none.
    """
    from llvmlite import binding

    told = bool({"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & os.environ.keys())
    told |= Path(".numba_config.yaml").exists()
    return not told and bool(binding.get_host_cpu_features().get("sha2"))


def lane_digests(descriptor: int, position: int, length: int) -> bytes | None:
    """The SHA-256 of each of HASH_LANES runs that follow one another in a file.

    None if the file ends before. A run has `length` bytes, a multiple of LANE_WINDOW.
    """
    by_turns, failed = _has_instructions(), none_failed()
    windows = room(HASH_LANES * _APART, np.uint8, "lanes")
    initial = [_constants(2, 8)] * HASH_LANES
    state = np.array(initial, np.uint32, order="C" if by_turns else "F")
    last = np.frombuffer(_padding(length), np.uint8)
    places = [one.__array_interface__["data"][0] for one in (windows, state, last)]
    compute = _hash_by_turns if by_turns else _hash_in_lanes
    compute(descriptor, position, length, *places, failed)
    return state.astype(">u4").tobytes() if failed[0] == MEMORY else None


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
def _mix_in_lanes(typing_context: Any, data: Any, apart: Any, state: Any, blocks: Any) -> Any:
    """Section 6.2.2 for so many blocks of every run, of which the first begin `apart` at `data`.

    `state` is the address of eight rows of a word for each run.
    """
    return _mixing(HASH_LANES, HASH_LANES, _rounds_in_lanes)


@Intrinsic
def _mix_by_turns(typing_context: Any, data: Any, apart: Any, state: Any, blocks: Any) -> Any:
    """The same of _TURNS runs. `state` is the address of a row of eight words for each run."""
    return _mixing(4, _TURNS, _rounds_by_turns)


def _mixing(width: int, runs: int, rounds: Callable[..., Any]) -> Any:
    """Instructions for registers of so many words, eight of which hold the state of all runs."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, step, rows, number = arguments
        do = Words(builder, width)

        def places(address: Any, count: int) -> list[Any]:
            begin = builder.inttoptr(address, do.type.as_pointer())
            return [builder.gep(begin, [ir.IntType(32)(i)]) for i in range(count)]

        def row(place: Any) -> Any:
            found = builder.load(place)
            found.align = 4
            return found

        with cgutils.for_range(builder, number) as loop:
            state = places(rows, 8)
            before = [row(place) for place in state]
            at = builder.add(first, builder.mul(loop.index, loop.index.type(_BLOCK)))
            blocks = []
            for _ in range(runs):
                blocks.append([row(place) for place in places(at, _BLOCK // (4 * width))])
                at = builder.add(at, step)
            after = rounds(do, before, blocks)
            for place, old, new in zip(state, before, after, strict=True):
                builder.store(builder.add(old, new), place).align = 4
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.intp), generate


def _rounds_in_lanes(do: Words, state: list[Any], blocks: list[list[Any]]) -> list[Any]:
    """The working variables after the 64 rounds of one block of each run, which is one register."""
    schedule = [do.swapped(words) for words in do.transposed([block for (block,) in blocks])]
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


def _rounds_by_turns(do: Words, state: list[Any], blocks: list[list[Any]]) -> list[Any]:
    """The same of runs with two registers each, by instructions for four rounds of one run."""
    runs = [(state[i], state[i + 1]) for i in range(0, len(state), 2)]
    schedules = [[do.swapped(words) for words in block] for block in blocks]
    constants = _constants(3, 64)
    for t in range(0, 64, 4):
        constant = do.type(constants[t : t + 4])
        for run, schedule in enumerate(schedules):
            if t >= 16:
                w16, w12, w8, w4 = schedule[-4:]
                schedule.append(do.arm("sha256su1", do.arm("sha256su0", w16, w12), w8, w4))
            (abcd, efgh), words = runs[run], do.sum(schedule[t // 4], constant)
            runs[run] = do.arm("sha256h", abcd, efgh, words), do.arm("sha256h2", efgh, abcd, words)
    return [half for run in runs for half in run]


@kernel
def _hash_in_lanes(
    descriptor: int, position: int, length: int, windows: int, state: int, last: int, failed: Array
) -> None:
    own = np.uint64(state)
    for done in range(0, length, LANE_WINDOW):
        _fill(descriptor, position + done, length, HASH_LANES, windows, _APART, LANE_WINDOW, failed)
        _mix_in_lanes(np.uint64(windows), np.uint64(_APART), own, LANE_WINDOW // _BLOCK)
    _mix_in_lanes(np.uint64(last), np.uint64(0), own, 1)


@kernel
def _hash_by_turns(
    descriptor: int, position: int, length: int, windows: int, state: int, last: int, failed: Array
) -> None:
    for first in range(0, HASH_LANES, _TURNS):
        own = np.uint64(state + first * _DIGEST)
        for done in range(0, length, _TURN_WINDOW):
            begin, size = position + first * length + done, min(_TURN_WINDOW, length - done)
            _fill(descriptor, begin, length, _TURNS, windows, _TURN_APART, size, failed)
            _mix_by_turns(np.uint64(windows), np.uint64(_TURN_APART), own, size // _BLOCK)
        _mix_by_turns(np.uint64(last), np.uint64(0), own, 1)


@part
def _fill(
    descriptor: int, position: int, length: int, runs: int,
    windows: int, apart: int, size: int, failed: Array,
) -> None:  # fmt: skip
    """Read so many bytes of each run; those of the first begin at the position."""
    for run in range(runs):
        read(descriptor, position + run * length, windows + run * apart, size, failed)
