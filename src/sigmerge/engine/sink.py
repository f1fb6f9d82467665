"""Where the values of a merge go, and how float32 values become stored ones."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sigmerge.errors import OutputError
from sigmerge.kernels.convert import NARROW

Array = np.ndarray[Any, Any]


class Sink(Protocol):
    """Takes the values of a merge: an output folder, or the memory of a search."""

    done: dict[str, Any]

    def write(self, tensor: str, start: int, raw: Array) -> None: ...

    def write_bytes(self, tensor: str, data: memoryview) -> None: ...

    def finish(self, block: str, record: Any = None) -> None: ...


def store(
    sink: Sink,
    tensor: str,
    start: int,
    values: Array,
    raw: Array,
    dtype: str,
    lenient: bool = False,
) -> None:
    """Round float32 values once to the stored type and write them; overflow is an error.

    `lenient` admits values that were not finite before they were rounded.
    """
    if not NARROW[dtype](values, raw):
        if lenient and dtype == "BF16":
            raw[np.isnan(values)] = 0x7FC0  # rounding turns some NaN patterns into infinity
        wrong = _overflows(raw, dtype) & (np.isfinite(values) if lenient else True)
        if wrong.any():
            raise OutputError(
                f"{tensor}: the result at flat index {start + int(np.flatnonzero(wrong)[0])} is "
                f"not finite in {dtype}. The weights add up too large: lower them, or write a "
                "wider dtype."
            )
    sink.write(tensor, start, raw)


def _overflows(raw: Array, dtype: str) -> Array:
    if dtype == "BF16":
        return np.asarray((raw & 0x7F80) == 0x7F80)
    return ~np.isfinite(raw)
