"""Right or wrong, item by item: what a search asks of a suite."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sigmerge.errors import ScoreError
from sigmerge.search.candidate import Weights
from sigmerge.search.extract import Item

SPLIT = "calibration"


class Scorer(Protocol):
    """Asks a model given by its weights. `name` says with what; a resumed search needs the same.

    It is called by several threads at a time, and answers the same whichever asks.
    """

    @property
    def name(self) -> str: ...

    def items(self) -> Sequence[Item]:
        """All labelled items there are for a search."""

    def __call__(self, weights: Weights, items: Sequence[Item]) -> list[int]:
        """1 where the model is right, else 0, in the items' order."""


class NanoScorer:
    """The calibration items of a nano pool, answered by greedy generation.

    `model` is a folder with the architecture and the tokenizer of the candidates; every thread
    loads it once and copies each candidate's weights into it.
    """

    def __init__(self, model: Path, pool: Path) -> None:
        self.model, self.pool = model, pool
        self._own, self._loading = threading.local(), threading.Lock()
        if not (pool / "splits" / SPLIT).is_dir():
            raise ScoreError(
                f"{pool}: no splits/{SPLIT} in it; a search needs the items of a nano pool."
            )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        from sigmerge.nano.facts import DOMAINS
        from sigmerge.nano.files import load_items

        return {f.id: f for domain in DOMAINS for f in load_items(SPLIT, domain, self.pool)}

    def _loaded(self) -> tuple[Any, Any]:
        """This thread's model; transformers cannot load two at a time."""
        from sigmerge.nano.suite import load

        if not hasattr(self._own, "loaded"):
            with self._loading:
                self._own.loaded = load(self.model)
        loaded: tuple[Any, Any] = self._own.loaded
        return loaded

    @property
    def name(self) -> str:
        told = repr(sorted((f.id, f.prompt, f.answer) for f in self._facts.values()))
        return f"nano {SPLIT} {hashlib.sha256(told.encode()).hexdigest()[:16]}"

    def items(self) -> list[Item]:
        return [Item(fact.id, fact.domain, SPLIT) for fact in self._facts.values()]

    def __call__(self, weights: Weights, items: Sequence[Item]) -> list[int]:
        from sigmerge.nano.suite import answer
        from sigmerge.probing.threads import one_torch_thread

        model, tokenizer = self._loaded()
        _load(model, weights)
        facts = [self._facts[item.id] for item in items]
        with one_torch_thread():
            outputs = answer(model, tokenizer, [fact.prompt for fact in facts])
        return [int(out == fact.answer) for out, fact in zip(outputs, facts, strict=True)]


def _load(model: Any, weights: Weights) -> None:
    """Copy weights into a model's parameters; every parameter must be given."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in weights:
                raise ScoreError(f"{type(model).__name__} has a tensor {name} that the pool lacks.")
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))
