"""Sums and marks of the parts of a chunk.

The order in which float64 numbers are added is part of a result: tile by tile within a part, then
part by part. The processor takes one part at a time. A device takes many at once, since Python
needs as long for a long launch as for a short one, and leaves the sums of each.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import numpy as np

from sigmerge.core import Array

REMEMBERED = 128 << 20
"""Bytes of marks at a time, of all tensors."""


class PartSums(NamedTuple):
    """What a kernel adds up in float64, for each part of a chunk on its own."""

    sums: Array
    """(parts, …)."""
    length: int
    """Coordinates of a part, in whole tiles."""
    begin: int = 0
    """Where in the chunk the first of the tiles lies that are added."""

    def add(self, tiles: Array, tile: int) -> None:
        """Add sums of tiles (tiles, …) in their order, each to the part in which it lies."""
        each, number = self.length // tile, self.begin // tile
        while len(tiles):
            part, before = divmod(number, each)
            some, tiles = np.split(tiles, [each - before])
            in_order = np.concatenate([self.sums[part : part + 1], some])
            self.sums[part] = np.add.accumulate(in_order)[-1]
            number += len(some)


class PartMarks(NamedTuple):
    """What a loop marks, for each part of a chunk on its own. A device marks nothing."""

    marks: Array
    """uint8 (strips, rows, bytes) of the whole chunk."""
    length: int
    """Strips of a part."""

    def of(self, part: int) -> Array:
        return self.marks[part * self.length : (part + 1) * self.length]


class _Room:
    """What is left of REMEMBERED."""

    def __init__(self) -> None:
        self._taken, self._lock = 0, threading.Lock()
        self._freed: list[int] = []
        """Python lets an array go at any time, also while the lock is held."""

    def takes(self, marks: Array) -> bool:
        """Whether there is room for marks, which is free when they are let go."""
        with self._lock:
            while self._freed:
                self._taken -= self._freed.pop()
            if self._taken + marks.nbytes > REMEMBERED:
                return False
            self._taken += marks.nbytes
        weakref.finalize(marks, self._freed.append, marks.nbytes).atexit = False
        return True


_ROOM = _Room()


def part_marks(strips: int, rows: int, width: int, length: int) -> PartMarks:
    """Zeros; of no rows where there is no room."""
    marks = np.zeros((strips, rows, width), np.uint8)
    if not _ROOM.takes(marks):
        marks = np.zeros((strips, 0, width), np.uint8)
    return PartMarks(marks, length)
