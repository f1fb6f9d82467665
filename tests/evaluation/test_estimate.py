"""Before an evaluation: its cost from a few timed items, and a batch size that fits the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from sigmerge.cli.evaluation_lines import estimate_line
from sigmerge.errors import MemoryFull, MissingExtra, ScoreError
from sigmerge.evaluation.costs import ItemCost, Speed
from sigmerge.evaluation.estimate import estimate, timed
from sigmerge.evaluation.sources import Data, Item
from sigmerge.evaluation.suite import load_suite, nano_suite
from sigmerge.nano.files import POOL
from sigmerge.probing import generate, memory
from sigmerge.probing.generate import HfModel, Sampling, Usage, load_model
from tests.evaluation.tiny import write_tiny

SUITE = load_suite(
    {"name": "own", "domains": {"a": {"said": {"harness": "jsonl", "max_new_tokens": 40}}}}
)
ITEMS = {"said": [Item("all", i, {"prompt": "x" * (20 + i), "answer": "y"}) for i in range(24)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


class Clocked:
    """A model that takes 1 ms a token read, and 10 ms and 2 ms a row for a step after the first."""

    name, batch_size, now = "clocked", 8, 0.0

    def chat(self, text: str) -> str:
        return text

    def generate(self, prompts: Sequence[str], sampling: Sampling):
        read, steps = sum(map(len, prompts)), sampling.max_new_tokens or 1
        self.now += 0.001 * read + (steps - 1) * (0.010 + 0.002 * len(prompts))
        return [[""]] * len(prompts), Usage(1, read, steps * len(prompts))


def test_the_speed_is_found_from_a_few_items(monkeypatch: pytest.MonkeyPatch):
    model = Clocked()
    monkeypatch.setattr(time, "perf_counter", lambda: model.now)
    speed = timed(model, ITEMS["said"][:4])
    assert speed.read == pytest.approx(0.001)
    assert (speed.one, speed.many) == (pytest.approx(0.012), pytest.approx(0.018))
    assert speed.step(8) == pytest.approx(0.026)
    low, high = estimate(SUITE, ITEMS, ITEMS, lambda: model)["seconds"]
    reading = sum(len(json.dumps(item.record)) / 4 for item in ITEMS["said"]) * 0.001
    steps = 24 / 8 * 40 * 0.026  # three batches of eight, at most forty steps each
    assert (low, high) == (round(reading + 0.1 * steps, 1), round(reading + steps, 1))


def test_a_real_model_is_timed(folder: Path):
    model = HfModel(folder, "auto", 8)
    found = estimate(SUITE, ITEMS, ITEMS, lambda: model)
    low, high = found["seconds"]
    assert 0 <= low <= high
    _, usage = model.generate([i.record["prompt"] for i in ITEMS["said"]], Sampling(40))
    assert found["tokens_at_most"] >= usage.generated_tokens
    assert (found["items"], found["items_to_score"]) == (24, 24)


def test_the_tokens_of_the_embedded_items_are_counted_and_nothing_is_timed():
    """Against the tokenizer; timing a few items would take longer than the answers."""

    def load() -> HfModel:
        raise AssertionError("no model is needed")

    suite = nano_suite()
    name, mark = next(iter(suite.benchmarks.items()))
    items = mark.load(name, Data.default(None, False), suite.folder)
    found = estimate(suite, {name: items}, {name: items}, load)
    tokenizer = AutoTokenizer.from_pretrained(POOL / "reference")
    texts = [f"{item.record['prompt']} {item.record['answer']}" for item in items]
    assert found["tokens_at_most"] >= sum(map(len, tokenizer(texts)["input_ids"]))
    assert found["tokens_at_most"] <= sum(len(text.split()) + 5 for text in texts)
    assert found["seconds"] is None


def test_texts_that_are_only_read_are_not_timed_by_writing():
    def load() -> HfModel:
        raise AssertionError("no model is needed")

    read = {
        "harness": "likelihood", "files": "x", "response": "answer",
        "metrics": {"accuracy": "token_accuracy"},
    }  # fmt: skip
    suite = load_suite({"name": "own", "domains": {"a": {"said": read}}})
    found = estimate(suite, ITEMS, ITEMS, load)
    assert found["items_to_score"] == 24 and found["seconds"] is None


def test_nothing_is_loaded_when_nothing_is_left_to_score():
    def load() -> HfModel:
        raise AssertionError("no model is needed")

    found = estimate(SUITE, ITEMS, {"said": []}, load)
    assert (found["items_to_score"], found["seconds"]) == (0, None)
    assert estimate_line(found) == "0 of 24 items to score"


def test_batches_share_the_steps_of_generation():
    """Eight rows in a batch cost one row's steps and what seven more rows add to each."""
    speed = Speed(read=0.001, one=0.1, many=0.4, rows=4)
    assert speed.step(1) == pytest.approx(0.1)
    assert speed.step(8) == pytest.approx(0.8)
    batched = ItemCost(read=10, longest=100).time(speed, 8, 1.0)
    assert batched == pytest.approx(0.01 + 100 / 8 * 0.8)
    several = ItemCost(read=10, answers=16, longest=100).time(speed, 8, 1.0)
    assert several == pytest.approx(0.01 + 100 * 1.6)


def test_ten_programs_of_a_problem_are_written_together():
    mark = load_suite("mergebench").benchmarks["humaneval_plus"]
    found = mark.cost(Item("all", 0, {}))
    assert found is not None
    assert (found.answers, found.read + found.longest) == (10, 512)
    assert found.seconds > 0


def test_the_line_says_that_it_is_rough():
    made = {"items": 9, "items_to_score": 4, "tokens_at_most": 1200, "seconds": [30.0, 600.0]}
    assert estimate_line(made).startswith(
        "4 of 9 items to score, at most 1,200 tokens; by a few of them roughly 30 s to 10 min"
    )
    assert estimate_line({**made, "seconds": [52.1, 52.2]}).endswith("roughly 52 s")


@pytest.mark.parametrize(("free", "rows"), [(1 << 40, 16), (1 << 26, 4), (1 << 20, 1)])
def test_the_batch_size_fits_the_free_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, rows: int
):
    """A row of the tiny model: 2,048 tokens of 256 bytes of keys and values, 2 KB of logits."""
    if torch.cuda.is_available():
        pytest.skip("the rule for processor cores")
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    assert HfModel(folder, "auto", None).batch_size == rows
    assert HfModel(folder, "auto", 3).batch_size == 3


LIMITED = """
import json, resource, sys
from pathlib import Path
from sigmerge.probing.generate import HfModel, Sampling
prompts = json.loads(sys.argv[2])
model = HfModel(Path(sys.argv[1]), "auto", len(prompts))
model.generate(prompts[:2], Sampling(2))
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (8 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
texts, usage = model.generate(prompts, Sampling(2))
print(json.dumps([model.batch_size, usage.calls, texts]))
"""


def test_a_batch_that_does_not_fit_is_halved(folder: Path):
    """With a real limit on the process's memory, and the same answers as in small batches."""
    prompts = ["x" * (600 + i) for i in range(32)]
    command = [sys.executable, "-c", LIMITED, str(folder), json.dumps(prompts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    size, calls, texts = json.loads(done.stdout)
    assert 1 <= size < len(prompts)
    assert calls > 1
    expected, _ = HfModel(folder, "auto", 2).generate(prompts, Sampling(2))
    assert texts == expected


def test_one_item_that_does_not_fit_is_said(folder: Path):
    model = HfModel(folder, "auto", 2)
    tries = []

    def work() -> None:
        tries.append(model.batch_size)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MemoryFull, match="not even one item fits: the memory of the GPU is full"):
        model.halving(work)
    assert tries == [2, 1, 1]

    def broken() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        model.halving(broken)


def test_auto_is_float32_on_processor_cores(folder: Path, tmp_path: Path):
    """Many compute in bfloat16 by a loop of their own, a hundred times slower."""
    if torch.cuda.is_available():
        pytest.skip("the rule for processor cores")
    model = HfModel(folder, "auto", 1)
    model.model.to(torch.bfloat16).save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert generate.saved_dtype(tmp_path) == "bfloat16"
    assert HfModel(tmp_path, "auto", 1).model.dtype == torch.float32
    assert HfModel(tmp_path, "bfloat16", 1).model.dtype == torch.bfloat16


def test_backends_that_are_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ScoreError, match="'vlm' is no backend; there are hf, vllm"):
        load_model(folder, "vlm", "auto", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"pip install 'sigmerge-llm\[vllm\]'"):
        load_model(folder, "vllm", "auto", None)
    assert generate.saved_dtype(folder) == "float32"
