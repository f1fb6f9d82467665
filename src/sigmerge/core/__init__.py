"""Calls of the native loops and the tables they read: `Formula`, `Cut`, `TileTable`, `Span`.

A file has the name of the family in native/ that it calls. Loops know open files, no paths. They
work on *tiles*: one-dimensional contiguous pieces of a tensor, float32 unless said otherwise. They
release the GIL, keep no state, and give the same bits on any number of threads.
"""

from typing import Any, Final, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
"""An array whose shape and type the docstring gives."""

TILE: Final = 1 << 16
"""Coordinates per tile. Fixed, so that every float64 sum over tiles has one order of addition."""
STRIP: Final = 512
"""Coordinates that a loop takes at a time: the first-level cache has those of all experts and of
what is made of them, while one step after another passes over them."""
SAMPLE_RUN: Final = 4096
"""Coordinates in a row that a sample takes: enough for a request to a file to be worth it."""
LANES: Final = 64
"""Partial sums of a float64 sum. Part of the definition of the result, like the tile size."""
