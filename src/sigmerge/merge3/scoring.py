"""Right or wrong, item by item: what a search asks of a suite.

Candidates are not stored: every thread has one model loaded, and copies their weights into it.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sigmerge.errors import ScoreError
from sigmerge.merge3.candidate import Weights
from sigmerge.merge3.extract import Item

if TYPE_CHECKING:
    from sigmerge.evaluation.run import How
    from sigmerge.evaluation.sources import Item as Record
    from sigmerge.evaluation.suite import Benchmark, Suite

SPLIT = "calibration"
BATCH = 8
"""Prompts at a time; fixed, since what a prompt is padded to can decide a close answer."""


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


class PerThread:
    """What every thread has of its own; made by one at a time, since transformers needs that."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._own, self._making = make, threading.local(), threading.Lock()

    def __call__(self) -> Any:
        if not hasattr(self._own, "made"):
            with self._making:
                self._own.made = self._make()
        return self._own.made


class NanoScorer:
    """The calibration items of a nano pool, answered by greedy generation.

    `model` is a folder with the architecture and the tokenizer of the candidates.
    """

    def __init__(self, model: Path, pool: Path) -> None:
        self.pool = pool
        self._loaded = PerThread(lambda: _nano_model(model))
        if not (pool / "splits" / SPLIT).is_dir():
            raise ScoreError(
                f"{pool}: no splits/{SPLIT} in it; a search needs the items of a nano pool."
            )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        from sigmerge.nano.facts import DOMAINS
        from sigmerge.nano.files import load_items

        return {f.id: f for domain in DOMAINS for f in load_items(SPLIT, domain, self.pool)}

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


def _nano_model(folder: Path) -> Any:
    from sigmerge.nano.suite import load

    return load(folder)


class SuiteScorer:
    """The calibration items of a suite, through its own harnesses.

    An item is right if the metric that counts for its benchmark is at least one half.
    """

    def __init__(self, model: Path, suite: Suite, how: How) -> None:
        from sigmerge.evaluation import splits
        from sigmerge.evaluation.sandbox import require_permission
        from sigmerge.evaluation.suite import Code, Command

        self.model, self.suite = model, suite
        self.how = replace(how, batch_size=how.batch_size or BATCH)
        records, _ = splits.load_available(suite, how.data)
        content = splits.build(suite, records)
        self._records: dict[str, dict[str, Record]] = {}
        for name, every in records.items():
            chosen = set(content["benchmarks"][name][SPLIT])
            self._records[name] = {r.id: r for r in every if r.id in chosen}
            if isinstance(suite.benchmarks[name], Command):
                raise ScoreError(
                    f"{name}: is scored by a command, which reads a folder, and a search stores no "
                    "candidate. Give it another harness, or a suite without it."
                )
            if isinstance(suite.benchmarks[name], Code):
                require_permission(how.allow_code)
        self._asked = PerThread(lambda: _Asked(model, suite, self.how))
        self._harness = threading.Lock()

    @property
    def name(self) -> str:
        from sigmerge.evaluation.run import Evaluation

        evaluation = Evaluation(self.model, self.suite, self.how)
        told: list[Any] = [self.how.batch_size]
        told += [evaluation.key(name).settings for name in self._records]
        told += [(n, i, r.digest) for n, each in self._records.items() for i, r in each.items()]
        return f"{self.suite.name} {hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"

    def items(self) -> list[Item]:
        return [
            Item(f"{name}/{record}", self.suite.domain_of(name), SPLIT)
            for name, records in self._records.items()
            for record in records
        ]

    def __call__(self, weights: Weights, items: Sequence[Item]) -> list[int]:
        from sigmerge.evaluation.suite import LmEval
        from sigmerge.probing.threads import one_torch_thread

        asked: _Asked = self._asked()
        asked.load(weights)
        wanted: dict[str, list[Record]] = {}
        for item in items:
            name, _, record = item.id.partition("/")
            wanted.setdefault(name, []).append(self._records[name][record])
        right: dict[str, int] = {}
        for name, records in wanted.items():
            mark = self.suite.benchmarks[name]
            # lm-evaluation-harness has state that threads would share.
            alone = self._harness if isinstance(mark, LmEval) else nullcontext()
            with alone, one_torch_thread():
                scored, _ = asked.scorer(name, records).score(records)
            right |= {f"{name}/{i}": _right(mark, result.scores) for i, result in scored.items()}
        return [right[item.id] for item in items]


class _Asked:
    """One thread's model, and the harnesses that ask it."""

    def __init__(self, model: Path, suite: Suite, how: How) -> None:
        from sigmerge.evaluation.run import Evaluation

        self.evaluation = Evaluation(model, suite, how)
        self.folder = tempfile.TemporaryDirectory(prefix="sigmerge-")
        self.scorers: dict[str, Any] = {}

    def load(self, weights: Weights) -> None:
        model = self.evaluation.model
        if not hasattr(model, "model"):
            raise ScoreError("A search copies weights into a model of transformers; use hf.")
        _load(model.model, weights)

    def scorer(self, name: str, records: Sequence[Record]) -> Any:
        if name not in self.scorers:
            place = Path(self.folder.name) / name
            place.mkdir()
            self.scorers[name] = self.evaluation.scorer(name, records, place)
        return self.scorers[name]


def _right(mark: Benchmark, scores: Any) -> int:
    metric = mark.metrics[mark.score]
    value = scores[metric.key]
    mean = fmean(value) if isinstance(value, list) else float(value)
    return int((1 - mean if metric.better == "lower" else mean) >= 0.5)


def _load(model: Any, weights: Weights) -> None:
    """Copy weights into a model's parameters; every parameter must be given."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in weights:
                raise ScoreError(f"{type(model).__name__} has a tensor {name} that the pool lacks.")
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))
