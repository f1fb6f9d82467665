"""Evaluates a checkpoint on a suite; cached results are not scored again.

Items are scored in groups, in the split's order; a finished group is kept before the next one
starts, so a killed evaluation goes on where it stopped.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from sigmerge.checkpoints.declared import checkpoint_files, named, shown_folder
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.inputs import stays
from sigmerge.errors import ScoreError, SigmergeWarning
from sigmerge.evaluation import splits
from sigmerge.evaluation.aggregate import Summary, summarise
from sigmerge.evaluation.answers import KeptAnswers, Scored, settings_key
from sigmerge.evaluation.benchmark import HarnessScorer
from sigmerge.evaluation.estimate import estimate
from sigmerge.evaluation.how import How
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.evaluation.sources import Item
from sigmerge.evaluation.suite import BenchmarkSuite, nano_suite, suite_on
from sigmerge.files.documents import whole
from sigmerge.files.scratch import scratch
from sigmerge.files.sources import code_digest
from sigmerge.kept import Derivation, Inputs, given, look_at_parts, parts
from sigmerge.probing.generate import (
    ANSWERING,
    LoadedModel,
    Usage,
    load_model,
    require_backend,
    resolved,
)
from sigmerge.probing.memory import free_cached

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Result(Summary):
    """The scores of a checkpoint on a split of a suite, and what they cost.

    `absent` says, by benchmark, why records are not here. `items_sha256` identifies the items, and
    `settings_sha256` how the suite says that they are scored, and by what.
    """

    checkpoint: str
    suite: str
    split: str
    limit: int | None
    items_sha256: str
    settings_sha256: str
    absent: dict[str, str]
    reused_items: int
    usage_of_run: Usage
    usage_of_results: Usage
    sandbox: str | None

    def as_json(self) -> dict[str, Any]:
        """The content of a result file; it has no items."""
        return {name: value for name, value in asdict(self).items() if name != "item_scores"}

    def _repr_html_(self) -> str:
        from sigmerge.pages.notebook import tables
        from sigmerge.pages.table import Table, number_columns, percent

        scores = [(name, percent(q)) for name, q in [*self.domains.items(), ("macro", self.macro)]]
        metrics = [
            (name, f"{self.items[name]:,}", metric, percent(value))
            for name, found in self.benchmarks.items()
            for metric, value in found.items()
        ]
        notes = [f"{d}: without {', '.join(names)}" for d, names in self.missing.items()]
        return tables(
            Table(number_columns(f"{self.split} split of {self.suite}", "score"), scores),
            Table(number_columns("benchmark", "items", "metric", "score"), metrics),
            notes=[*notes, *self.absent.values()],
        )


def evaluate(
    checkpoint: Path,
    suite: BenchmarkSuite | str | Path,
    split: str = "calibration",
    how: How | None = None,
) -> Result:
    """Scores of a checkpoint on a split of a suite, and what they cost."""
    how = how or How()
    run, chosen, absent = prepared(checkpoint, suite, split, how)
    loaded = run.suite
    known = {name: run.known(name, items) for name, items in chosen.items()}
    missing = {n: [i for i in chosen[n] if i.id not in known[n]] for n in chosen}
    how.announce(estimate(loaded, chosen, missing, lambda: run.model))
    reused = sum(map(len, known.values()))
    usage = Usage()
    for name, items in chosen.items():
        known[name], cost = run.score(name, items)
        usage += cost
    results = {name: [known[name][item.id] for item in chosen[name]] for name in chosen}
    if how.answers is not None:
        _write_answers(how.answers, chosen, results)
    return Result(
        **vars(summarise(loaded, results)),
        checkpoint=str(checkpoint),
        suite=loaded.name,
        split=split,
        limit=how.limit,
        items_sha256=settings_key(
            {n: [(item.id, item.digest) for item in items] for n, items in chosen.items()}
        ),
        settings_sha256=settings_key({name: run.settings(name) for name in chosen}),
        absent=absent,
        reused_items=reused,
        usage_of_run=run.usage,
        usage_of_results=usage,
        sandbox=run.sandbox,
    )


def _write_answers(
    file: Path, chosen: Mapping[str, Sequence[Item]], results: Mapping[str, Sequence[Scored]]
) -> None:
    """One JSON object a line: the benchmark, the record, the model's output and its scores."""
    with whole(file) as partial, partial.open("w", encoding="utf-8") as lines:
        for name, items in chosen.items():
            for item, scored in zip(items, results[name], strict=True):
                row = {"benchmark": name, "item": item.id, "record": item.record, **asdict(scored)}
                lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def describe(
    checkpoint: Path, suite: BenchmarkSuite | str | Path, split: str, how: How
) -> dict[str, Any]:
    """What an evaluation would score: everything is checked, no model is loaded."""
    run, chosen, absent = prepared(checkpoint, suite, split, how)
    known = {name: run.known(name, items) for name, items in chosen.items()}
    missing = {n: [i for i in chosen[n] if i.id not in known[n]] for n in chosen}
    cost = estimate(run.suite, chosen, missing, None)
    return {
        "checkpoint": str(checkpoint),
        "suite": run.suite.name,
        "split": split,
        "items": {name: len(items) for name, items in chosen.items()},
        "items_to_score": cost["items_to_score"],
        "tokens_at_most": cost["tokens_at_most"],
        "absent": absent,
    }


def nano_scores(
    checkpoint: Path, split: str, pool: Path | None = None, how: How | None = None
) -> dict[str, float]:
    """Domain scores on a split of the embedded pool, or of another nano pool."""
    return evaluate(checkpoint, nano_suite(pool), split, how).domains


def prepared(
    checkpoint: Path, suite: BenchmarkSuite | str | Path, split: str, how: How
) -> tuple[Evaluation, dict[str, list[Item]], dict[str, str]]:
    """The checked evaluation, its items by benchmark, and why other benchmarks have none."""
    loaded = suite if isinstance(suite, BenchmarkSuite) else suite_on(suite, how.data)
    if split not in splits.SPLITS:
        raise ScoreError(f"{split!r} is no split; there are {', '.join(splits.SPLITS)}.")
    marks = loaded.benchmarks
    for name in how.only or marks:
        if name in marks:
            marks[name].check_settings(how)
    chosen, absent = _chosen(loaded, split, how)
    for name, items in chosen.items():
        marks[name].permit(name, items, how)
    return Evaluation(checkpoint, loaded, how), chosen, absent


def _chosen(
    suite: BenchmarkSuite, split: str, how: How
) -> tuple[dict[str, list[Item]], dict[str, str]]:
    """The items to score by benchmark, and why other benchmarks have none."""
    if unknown := [name for name in how.only if name not in suite.benchmarks]:
        known = ", ".join(suite.benchmarks)
        raise ScoreError(f"{unknown[0]!r} is no benchmark of {suite.name}; there are {known}.")
    everything, absent = splits.load_scored(suite, how)
    if how.splits:
        content = splits.read(how.splits)
        left_out = [name for name in everything if name not in content["benchmarks"]]
        absent |= {name: f"{name}: {how.splits} does not have it." for name in left_out}
        if problems := splits.verify(content, suite, how.data):
            raise ScoreError(f"{how.splits}: the splits do not hold:", problems)
    else:
        content = splits.build(suite, everything)
    chosen = {}
    for name, items in everything.items():
        if (not how.only or name in how.only) and name in content["benchmarks"]:
            chosen[name] = splits.members(content, name, split, items)[: how.limit]
    if not chosen:
        raise ScoreError("None of the wanted benchmarks has its records here:", [*absent.values()])
    if not any(chosen.values()):
        raise ScoreError(f"The {split} split has no item; it takes five records at least.")
    absent |= {n: f"{n}: its {split} split has no item." for n, each in chosen.items() if not each}
    if how.strict and (lacking := [n for n in how.only or suite.benchmarks if n in absent]):
        raise ScoreError(
            "Benchmarks of the suite cannot be scored, and --strict wants all of them:",
            [absent[name] for name in lacking],
        )
    return {name: items for name, items in chosen.items() if items}, absent


@dataclass
class Evaluation:
    """One checkpoint's evaluation; the model is loaded when the first item needs it."""

    checkpoint: Path
    suite: BenchmarkSuite
    how: How
    usage: Usage = field(default_factory=Usage)
    sandbox: str | None = None
    _shared: dict[str, Any] = field(default_factory=dict, repr=False)
    _places: ExitStack = field(default_factory=ExitStack, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, self._places.close)

    @property
    def suite_folder(self) -> Path:
        return self.suite.folder

    @cached_property
    def opened(self) -> Checkpoint:
        return open_checkpoint(self.checkpoint, allow_pickle=self.how.allow_pickle)

    @cached_property
    def _inputs(self) -> Inputs:
        _ = self._unchanged
        return Inputs.of(checkpoint=checkpoint_files(self.opened))

    @cached_property
    def _unchanged(self) -> Callable[[], None]:
        """A check that raises if weights, configuration or tokenizer have changed."""
        return stays([self.opened])

    @cached_property
    def shown(self) -> Path:
        return self.show(self.opened)

    def show(self, checkpoint: Checkpoint) -> Path:
        """A folder of links to the declared files of a checkpoint, and nothing else."""
        inputs = Inputs.of(checkpoint=checkpoint_files(checkpoint))
        return shown_folder(self._places.enter_context(given(inputs)), "checkpoint", checkpoint)

    @cached_property
    def model(self) -> LoadedModel:
        how = self.how
        with named(self.shown, self.opened):
            return load_model(
                self.shown,
                how.backend,
                self.dtype,
                how.batch_size,
                self.gpu_share,
                how.trust_remote_code,
            )

    def require_model(self, chosen: Mapping[str, Sequence[Item]]) -> None:
        """Raise MissingExtra where a model must answer and its libraries are not installed."""
        marks = self.suite.benchmarks
        if any(marks[name].cost(items[0]) is not None for name, items in chosen.items()):
            require_backend(self.how.backend)

    @property
    def dtype(self) -> str:
        """Type of the weights in memory: the given one, or the one that a harness needs."""
        needed = {mark.weights for mark in self.suite.benchmarks.values()} - {"auto"}
        return min(needed) if needed and self.how.dtype == "auto" else self.how.dtype

    @property
    def gpu_share(self) -> float:
        """Share of a GPU's memory for each model; a judge model takes half."""
        return 0.9 if self.how.judge in (None, "keyword") else 0.45

    def once(self, name: str, make: Callable[[], _T]) -> _T:
        """A value that benchmarks share, made when it is first needed."""
        if name not in self._shared:
            self._shared[name] = make()
        made: _T = self._shared[name]
        return made

    def settings(self, name: str) -> dict[str, Any]:
        """How a benchmark is scored: its section of the suite, and what answers."""
        mark = self.suite.benchmarks[name]
        return {
            "name": name,
            **mark.model_dump(mode="json", exclude=set(mark.sources)),
            "backend": self.how.backend,
            "dtype": self.dtype,
        }

    def scored_by(self, name: str) -> ScoredBy:
        """All that decides a benchmark's results besides checkpoint and items; reads no weights."""
        mark, how = self.suite.benchmarks[name], self.how
        own = mark.scored_by(name, self.suite.folder, how)
        self.sandbox = own.settings.get("sandbox", self.sandbox)
        answered: dict[str, Any] = {"backend": "none", "dtype": "none"}
        libraries: tuple[str, ...] = ()
        if mark.answers:
            answered = {
                "backend": how.backend,
                "trust_remote_code": how.trust_remote_code,
                **resolved(how.backend, self.dtype),
            }
            libraries = ANSWERING[how.backend]
        settings = {**self.settings(name), **answered, **own.settings}
        return ScoredBy(settings, own.files, (*libraries, *own.libraries))

    def scored_by_all(self, chosen: Mapping[str, Iterable[Item]]) -> ScoredBy:
        """All that decides the results on these items besides the checkpoint."""
        each = {name: self.scored_by(name) for name in chosen}
        settings = {
            name: {
                **by.settings,
                "domain": self.suite.domain_of(name),
                "items": settings_key([(item.id, item.digest) for item in chosen[name]]),
                "code": code_digest(self.suite.benchmarks[name].scorer),
            }
            for name, by in each.items()
        }
        return ScoredBy(
            {"benchmarks": settings, "batch_size": self.how.batch_size},
            {
                f"{name}/{role}": file
                for name, by in each.items()
                for role, file in by.files.items()
            },
            tuple(dict.fromkeys(library for by in each.values() for library in by.libraries)),
        )

    def scored_as(self, name: str) -> str:
        """A digest of all that `scored_by` returns, with the harness's code."""
        return self._derivation(name, Inputs({})).full

    def derivation(self, name: str) -> Derivation:
        """A benchmark's results on the checkpoint."""
        return self._derivation(name, self._inputs)

    def _derivation(self, name: str, checkpoint: Inputs) -> Derivation:
        by = self.scored_by(name)
        return Derivation(
            "answer",
            self.suite.benchmarks[name].scorer,
            checkpoint | Inputs.of(scored_by=by.files),
            by.settings,
            by.libraries,
            of=f"{name} of {self.checkpoint}",
            volatile=("scored_by/",),
        )

    def known(self, name: str, items: Sequence[Item]) -> dict[str, Scored]:
        """The cached results."""
        return KeptAnswers(look_at_parts(self.derivation(name))).read(items)

    def score(self, name: str, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        """All results with their cost, cached or not; scores the missing ones.

        Groups are scored in order, and each is cached before the next begins.
        """
        wanted, unkept = self.derivation(name), Usage()
        with ExitStack() as making:
            kept = KeptAnswers(look_at_parts(wanted))
            results = kept.read(items)
            if len(results) < len(items):  # another process may be scoring them
                kept = KeptAnswers(making.enter_context(parts(wanted)))
                results = kept.read(items)
            self.how.progress(name, len(results), len(items))
            missing = [item for item in items if item.id not in results]
            if missing:
                same, groups, proven = self._stays(name), 0, True
                for scored, usage in self._scored(name, items, missing):
                    groups += 1
                    if groups == 1:
                        proven = wanted.prove()
                    results |= {item.id: found for item, found in scored}
                    self.usage += usage
                    if same() and proven:
                        kept.write(scored, usage)
                    else:
                        unkept += usage
                    self.how.progress(name, len(results), len(items))
                if groups > 1 and not self.suite.benchmarks[name].answers:
                    wanted.prove()  # a program reads the checkpoint for every group
            if lost := [item.id for item in items if item.id not in results]:
                raise ScoreError(f"{name}: no score came back for {', '.join(sorted(lost)[:3])}.")
            return results, kept.usage(items) + unkept

    def _scored(
        self, name: str, items: Sequence[Item], missing: Sequence[Item]
    ) -> Iterator[tuple[list[tuple[Item, Scored]], Usage]]:
        """Score the missing items group by group; yields results and cost."""
        left = {item.id for item in missing}
        size = self.suite.benchmarks[name].group or len(items)
        with scratch() as folder:
            scorer = self.scorer(name, missing, folder)
            for start in range(0, len(items), size):
                if todo := [item for item in items[start : start + size] if item.id in left]:
                    scored, usage = scorer.score(todo)
                    yield [(item, scored[item.id]) for item in todo if item.id in scored], usage
        free_cached()  # the next benchmark, or another process, needs other pieces

    def _stays(self, name: str) -> Callable[[], bool]:
        """Whether what scores a benchmark is still what it is now; says once that it is not.

        A checkpoint that changes stops the evaluation; a file that a command writes does not.
        """
        before, said = self.scored_as(name), False

        def same() -> bool:
            nonlocal said
            self._unchanged()
            if not said and self.scored_as(name) != before:
                said = True
                warnings.warn(
                    f"{name}: a program or file that scores it changed. "
                    "Its scores are not remembered.", SigmergeWarning, stacklevel=2,
                )  # fmt: skip
            return not said

        return same

    def scorer(self, name: str, items: Sequence[Item], folder: Path) -> HarnessScorer:
        return self.suite.benchmarks[name].scorer(name, self, items, folder)
