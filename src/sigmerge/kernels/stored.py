"""Stored numbers by address: one compiled loop for any number of members and any mix of types.

A kernel that took arrays would be compiled again for every number of experts and every mix of
types. Members are therefore passed as a table: the address of the first value of each, and the
code of its type. Whoever makes a table keeps the arrays alive while a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from sigmerge import _native
from sigmerge.kernels import STRIP, Array
from sigmerge.kernels.convert import (
    copy_f32,
    finite_bf16,
    narrow_bf16,
    narrow_f16,
    widen,
    widen_bf16,
    widen_f16,
)
from sigmerge.kernels.jit import kernel, part
from sigmerge.kernels.raw import array_at, bits_as
from sigmerge.kernels.window import MEMORY, FilePlace, Window, window

BF16: Final = 0
F16: Final = 1
F32: Final = 2
CODE: Final[dict[np.dtype[Any], int]] = {
    np.dtype("<u2"): BF16,
    np.dtype("<f2"): F16,
    np.dtype("<f4"): F32,
}
"""The type that stored bytes are viewed as -> its code."""


class Members(NamedTuple):
    """The same piece of a tensor in several checkpoints: addresses, and types by code.

    Addresses of members that are read from files become those of what is read.
    """

    addresses: Array
    kinds: Array
    window: Window


def members(
    rows: Sequence[Array], places: Sequence[FilePlace | None] = (), strip: int = STRIP
) -> Members:
    """The table of contiguous rows, bfloat16 as uint16 bit patterns.

    Rows that have a place in a file are read there, by a loop that takes so long strips.
    """
    return Members(
        np.array([address_of(row) for row in rows], np.uint64),
        np.array([CODE[row.dtype] for row in rows], np.uint8),
        window(places, strip),
    )


def address_of(row: Array) -> int:
    if not row.flags.c_contiguous:
        raise ValueError("a kernel reads contiguous values only")
    return int(row.__array_interface__["data"][0])


@kernel
def load(address: np.uint64, kind: int, begin: int, out: Array) -> bool:
    """float32 values from `begin` on; False if any is NaN or infinite."""
    width = np.uint64(4 if kind == F32 else 2)
    place = np.uint64(address + width * np.uint64(begin))
    if kind == BF16:
        return bool(widen_bf16(array_at(place, out.size, np.uint16), out))
    if kind == F16:
        return bool(widen_f16(array_at(place, out.size, np.uint16), out))
    return bool(copy_f32(array_at(place, out.size, np.float32), out))


@kernel
def load_less(address: np.uint64, kind: int, begin: int, less: Array, out: Array) -> bool:
    """float32 values from `begin` on, minus `less`; False if any value is NaN or infinite."""
    if kind == BF16:
        place = np.uint64(address + np.uint64(2) * np.uint64(begin))
        raw = array_at(place, out.size, np.uint16)
        _widen_less(raw, less, out)
        return bool(finite_bf16(raw))
    finite = load(address, kind, begin, out)
    for i in range(out.size):
        out[i] -= less[i]
    return bool(finite)


@part
def _widen_less(raw: Array, less: Array, out: Array) -> None:
    """widen_bf16 and the subtraction in one loop."""
    for i in range(out.size):
        bits = np.uint32(np.uint32(raw[i]) << np.uint32(16))
        out[i] = bits.view(np.float32) - less[i]


@part
def take(address: np.uint64, kind: int, begin: int, out: Array) -> None:
    """As `load`, where what follows shows whether all values are finite."""
    if kind == BF16:
        place = np.uint64(address + np.uint64(2) * np.uint64(begin))
        widen(array_at(place, out.size, np.uint16), out)
    else:
        load(address, kind, begin, out)


@part
def take_less(address: np.uint64, kind: int, begin: int, less: Array, out: Array) -> None:
    """As `load_less`, where what follows shows whether all values are finite."""
    if kind == BF16:
        place = np.uint64(address + np.uint64(2) * np.uint64(begin))
        _widen_less(array_at(place, out.size, np.uint16), less, out)
    else:
        load_less(address, kind, begin, less, out)


@part
def load_less_from(
    address: np.uint64, kind: int, begin: int, less: Array, least: np.int32, out: Array
) -> bool:
    """As `load_less`, with zeros where the magnitude's pattern does not reach `least`."""
    if kind == BF16:
        place = np.uint64(address + np.uint64(2) * np.uint64(begin))
        raw = array_at(place, out.size, np.uint16)
        for i in range(out.size):
            bits = np.uint32(np.uint32(raw[i]) << np.uint32(16))
            value = np.float32(bits.view(np.float32) - less[i])
            reaches = value.view(np.int32) & np.int32(0x7FFFFFFF) >= least
            out[i] = value if reaches else np.float32(0)
        return bool(finite_bf16(raw))
    finite = load_less(address, kind, begin, less, out)
    keep_from(out, least)
    return bool(finite)


@part
def keep_from(values: Array, least: np.int32) -> None:
    """Zero what does not reach a magnitude's pattern."""
    bits = bits_as(values, np.int32)
    for i in range(bits.size):
        reaches = bits[i] & np.int32(0x7FFFFFFF) >= least
        bits[i] = np.int32(bits[i] * np.int32(reaches))


@kernel
def load_difference(
    address: np.uint64,
    kind: int,
    reference: np.uint64,
    reference_kind: int,
    begin: int,
    room: Array,
    out: Array,
) -> bool:
    """float32 values from `begin` on, minus the reference's; False if any is NaN or infinite.

    `room` is for the reference, where the two cannot be widened and subtracted in one loop.
    """
    if (kind == BF16) & (reference_kind == BF16):
        skip = np.uint64(2) * np.uint64(begin)
        minuend = array_at(np.uint64(address + skip), out.size, np.uint16)
        subtrahend = array_at(np.uint64(reference + skip), out.size, np.uint16)
        for i in range(out.size):
            bits = np.uint32(np.uint32(minuend[i]) << np.uint32(16))
            less = np.uint32(np.uint32(subtrahend[i]) << np.uint32(16))
            out[i] = bits.view(np.float32) - less.view(np.float32)
        return bool(finite_bf16(minuend) & finite_bf16(subtrahend))
    less_row = room[: out.size]
    finite = load(reference, reference_kind, begin, less_row)
    return bool(finite & load_less(address, kind, begin, less_row, out))


@kernel
def save(values: Array, address: np.uint64, kind: int, begin: int) -> bool:
    """Round float32 values once to the stored type; False if not all stored values are finite."""
    width = np.uint64(4 if kind == F32 else 2)
    place = np.uint64(address + width * np.uint64(begin))
    if kind == BF16:
        return bool(narrow_bf16(values, array_at(place, values.size, np.uint16)))
    if kind == F16:
        return bool(narrow_f16(values, array_at(place, values.size, np.uint16)))
    return bool(copy_f32(values, array_at(place, values.size, np.float32)))


def table(rows: Sequence[Array], places: Sequence[FilePlace | None] = ()) -> Array:
    """The members as the native core reads them: (type, descriptor, position) of rows that have a
    place in a file, (type, MEMORY, address) of others. Whoever calls keeps the arrays alive."""
    lying = places or [None] * len(rows)
    return np.array(
        [
            (CODE[row.dtype], at.descriptor, at.position) if at else _in_memory(row)
            for row, at in zip(rows, lying, strict=True)
        ],
        np.int64,
    ).reshape(-1, 3)


def _in_memory(row: Array) -> tuple[int, int, int]:
    return CODE[row.dtype], MEMORY, address_of(row)


def is_finite(row: Array) -> bool:
    """Whether all values of a contiguous row, bfloat16 as uint16 bit patterns, are finite."""
    return _native.finite(CODE[row.dtype], row)


def load_rows(members: Array, reference: Array, rows: Array) -> bool:
    """Fill one row per member; minus the reference, if that table has a row. All finite?"""
    return _native.load_rows(members, reference, rows)
