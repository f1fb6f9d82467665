"""A scorer without a model: an item is right if the merge went far enough towards its expert."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from sigmerge.merge3.candidate import Weights
from sigmerge.merge3.extract import Question
from sigmerge.recipe.scored import SearchSection

TENSOR = "model.layers.1.mlp.up_proj.weight"
EACH = 30
SETTINGS = SearchSection(population=4, generations=3, items=6)


class StubScorer:
    """Item i of a domain asks for i/EACH of the way from the reference to the domain's expert.

    With `die_at`, the process is killed in that call.
    """

    name = "stub"

    @property
    def sigmerge_key(self) -> str:
        """What it counts is no part of what it answers."""
        return type(self).__qualname__

    def __init__(self, root: Path, domains: Sequence[str], die_at: int | None = None) -> None:
        self.reference = _values(root / "reference")
        self.towards = {d: _values(root / d) - self.reference for d in domains}
        self.die_at = die_at
        self.asked: list[list[str]] = []

    def questions(self) -> list[Question]:
        return [
            Question(f"{d}-{i:02}", d, d, "calibration") for d in self.towards for i in range(EACH)
        ]

    def __call__(self, weights: Weights, items: Sequence[Question]) -> list[int]:
        if len(self.asked) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.asked.append([item.id for item in items])
        moved = weights[TENSOR].ravel() - self.reference
        way = {d: float(moved @ t / (t @ t)) for d, t in self.towards.items()}
        return [int(way[i.domain] > int(i.id.rpartition("-")[2]) / EACH) for i in items]


def _values(folder: Path) -> np.ndarray[Any, Any]:
    """The tensor, without torch, which takes seconds to load."""
    files = [deserialize(file.read_bytes()) for file in folder.glob("*.safetensors")]
    [stored] = [held for file in files for name, held in file if name == TENSOR]
    if stored["dtype"] == "F32":
        return np.frombuffer(stored["data"], np.float32)
    assert stored["dtype"] == "BF16"
    return (np.frombuffer(stored["data"], np.uint16).astype(np.uint32) << 16).view(np.float32)
