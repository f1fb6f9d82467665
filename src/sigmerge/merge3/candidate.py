"""Weights of candidates in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.source import FormedValues
from sigmerge.checkpoints.writer import Layout
from sigmerge.core.dtypes import STORAGE, WIDEN

Weights = Mapping[str, np.ndarray[Any, Any]]
"""Floating tensors by name, float32, holding exactly what the stored type can."""


class Memory:
    """A sink for `merge_blocks` that keeps the merge, as it would read when stored and loaded."""

    def __init__(self, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.done: dict[str, Any] = {}
        self._dtypes = {n: slot.dtype for n, slot in layout.slots.items() if slot.dtype in WIDEN}
        self.weights = {name: np.empty(shapes[name], np.float32) for name in self._dtypes}

    def write(self, tensor: str, start: int, raw: np.ndarray[Any, Any]) -> None:
        flat = self.weights[tensor].reshape(-1)
        WIDEN[self._dtypes[tensor]](raw, flat[start : start + raw.size])

    def write_bytes(self, tensor: str, data: memoryview) -> None:
        if tensor in self.weights:
            self.write(tensor, 0, np.frombuffer(data, STORAGE[self._dtypes[tensor]]))

    def finish(self, block: str, record: Any = None, tensors: Iterable[str] | None = None) -> None:
        self.done[block] = record


def stored_weights(checkpoint: Checkpoint) -> Weights:
    """The floating tensors of a checkpoint."""
    values = FormedValues(Reader())
    weights = {}
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype in WIDEN:
            weights[name] = np.empty(tensor.shape, np.float32)
            values.fill(tensor, 0, weights[name].reshape(-1))
    return weights
