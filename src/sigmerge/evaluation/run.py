"""Evaluating a checkpoint on a suite: what is already in the store is not scored again.

Items are scored in groups, in the split's order; a finished group is in the store before the next
one starts, so a killed evaluation goes on where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from sigmerge.errors import ScoreError
from sigmerge.evaluation import splits
from sigmerge.evaluation.aggregate import summarise
from sigmerge.evaluation.estimate import estimate
from sigmerge.evaluation.sandbox import best_mode, require_permission
from sigmerge.evaluation.sources import Data, Item, check_records
from sigmerge.evaluation.store import (
    Key,
    Scored,
    Store,
    checkpoint_key,
    command_words,
    named_files,
    settings_key,
)
from sigmerge.evaluation.suite import (
    Code,
    Command,
    Jsonl,
    LmEval,
    Nano,
    Safety,
    Suite,
    load_suite,
)
from sigmerge.files.cache import cache_folder
from sigmerge.files.digests import sha256
from sigmerge.probing.generate import BACKENDS, HfModel, Model, Usage, load_model

DTYPES = ("auto", "float32", "bfloat16", "float16")
GROUP = 16
"""Items that are scored together; a problem of ten programs is a group of its own."""


class Scorer(Protocol):
    """The one interface of all harnesses: items in, a result for each and the cost out."""

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        """Results by item id."""


@dataclass(frozen=True)
class How:
    """With what an evaluation is done. `progress` hears (benchmark, items done, items in all)."""

    data: Data = field(default_factory=Data.default)
    splits: Path | None = None
    store: Path | None = None
    limit: int | None = None
    only: tuple[str, ...] = ()
    backend: str = "hf"
    dtype: str = "auto"
    batch_size: int | None = None
    judge: str = "keyword"
    allow_code: bool = False
    trust_remote_code: bool = False
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    announce: Callable[[Mapping[str, Any]], None] = lambda estimate: None

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("batch_size", self.batch_size)):
            if value is not None and (type(value) is not int or value < 1):
                raise ScoreError(f"{name}: {value!r} is no count; give 1 or more, or leave it out.")
        for name, word, known in (
            ("dtype", self.dtype, DTYPES),
            ("backend", self.backend, BACKENDS),
        ):
            if word not in known:
                raise ScoreError(f"{name}: {word!r} is not known; there are {', '.join(known)}.")


def evaluate(
    checkpoint: Path, suite: Suite | str | Path, split: str = "calibration", how: How | None = None
) -> dict[str, Any]:
    """Scores of a checkpoint on a split of a suite, and what they cost."""
    how = how or How()
    loaded = suite if isinstance(suite, Suite) else load_suite(suite)
    if split not in splits.SPLITS:
        raise ScoreError(f"{split!r} is no split; there are {', '.join(splits.SPLITS)}.")
    run, marks = Evaluation(checkpoint, loaded, how), loaded.benchmarks
    if any(isinstance(marks[name], Safety) for name in how.only or marks if name in marks):
        _ = run.judge_key  # a wrong judge is told before anything is read
    chosen, absent = _chosen(loaded, split, how)
    for name in chosen:
        if isinstance(marks[name], Code):
            require_permission(how.allow_code)
            check_records(name, marks[name], chosen[name])
    keys = {name: run.key(name) for name in chosen}
    with Store(how.store or cache_folder("evaluation") / "results.sqlite") as store:
        wanted = {n: [(item.id, item.digest) for item in items] for n, items in chosen.items()}
        known = {name: store.read(keys[name], wanted[name]) for name in chosen}
        open_items = {n: [i for i in chosen[n] if i.id not in known[n]] for n in chosen}
        how.announce(estimate(loaded, chosen, open_items, lambda: run.model))
        reused = sum(map(len, known.values()))
        for name in chosen:
            known[name] |= run.score(name, chosen[name], open_items[name], keys[name], store)
        usage = sum((store.usage(keys[n], wanted[n]) for n in chosen), Usage())
    results = {name: [known[name][item.id] for item in chosen[name]] for name in chosen}
    return {
        "checkpoint": str(checkpoint),
        "suite": loaded.name,
        "split": split,
        "limit": how.limit,
        **summarise(loaded, results),
        "items_sha256": settings_key(wanted),
        "absent": absent,
        "reused_items": reused,
        "usage_of_run": asdict(run.usage),
        "usage_of_results": asdict(usage),
        "sandbox": run.sandbox,
    }


def _chosen(suite: Suite, split: str, how: How) -> tuple[dict[str, list[Item]], dict[str, str]]:
    """The items to score by benchmark, and the benchmarks whose records are not here."""
    if unknown := [name for name in how.only if name not in suite.benchmarks]:
        known = ", ".join(suite.benchmarks)
        raise ScoreError(f"{unknown[0]!r} is no benchmark of {suite.name}; there are {known}.")
    everything, absent = splits.load_available(suite, how.data)
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
    return {name: items for name, items in chosen.items() if items}, absent


@dataclass
class Evaluation:
    """One checkpoint's evaluation; the model is loaded when the first item needs it."""

    checkpoint: Path
    suite: Suite
    how: How
    usage: Usage = field(default_factory=Usage)
    sandbox: str | None = None

    @cached_property
    def content(self) -> str:
        return checkpoint_key(self.checkpoint)

    @cached_property
    def model(self) -> Model:
        how = self.how
        return load_model(
            self.checkpoint,
            how.backend,
            self.dtype,
            how.batch_size,
            self.share,
            how.trust_remote_code,
        )

    @property
    def dtype(self) -> str:
        """Of the weights in memory; the embedded pool's suite is defined in float32."""
        nano = any(isinstance(mark, Nano) for mark in self.suite.benchmarks.values())
        return "float32" if nano and self.how.dtype == "auto" else self.how.dtype

    @cached_property
    def judge(self) -> Any:
        from sigmerge.evaluation.safety import load_judge

        return load_judge(self.how.judge, self.how.backend, self.share)

    @cached_property
    def judge_key(self) -> str:
        from sigmerge.evaluation.safety import judge_key

        return judge_key(self.how.judge)

    @property
    def share(self) -> float:
        """Of a GPU's memory for each model: a judge that is one needs half."""
        return 0.9 if self.how.judge == "keyword" else 0.45

    def key(self, name: str) -> Key:
        """What a result depends on: settings, backend, and the judge, program or harness."""
        mark = self.suite.benchmarks[name]
        apart = {"files", "hub", "records", "languages", "keep", "present"}
        settings: dict[str, Any] = {"name": name, **mark.model_dump(mode="json", exclude=apart)}
        settings |= {"backend": self.how.backend, "dtype": self.dtype}
        if isinstance(mark, Safety):
            settings["judge"] = self.judge_key
        if isinstance(mark, Command):
            settings["folder"] = str(self.suite.folder)
            settings["program"] = named_files(mark.command, self.suite.folder, f"{name}.command")
        if isinstance(mark, Code):
            settings["sandbox"] = self.sandbox = best_mode()
            settings["evalplus"] = _version("evalplus")
        if isinstance(mark, LmEval):
            from sigmerge.evaluation.harness import harness_version

            settings["lm_eval"] = harness_version()
            if folder := mark.tasks_folder(self.suite.folder):
                files = [*folder.rglob("*.yaml"), *folder.rglob("*.py")]
                settings["tasks"] = sorted(sha256(files).values())
        return Key(self.content, settings_key(settings))

    def score(
        self, name: str, items: Sequence[Item], missing: Sequence[Item], key: Key, store: Store
    ) -> dict[str, Scored]:
        """Score what is missing, group by group, each written before the next begins."""
        self.how.progress(name, len(items) - len(missing), len(items))
        results: dict[str, Scored] = {}
        if not missing:
            return results
        digests = {item.id: item.digest for item in missing}
        left = set(digests)
        size = 1 if isinstance(self.suite.benchmarks[name], Code) else GROUP
        groups = [items[i : i + size] for i in range(0, len(items), size)]
        with tempfile.TemporaryDirectory(prefix="sigmerge-") as folder:
            scorer = self.scorer(name, missing, Path(folder))
            for group in groups:
                todo = [item for item in group if item.id in left]
                if not todo:
                    continue
                scored, usage = scorer.score(todo)
                store.write(key, {(i, digests[i]): scored[i] for i in scored}, usage)
                results |= scored
                self.usage += usage
                left -= set(scored)
                self.how.progress(name, len(items) - len(left), len(items))
        if left:
            raise ScoreError(f"{name}: no score came back for {', '.join(sorted(left)[:3])}.")
        return results

    def scorer(self, name: str, items: Sequence[Item], folder: Path) -> Scorer:
        mark = self.suite.benchmarks[name]
        if isinstance(mark, LmEval):
            from sigmerge.evaluation.harness import HarnessScorer
            from sigmerge.evaluation.sources import load_items

            everything = load_items(name, mark, self.how.data, self.suite.folder)
            include = mark.tasks_folder(self.suite.folder)
            return HarnessScorer(name, mark, self.model, everything, folder, include)
        if isinstance(mark, Code):
            from sigmerge.evaluation.coding import CodeScorer

            return CodeScorer(name, mark, self.model)
        if isinstance(mark, Safety):
            from sigmerge.evaluation.safety import SafetyScorer

            return SafetyScorer(name, mark, self.model, self.judge)
        if isinstance(mark, Jsonl):
            from sigmerge.evaluation.match import JsonlScorer

            return JsonlScorer(name, mark, self.model)
        if isinstance(mark, Nano):
            return NanoScorer(mark, self.model)
        return CommandScorer(name, mark, self.checkpoint, self.suite.folder)


def _fraction(value: Any) -> float:
    """A score that a program printed; NaN is in no range."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is no number from 0 to 1")
    return float(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class NanoScorer:
    """The embedded pool's own way of asking: greedy, equal lengths together, exact match."""

    mark: Nano
    model: Model

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        from sigmerge.nano.suite import answer

        if not isinstance(self.model, HfModel):
            raise ScoreError("The nano suite is scored by transformers; use --backend hf.")
        start = time.perf_counter()
        prompts = [item.record["prompt"] for item in items]
        tokenizer = self.model.tokenizer
        outputs = answer(self.model.model, tokenizer, prompts)
        key = next(iter(self.mark.metrics.values())).key
        results = {
            item.id: Scored({key: float(output == item.record["answer"])}, output)
            for item, output in zip(items, outputs, strict=True)
        }
        read, written = (
            sum(map(len, tokenizer(texts)["input_ids"])) for texts in (prompts, outputs)
        )
        return results, Usage(1, read, written, time.perf_counter() - start)


@dataclass(frozen=True)
class CommandScorer:
    """A user's program, called once per group of items."""

    name: str
    mark: Command
    checkpoint: Path
    folder: Path

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        with tempfile.TemporaryDirectory(prefix="sigmerge-") as place:
            file = Path(place) / "items.jsonl"
            rows = [{**item.record, "id": item.id} for item in items]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            words = [
                word.replace("{checkpoint}", str(self.checkpoint)).replace("{items}", str(file))
                for word in command_words(self.mark.command, f"{self.name}.command")
            ]
            try:
                done = subprocess.run(
                    words, cwd=self.folder, capture_output=True, encoding="utf-8", errors="replace"
                )
            except OSError as error:
                raise ScoreError(f"{self.name}: {words[0]!r} cannot be run ({error}).") from None
        if done.returncode:
            tail = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise ScoreError(f"{self.name}: its command ended with {done.returncode}:\n{tail}")
        keys = [metric.key for metric in self.mark.metrics.values()]
        try:
            read = [json.loads(line) for line in done.stdout.splitlines() if line.strip()]
            results = {
                row["id"]: Scored({key: _fraction(row[key]) for key in keys}) for row in read
            }
        except (ValueError, KeyError, TypeError) as error:
            raise ScoreError(
                f'{self.name}: its command must print a line {{"id", {", ".join(keys)}}} for every '
                f"item ({error!r})."
            ) from None
        known = {item.id for item in items}
        return {i: result for i, result in results.items() if i in known}, Usage(1)
