"""Where the values of a merge go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from sigmerge.core import Array


class Sink(Protocol):
    """Takes the values of a merge: an output folder, or the memory of a search."""

    done: dict[str, Any]

    def write(self, tensor: str, start: int, raw: Array) -> None: ...

    def write_bytes(self, tensor: str, data: memoryview) -> None: ...

    def finish(self, block: str, record: Any = None, tensors: Iterable[str] | None = None) -> None:
        """Mark a block as complete; `tensors` are its own, as others may be in progress."""
