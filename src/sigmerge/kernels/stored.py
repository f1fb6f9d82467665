"""Stored values as the native core reads them: in an open file, or in memory.

A row of a table of members is (type, descriptor, position), or (type, MEMORY, address). Whoever
makes a table keeps its arrays alive, and its files open, while a loop runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from sigmerge import _native
from sigmerge.kernels import Array

BF16: Final = 0
F16: Final = 1
F32: Final = 2
CODE: Final[dict[np.dtype[Any], int]] = {
    np.dtype("<u2"): BF16,
    np.dtype("<f2"): F16,
    np.dtype("<f4"): F32,
}
"""The type that stored bytes are viewed as -> its code."""
MEMORY: Final = -1
"""Stands for a descriptor where values lie in memory."""


class FilePlace(NamedTuple):
    """Where a row of values lies in an open file, and the bytes of one of them."""

    descriptor: int
    position: int
    width: int


def address_of(row: Array) -> int:
    if not row.flags.c_contiguous:
        raise ValueError("a kernel reads contiguous values only")
    return int(row.__array_interface__["data"][0])


def table(rows: Sequence[Array], places: Sequence[FilePlace | None] = ()) -> Array:
    """The members of a loop: rows that have a place in a file are read there."""
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
