"""The hot loops: exact selection, claiming, merging, conversion. Nothing here knows a file.

Kernels work on *tiles*: one-dimensional contiguous pieces of a tensor, float32 unless said
otherwise. They release the GIL, keep no state, and give the same bits on any number of threads.
"""

from typing import Final

TILE: Final = 1 << 16
"""Coordinates per tile. Fixed, so that every float64 sum over tiles has one order of addition."""
