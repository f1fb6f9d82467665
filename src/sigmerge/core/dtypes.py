"""Stored values as the native core reads them: in an open file, or in memory.

A row of a table of members is (type, descriptor, position), or (type, MEMORY, address). Whoever
makes a table keeps its spans while a loop runs, and they keep what is read. bfloat16 is its uint16
bit pattern, since NumPy has no such type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from sigmerge import _native
from sigmerge.core import Array

BF16: Final = 0
F16: Final = 1
F32: Final = 2
STORAGE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
"""Safetensors dtype name -> the NumPy type its bytes are viewed as; in the order of their codes."""
CODE: Final[dict[np.dtype[Any], int]] = {kind: code for code, kind in enumerate(STORAGE.values())}
"""The type that stored bytes are viewed as -> its code."""
WIDEN: dict[str, Callable[[Array, Array], bool]] = {
    name: functools.partial(_native.widen, code) for code, name in enumerate(STORAGE)
}
"""(stored values, float32 values to fill) -> True if every value is finite."""
NARROW: dict[str, Callable[[Array, Array], bool]] = {
    name: functools.partial(_native.narrow, code) for code, name in enumerate(STORAGE)
}
"""(float32 values, stored values to fill) -> True if every stored value is finite."""
MEMORY: Final = -1
"""Stands for a descriptor where values lie in memory."""


class FilePlace(NamedTuple):
    """Where a row of values lies in an open file, and the bytes of one of them."""

    descriptor: int
    position: int
    width: int


def address_of(values: Array) -> int:
    if not values.flags.c_contiguous:
        raise ValueError("a kernel reads contiguous values only")
    return int(values.__array_interface__["data"][0])


@dataclass(frozen=True, slots=True)
class Span:
    """Values of one type that lie one behind the other, in an open file or in memory.

    `owner` is that file, which is open as long as there is a span, or the flat array.
    """

    dtype: np.dtype[Any]
    size: int
    descriptor: int
    position: int
    owner: Any

    @classmethod
    def of(cls, values: Array) -> Span:
        """Values in memory."""
        return cls(values.dtype, values.size, MEMORY, address_of(values), values)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def part(self, first: int, stop: int) -> Span:
        """The values [first, stop)."""
        position = self.position + first * self.dtype.itemsize
        return replace(self, size=min(stop, self.size) - first, position=position)

    def array(self) -> Array:
        """The values: read from the file, or where they are in memory."""
        if self.descriptor == MEMORY:
            first = (self.position - address_of(self.owner)) // self.dtype.itemsize
            return np.asarray(self.owner[first : first + self.size])
        values = np.empty(self.size, self.dtype)
        _native.read(self.descriptor, self.position, values)
        return values


def table(rows: Sequence[Span | Array]) -> Array:
    """The members of a loop."""
    given = [row if isinstance(row, Span) else Span.of(row) for row in rows]
    lying = [(CODE[row.dtype], row.descriptor, row.position) for row in given]
    return np.array(lying, np.int64).reshape(-1, 3)


def is_finite(row: Array) -> bool:
    """Whether all values of a contiguous row, bfloat16 as uint16 bit patterns, are finite."""
    return _native.finite(CODE[row.dtype], row)


def load_rows(members: Array, reference: Array, rows: Array) -> bool:
    """Fill one row per member; minus the reference, if that table has a row. All finite?"""
    return _native.load_rows(members, reference, rows)
