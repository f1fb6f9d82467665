"""Item by item: how a search or a tuning scores candidates on a suite.

Candidates are not stored: every thread has one model loaded, and copies their weights into it. On a
GPU all threads share one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sigmerge.checkpoints.declared import files_around
from sigmerge.checkpoints.folder import is_head
from sigmerge.errors import ScoreError
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.files.scratch import scratch
from sigmerge.merge3.candidate import Weights
from sigmerge.merge3.extract import Question

if TYPE_CHECKING:
    from sigmerge.evaluation.benchmark import Benchmark, HarnessScorer
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.sources import Item
    from sigmerge.evaluation.suite import BenchmarkSuite

SPLIT = "calibration"
DEFAULT_BATCH = 8
"""Prompts at a time; fixed, since what a prompt is padded to can decide a close answer."""


class CandidateScorer(Protocol):
    """Scores a model given by its weights; `name` is for people.

    Several threads call it at a time; the answers do not depend on the thread. They are kept by its
    `by`, a `ScoredBy`, or, without one, as those of any callable: by its `sigmerge_key`, or by
    its code and what it closes over.
    """

    @property
    def name(self) -> str: ...

    def questions(self) -> Sequence[Question]:
        """All labelled items there are for a search."""

    def __call__(self, weights: Weights, questions: Sequence[Question]) -> list[float]:
        """What the answers are worth, 0 to 1, in the questions' order."""


class PerThread:
    """What every thread has of its own; made by one at a time, since transformers needs that.

    With `shared`, there is one, which a thread has to itself while it is lent.
    """

    def __init__(self, make: Callable[[], Any], shared: Callable[[], bool] = bool) -> None:
        self._make, self._shared = make, shared
        self._own, self._only, self._making = threading.local(), SimpleNamespace(), threading.Lock()

    @contextmanager
    def lent(self) -> Iterator[Any]:
        shared = self._shared()
        place: Any = self._only if shared else self._own
        with ExitStack() as made:
            made.enter_context(self._making)
            if not hasattr(place, "made"):
                place.made = self._make()
            if not shared:
                made.close()
            yield place.made


class SuiteScorer:
    """The items of a suite's split, through its harnesses; a search reads calibration items only.

    An item is worth the metric that counts for its benchmark, or one minus it where less is better.
    """

    def __init__(self, model: Path, suite: BenchmarkSuite, how: How, split: str = SPLIT) -> None:
        from sigmerge.evaluation import splits
        from sigmerge.probing.generate import require_backend

        require_backend(how.backend)
        self.model, self.suite, self.split = model, suite, split
        self.how = replace(how, batch_size=how.batch_size or DEFAULT_BATCH)
        records, self.absent = splits.load_scored(suite, how)
        if how.strict and self.absent:
            raise ScoreError(
                "Benchmarks of the suite cannot be scored, and strict wants all of them:",
                [*self.absent.values()],
            )
        content = splits.build(suite, records)
        self.records: dict[str, dict[str, Item]] = {}
        for name, every in records.items():
            chosen = set(content["benchmarks"][name][split])
            self.records[name] = {r.id: r for r in every if r.id in chosen}
            if not suite.benchmarks[name].in_memory:
                raise ScoreError(
                    f"{name}: is scored by a command, which reads a folder, and a search stores no "
                    "candidate. Give it another harness, or a suite without it."
                )
            suite.benchmarks[name].permit(name, list(self.records[name].values()), how)
        self._start()

    def _start(self) -> None:
        make = partial(_Asked, self.model, self.suite, self.how)
        self._asked, self._one = PerThread(make, _on_gpu), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Another process loads models of its own."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_asked", "_one")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def name(self) -> str:
        return self.suite.name

    @cached_property
    def by(self) -> ScoredBy:
        """What decides the answers besides a candidate's weights: the model that they go into."""
        from sigmerge.evaluation.run import Evaluation

        items = {name: each.values() for name, each in self.records.items()}
        by = Evaluation(self.model, self.suite, self.how).scored_by_all(items)
        model = {f"model/{name}": file for name, file in files_around(self.model).items()}
        return replace(by, files={**by.files, **model})

    def questions(self) -> list[Question]:
        return [
            Question(f"{name}/{record}", name, self.suite.domain_of(name), self.split)
            for name, records in self.records.items()
            for record in records
        ]

    def __call__(self, weights: Weights, questions: Sequence[Question]) -> list[float]:
        from sigmerge.probing.memory import free_cached, in_memory

        with self._asked.lent() as asked:
            try:
                with in_memory(f"{self.model}: a candidate"):
                    asked.load(weights)
                    return self._answers(asked, questions)
            finally:
                free_cached()

    def _answers(self, asked: _Asked, questions: Sequence[Question]) -> list[float]:
        from sigmerge.probing.threads import one_torch_thread

        wanted: dict[str, list[Item]] = {}
        for question in questions:
            record = question.id.removeprefix(f"{question.benchmark}/")
            wanted.setdefault(question.benchmark, []).append(
                self.records[question.benchmark][record]
            )
        worth: dict[str, float] = {}
        for name, items in wanted.items():
            mark = self.suite.benchmarks[name]
            with self._one if mark.shares_state else nullcontext(), one_torch_thread():
                scored, _ = asked.scorer(name, items).score(items)
            worth |= {f"{name}/{i}": _worth(mark, result.scores) for i, result in scored.items()}
        return [worth[question.id] for question in questions]


def _on_gpu() -> bool:
    from sigmerge.probing.generate import model_device

    return model_device() == "cuda"


class _Asked:
    """One thread's model, and the harnesses that score it."""

    def __init__(self, model: Path, suite: BenchmarkSuite, how: How) -> None:
        from sigmerge.evaluation.run import Evaluation

        self.evaluation = Evaluation(model, suite, how)
        self.model = self.evaluation.model
        kept = ExitStack()
        self.folder = kept.enter_context(scratch())
        weakref.finalize(self, kept.close)
        self.scorers: dict[str, HarnessScorer] = {}

    def load(self, weights: Weights) -> None:
        if not hasattr(self.model, "model"):
            raise ScoreError("A search copies weights into a model of transformers; use hf.")
        _load(self.model.model, weights)

    def scorer(self, name: str, items: Sequence[Item]) -> HarnessScorer:
        if name not in self.scorers:
            place = self.folder / name
            place.mkdir()
            self.scorers[name] = self.evaluation.scorer(name, items, place)
        return self.scorers[name]


def _worth(mark: Benchmark, scores: Any) -> float:
    metric = mark.metrics[mark.score]
    value = scores[metric.key]
    mean = fmean(value) if isinstance(value, list) else float(value)
    return 1 - mean if metric.better == "lower" else mean


def _load(model: Any, weights: Weights) -> None:
    """Copy weights into a model's parameters; every parameter must be given."""
    import torch

    from sigmerge.probing.loading import set_head

    own = any(map(is_head, weights))
    if own or any(is_head(name) for name, _ in model.named_parameters()):
        set_head(model, own)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in weights:
                raise ScoreError(f"{type(model).__name__} has a tensor {name} that the pool lacks.")
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))
