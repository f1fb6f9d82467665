"""lm-evaluation-harness behind the one interface; the only module that imports it.

Where a benchmark names a source, records are ours: they are written to a file, and a task made by
including the registered one reads that file. Else the task loads its own. Subsets go through
`samples`, whose lists must be sorted, unique and not empty; the harness's request cache is never
used, as its key forgets them.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field

from sigmerge.errors import MissingExtra, ScoreError, install
from sigmerge.evaluation.answers import MetricValue, Scored, settings_key
from sigmerge.evaluation.benchmark import Asked, Benchmark, HarnessScorer
from sigmerge.evaluation.costs import ItemCost, tokens
from sigmerge.evaluation.how import How
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.evaluation.sources import Data, Item, NoSource
from sigmerge.files.imports import is_installed
from sigmerge.messages import did_you_mean
from sigmerge.probing.generate import HfModel, LoadedModel, Usage, VllmModel, vllm_usage

SEED = 1234
"""The harness's own default for few-shot draws."""
GENERATING = {"gsm8k_cot": (900, 256), "ifeval": (0, 1280)}
"""Tasks that generate: tokens of their examples, and the longest answer."""


class LmEval(Benchmark):
    """A task that the harness knows, or one of the YAML files in the folder `include_path`.

    With files: or hub: it reads those records, else its own.
    """

    shares_state: ClassVar[bool] = True

    harness: Literal["lm_eval"]
    task: str
    include_path: str | None = None
    chat_template: bool = False
    generation: dict[str, Any] = Field(default_factory=dict)

    @property
    def sourced(self) -> bool:
        return bool(self.files or self.hub)

    def tasks_folder(self, suite_folder: Path) -> Path | None:
        if self.include_path is None:
            return None
        return suite_folder / Path(self.include_path).expanduser()

    def rows(self, name: str, part: str, data: Data, suite_folder: Path) -> list[dict[str, Any]]:
        if self.sourced:
            return super().rows(name, part, data, suite_folder)
        return task_records(name, self, part, self.tasks_folder(suite_folder), data.hub)

    def scored_by(self, name: str, suite_folder: Path, how: How) -> ScoredBy:
        harness_version()
        files = {}
        if folder := self.tasks_folder(suite_folder):
            found = sorted(file for file in folder.rglob("*") if file.is_file())
            files = {f"tasks/{file.relative_to(folder).as_posix()}": file for file in found}
        return ScoredBy({}, files, ("lm-eval", "langdetect", "nltk", "sympy"))

    def cost(self, item: Item) -> ItemCost:
        text = tokens(item.record)
        examples, longest = GENERATING.get(self.task, (0, 0))
        longest = int(self.generation.get("max_gen_toks", longest))
        return ItemCost(examples + text if longest else 4 * text, longest=longest)

    def scorer(self, name: str, asked: Asked, items: Sequence[Item], folder: Path) -> HarnessScorer:
        everything = self.load(name, asked.how.data, asked.suite_folder)
        include = self.tasks_folder(asked.suite_folder)
        return LmEvalScorer(name, self, asked.model, everything, folder, include)


def harness_version() -> str:
    try:
        return version("lm-eval")
    except PackageNotFoundError:
        raise MissingExtra("An lm_eval benchmark", ["lm-eval"], ["eval"]) from None


def provide_punkt() -> None:
    """Let nltk find the sentence model that IFEval reads, without a download.

    It is looked for among nltk's own data and in the package llama-index-core, which carries it.
    """
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english")
        return
    except LookupError:
        pass
    try:
        root = Path(str(distribution("llama-index-core").locate_file("llama_index/core/_static")))
    except PackageNotFoundError:
        root = Path("/nonexistent")
    if not (root / "nltk_cache/tokenizers/punkt_tab/english").is_dir():
        raise ScoreError(
            "IFEval's sentence splitter needs nltk's punkt_tab, which is not installed. Install "
            f"it with: {install('eval')}, or python -m nltk.downloader punkt_tab"
        )
    nltk.data.path.append(str(root / "nltk_cache"))


class LmEvalScorer:
    """One benchmark's tasks, a task for every language, on one loaded model."""

    def __init__(
        self,
        name: str,
        mark: LmEval,
        model: LoadedModel | None,
        items: Sequence[Item],
        folder: Path,
        include: Path | None = None,
    ) -> None:
        harness_version()
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        if "ifeval" in mark.task:
            provide_punkt()
            import langdetect

            langdetect.DetectorFactory.seed = 0  # its verdicts are drawn at random otherwise
        self.name, self.mark, self.model = name, mark, model
        self.lm: Any = _wrapped(model) if model is not None else None
        self.tasks = {
            part: _task(mark, part, [item for item in items if item.part == part], folder, include)
            for part in dict.fromkeys(item.part for item in items)
        }

    def score(self, items: Sequence[Item]) -> tuple[dict[str, Scored], Usage]:
        from lm_eval.evaluator import evaluate

        start = time.perf_counter()
        results: dict[str, Scored] = {}
        before = self.lm.usage
        for part, task in self.tasks.items():
            indices = sorted({item.index for item in items if item.part == part})
            if not indices:  # an empty list would mean the whole task
                continue

            def work(task: Any = task, indices: list[int] = indices) -> Any:
                if isinstance(self.model, HfModel):
                    self.lm.batch_size_per_gpu = self.model.batch_size
                return evaluate(
                    lm=self.lm,
                    task_dict={"tasks": {task.task_name: task}},
                    samples={task.task_name: indices},
                    bootstrap_iters=0,
                    apply_chat_template=self.mark.chat_template,
                )

            with _quiet():
                outcome = self.model.halving(work) if isinstance(self.model, HfModel) else work()
            results |= self.read(part, outcome["samples"][task.task_name])
        used = self.lm.usage
        cost = Usage(
            used.calls - before.calls,
            used.prompt_tokens - before.prompt_tokens,
            used.generated_tokens - before.generated_tokens,
            time.perf_counter() - start,
        )
        return results, cost

    def read(self, part: str, samples: Sequence[dict[str, Any]]) -> dict[str, Scored]:
        """Per-item results from the harness's log, which has a row for every filter of an item."""
        scores: dict[int, dict[str, MetricValue]] = {}
        outputs: dict[int, Any] = {}
        for sample in samples:
            index = sample["doc_id"]
            outputs[index] = sample["resps"]
            for metric in self.mark.metrics.values():
                name, _, wanted = metric.key.partition(",")
                if sample["filter"] == (wanted or "none") and name in sample:
                    scores.setdefault(index, {})[metric.key] = _number(sample[name])
        missing = {m.key for m in self.mark.metrics.values()} - {
            k for s in scores.values() for k in s
        }
        if missing:
            filters = sorted({sample["filter"] for sample in samples})
            raise ScoreError(
                f"{self.name}: the task {self.mark.task} reports no {', '.join(sorted(missing))}; "
                f"its metrics are {', '.join(samples[0]['metrics'])}, its filters "
                f"{', '.join(filters)}."
            )
        return {f"{part}/{i}": Scored(values, outputs[i]) for i, values in scores.items()}


def _number(value: Any) -> MetricValue:
    return [float(v) for v in value] if isinstance(value, list) else float(value)


def task_records(
    name: str, mark: LmEval, part: str, include: Path | None, hub: bool
) -> list[dict[str, Any]]:
    """The records of a task that brings its own data; NoSource where they cannot be had."""
    harness_version()
    task, entry = _found(mark, part, include)
    place = (entry.cfg or {}).get("dataset_path")
    local = place is None or place in LOCAL or Path(place).exists()
    if not (hub or local):
        raise NoSource(
            f"{name}: the task {task} reads {place} from the hub. Allow that with --hub, or give "
            "the benchmark files: of its own."
        )
    try:
        loaded = _loaded(task, include)
        shown = _shown(loaded)
        return [{**doc, **shown} for doc in loaded.eval_docs]
    except (OSError, ValueError, RuntimeError) as error:  # a hub that is not there is an OSError
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NoSource(f"{name}: the task {task} cannot load its records ({reason}).") from None


def _shown(task: Any) -> dict[str, str]:
    """What the examples before each question are drawn from: records of another split, say."""
    if not task.get_config("num_fewshot"):
        return {}
    examples = [dict(doc) for doc in task.fewshot_docs() or ()]
    return {"examples_of": settings_key(examples)}


LOCAL = ("json", "csv", "parquet", "arrow", "text")
"""What `datasets` calls files that a task names itself."""


def _found(mark: LmEval, part: str, include: Path | None) -> tuple[str, Any]:
    """A task's name and entry, in the suite's own folder of tasks or among the harness's."""
    task = mark.task.replace("{language}", part)
    if include is not None and not include.is_dir():
        raise ScoreError(f"{include}: no such folder; include_path: is to hold the task's YAML.")
    index = _knowing(task, include)
    if index is None:
        own = _index(include).task_index if include is not None else {}
        hint = did_you_mean(task, [*own, *_homes()], "see `lm_eval ls tasks`.")
        raise ScoreError(f"lm-evaluation-harness has no task {task!r}; {hint}")
    entry = index.task_index[task]
    if entry.yaml_path is None or "task" not in str(entry.kind).lower():
        raise ScoreError(f"{task}: is a group of tasks; a benchmark names one of its tasks.")
    return task, entry


def _loaded(task: str, include: Path | None) -> Any:
    with _quiet():
        return _knowing(task, include).load([task])["tasks"][task]


def _task(
    mark: LmEval, part: str, items: Sequence[Item], folder: Path, include: Path | None
) -> Any:
    """The task as the harness knows it, reading our records if the benchmark names a source."""
    from jinja2 import TemplateError

    name, entry = _found(mark, part, include)
    place = _rewritten(name, entry, items, folder) if mark.sourced else (name, include)
    try:
        task = _loaded(*place)
    except TemplateError as error:
        raise ScoreError(
            f"{name} does not fit its records ({error}); they have {', '.join(items[0].record)}."
        ) from None
    if mark.generation:
        task.set_config(key="generation_kwargs", value=mark.generation, update=True)
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SEED)
    _seed_each_item(task)
    return task


def _rewritten(name: str, entry: Any, items: Sequence[Item], folder: Path) -> tuple[str, Path]:
    """A task that includes the given one and reads our records; its name and folder."""
    config = entry.cfg or {}
    if config.get("num_fewshot") and not (config.get("fewshot_config") or {}).get("samples"):
        raise ScoreError(
            f"{name}: shows examples from another split, which files: and hub: do not give; leave "
            "both out, and the task loads its own data."
        )
    place = folder / f"sigmerge_{name}"
    place.mkdir(parents=True, exist_ok=True)
    rows = place / "records.jsonl"
    rows.write_text("".join(json.dumps(item.record) + "\n" for item in items), encoding="utf-8")
    content: dict[str, Any] = {
        "include": str(entry.yaml_path),
        "task": place.name,
        "tag": [],
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(place / "cache")},
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": "test",
    }
    (place / f"{place.name}.yaml").write_text(yaml.safe_dump(content))
    return place.name, place


def _seed_each_item(task: Any) -> None:
    """Scoring may draw at random (IFEval does); seeded anew, no item depends on its neighbours."""
    process = task.process_results

    def seeded(doc: Any, results: Any) -> Any:
        random.seed(0)
        return process(doc, results)

    task.process_results = seeded


def _knowing(task: str, include: Path | None) -> Any:
    """The index of the folder that has a task: the suite's own, or one of the harness's."""
    for folder in (include, _homes().get(task)):
        if folder is not None and task in (index := _index(folder)).task_index:
            return index
    return None


@cache
def _homes() -> dict[str, Path]:
    """Tasks and groups of the harness, and the folder that has each.

    Its 14,000 files are searched for names: to parse them, as the harness does, takes ten seconds.
    """
    from lm_eval import tasks

    homes: dict[str, Path] = {}
    named = re.compile(rb"""^["']?(?:task|group)["']?: *["']?([^"'#\n]+?)["']?\s*$""", re.MULTILINE)
    for file in sorted(Path(tasks.__file__).parent.rglob("*.yaml"), key=Path.as_posix):
        for found in named.finditer(file.read_bytes()):
            homes.setdefault(found[1].decode(), file.parent)
    return homes


def _index(folder: Path) -> Any:
    """The tasks of a folder; those of a user's are read anew, since they may have changed."""
    return _index_of_library(folder) if is_installed(folder) else _index_now(folder)


@cache
def _index_of_library(folder: Path) -> Any:
    return _index_now(folder)


def _index_now(folder: Path) -> Any:
    from lm_eval.tasks import TaskManager

    with _quiet():
        return TaskManager(include_path=str(folder), include_defaults=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of the harness and its libraries; ours counts items."""
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        yield


def _wrapped(model: LoadedModel) -> Any:
    """The loaded model in the harness's own class, which also counts what it does."""
    if isinstance(model, VllmModel):
        return _wrapped_vllm(model)
    assert isinstance(model, HfModel)
    return _wrapped_hf(model)


def _wrapped_hf(model: HfModel) -> Any:
    from lm_eval.models.huggingface import HFLM

    class Counting(HFLM):  # type: ignore[misc]
        usage = Usage()

        def _loglikelihood_tokens(self, requests: Any, *rest: Any, **how: Any) -> Any:
            # Requests that differ in their last token alone are served by one pass.
            rows = {tuple(ctx + new)[:-1] for _, ctx, new in requests}
            self.usage += Usage(0, sum(min(len(row), self.max_length) for row in rows))
            return super()._loglikelihood_tokens(requests, *rest, **how)

        def _model_call(self, inputs: Any, *rest: Any, **how: Any) -> Any:
            self.usage += Usage(1)
            return super()._model_call(inputs, *rest, **how)

        def _model_generate(self, context: Any, *rest: Any, **how: Any) -> Any:
            rows = super()._model_generate(context, *rest, **how)
            new = [model.until_end(row) for row in rows[:, context.shape[1] :].tolist()]
            read = int(how["attention_mask"].sum())
            self.usage += Usage(1, read, sum(map(len, new)))
            return rows

    return Counting(pretrained=model.model, tokenizer=model.tokenizer, batch_size=model.batch_size)


def _wrapped_vllm(model: VllmModel) -> Any:
    """The harness's vLLM class on the engine that is there: a second would not fit the GPU."""
    import lm_eval.models.vllm_causallms as harness

    class Counting(harness.VLLM):  # type: ignore[misc]
        usage = Usage()

        def _model_generate(self, *rest: Any, **how: Any) -> Any:
            outputs = super()._model_generate(*rest, **how)
            self.usage += vllm_usage(outputs)
            return outputs

    own, harness.LLM = harness.LLM, lambda **_: model.engine
    try:
        return Counting(pretrained=model.name, batch_size="auto", seed=SEED)
    finally:
        harness.LLM = own
