"""lm-evaluation-harness through our adapter: known answers, and its own results item for item."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sigmerge.errors import ScoreError
from sigmerge.evaluation.aggregate import metric
from sigmerge.evaluation.benchmark import Metric
from sigmerge.evaluation.sources import Data, File, Item, read_rows
from sigmerge.evaluation.suite import load_suite
from sigmerge.probing.generate import HfModel, Usage
from tests.evaluation.data import DATA, needs_data
from tests.evaluation.tiny import write_tiny

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'sigmerge-llm[eval]'")
from lm_eval.api.model import LM

from sigmerge.evaluation.harnesses import lm_eval as harness
from sigmerge.evaluation.harnesses.lm_eval import LmEval, LmEvalScorer

SUITE = load_suite("mergebench")


class Canned(LM):  # type: ignore[misc]
    """A model whose answers are known."""

    usage = Usage()

    def __init__(self, answer: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests: Any, **how: Any) -> list[str]:
        return [self.answer(request.doc) for request in requests]

    def loglikelihood(self, requests: Any, **how: Any) -> Any:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: Any, **how: Any) -> Any:
        raise NotImplementedError


def scorer(name: str, items: list[Item], folder: Path, answer: Callable[..., str]) -> Any:
    mark = SUITE.benchmarks[name]
    assert isinstance(mark, LmEval)
    made = LmEvalScorer(name, mark, None, items, folder)
    made.lm = Canned(answer)
    return made


GSM8K = [
    ("The answer is 18.", 1, 1),
    ("She makes 18 dollars. The answer is $18.", 0, 1),
    ("So it is 18", 0, 1),
    ("The answer is 1,8.", 1, 1),
    ("The answer is 17. No, 18.", 0, 1),
    ("The answer is 18. That is 9 times 2.", 1, 0),
    ("I do not know.", 0, 0),
    ("", 0, 0),
]


def test_gsm8k_strict_and_flexible_extraction(tmp_path: Path):
    """Strict wants the sentence of the examples, flexible takes the last number."""
    items = [
        Item("all", i, {"question": str(i), "answer": "9*2\n#### 18"}) for i in range(len(GSM8K))
    ]
    made = scorer("gsm8k", items, tmp_path, lambda doc: GSM8K[int(doc["question"])][0])
    results, _ = made.score(items)
    found = [
        (r.scores["exact_match,strict-match"], r.scores["exact_match,flexible-extract"])
        for r in (results[item.id] for item in items)
    ]
    assert found == [(strict, flexible) for _, strict, flexible in GSM8K]


@needs_data
def test_ifeval_scores_gpt4s_published_responses(tmp_path: Path):
    """Google's GPT-4 responses, published as 76.89, 83.57, 79.30 and 85.37 percent.

    Those are 416 and 429 of 541 prompts and 697 and 712 of 834 instructions. The harness's scorer
    finds exactly one more right in each: 77.08, 83.69, 79.48 and 85.49 percent.
    """
    mark = SUITE.benchmarks["ifeval"]
    items = mark.load("ifeval", Data(DATA), SUITE.folder)
    file = DATA / "ifeval/input_response_data_gpt4_20231107_145030.jsonl.gz"
    responses = [row["response"] for row in read_rows(file, File(path=file.name))]
    by_key = {item.record["key"]: text for item, text in zip(items, responses, strict=True)}
    results, _ = scorer("ifeval", items, tmp_path, lambda doc: by_key[doc["key"]]).score(items)
    rows = [results[item.id] for item in items]
    found = {name: metric(mark, name, rows) for name in mark.metrics}
    counts = {"prompt": 541, "instruction": 834}
    published = {
        "prompt_strict": 416,
        "instruction_strict": 697,
        "prompt_loose": 429,
        "instruction_loose": 712,
    }
    for name, right in published.items():
        difference = found[name] * counts[name.partition("_")[0]] - right
        assert round(difference) == 1, name


@needs_data
def test_the_floor_of_ifeval_in_small_tasks(tmp_path: Path):
    """The answer "yes" to every prompt follows all instructions of 61 prompts."""
    mark = SUITE.benchmarks["ifeval"]
    items = mark.load("ifeval", Data(DATA), SUITE.folder)
    results, _ = scorer("ifeval", items, tmp_path, lambda doc: "yes").score(items)
    small = load_suite("small-tasks").benchmarks["ifeval"]
    rows = [results[item.id] for item in items]
    assert round(metric(small, small.score, rows) * 541) == 61
    stated = (Path(__file__).parents[3] / "docs/real.md").read_text(encoding="utf-8")
    assert "61 of 541" in stated and f"strictly | {61 / 541:.2f} |" in stated


def test_an_unknown_task_and_metric_are_refused(tmp_path: Path):
    item = Item("all", 0, {"question": "0", "answer": "#### 1"})
    mark = SUITE.benchmarks["gsm8k"]
    with pytest.raises(ScoreError, match="no task 'gsm9k'"):
        LmEvalScorer("x", mark.model_copy(update={"task": "gsm9k"}), None, [item], tmp_path)
    own = LmEval(
        harness="lm_eval",
        task="gsm8k_cot",
        files=[File(path="x.jsonl")],
        metrics={"x": Metric(key="acc,none")},
    )
    made = LmEvalScorer("x", own, None, [item], tmp_path)
    made.lm = Canned(lambda doc: "1")
    with pytest.raises(ScoreError, match=r"reports no acc,none.*exact_match.*strict-match"):
        made.score([item])


def test_subsets_equal_the_harness_itself(tmp_path: Path):
    """The items of a split score as in lm_eval's own run over the whole task."""
    from lm_eval import simple_evaluate

    folder = write_tiny(tmp_path / "tiny")
    answers = "ABCD"
    records = [
        {"id": str(i), "instruction": f"Which letter is number {i}?", "answer": answers[i % 4],
         **{f"option_{x}": f"{x} {i * k}" for k, x in enumerate("abcd")}, "option_e": None}
        for i in range(12)
    ]  # fmt: skip
    items = [Item("fr", i, record) for i, record in enumerate(records)]
    mark = SUITE.benchmarks["m_arc"]
    assert isinstance(mark, LmEval)
    model = HfModel(folder, "float32", 4)
    made = LmEvalScorer("m_arc", mark, model, items, tmp_path / "tasks")
    chosen = [items[i] for i in (11, 2, 7, 5)]
    results, usage = made.score(chosen)
    assert list(results) == ["fr/2", "fr/5", "fr/7", "fr/11"]
    assert usage.calls == 4 and usage.prompt_tokens > 0
    whole = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=[made.tasks["fr"]],
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
        task_manager=harness._index(tmp_path / "tasks"),  # else that of all tasks is made
    )
    expected = {row["doc_id"]: row["acc_norm"] for row in next(iter(whole["samples"].values()))}
    found = {int(i.partition("/")[2]): r.scores["acc_norm,none"] for i, r in results.items()}
    assert found == {i: expected[i] for i in (2, 5, 7, 11)}


def test_tokens_are_counted_as_they_pass_through_the_model(tmp_path: Path):
    """Choices of one token share a pass; the last token of a choice is never read."""
    from sigmerge.evaluation.harnesses.lm_eval import _wrapped

    lm = _wrapped(HfModel(write_tiny(tmp_path / "tiny"), "float32", 1))
    passed, call = [], lm._model_call

    def seen(inputs: Any, **how: Any) -> Any:
        passed.append(tuple(inputs.shape))
        return call(inputs, **how)

    lm._model_call = seen
    asked = [([5, 6, 7], [8]), ([5, 6, 7], [9]), ([5, 6, 7], [10]), ([5, 6], [3, 4])]
    lm._loglikelihood_tokens([(("", str(i)), ctx, new) for i, (ctx, new) in enumerate(asked)])
    assert sorted(passed) == [(1, 3), (1, 3)]
    assert (lm.usage.calls, lm.usage.prompt_tokens) == (2, 6)


def test_a_task_that_does_not_fit_is_done_in_smaller_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Out of memory above two rows: the batch is halved, and the scores are the same."""
    import torch

    model = HfModel(write_tiny(tmp_path / "tiny"), "float32", 8)
    items = [
        Item("all", i, {"question": f"{i} and {i}?", "answer": f"#### {2 * i}"}) for i in range(6)
    ]
    mark = SUITE.benchmarks["gsm8k"]
    assert isinstance(mark, LmEval)
    short = mark.model_copy(update={"generation": {"max_gen_toks": 4}})
    whole, _ = LmEvalScorer("gsm8k", short, model, items, tmp_path / "a").score(items)
    forward = model.model.forward

    def small(input_ids: torch.Tensor, **how: Any) -> Any:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids=input_ids, **how)

    monkeypatch.setattr(model.model, "forward", small)
    halved, _ = LmEvalScorer("gsm8k", short, model, items, tmp_path / "b").score(items)
    assert model.batch_size == 2
    assert halved == whole


def test_examples_from_another_split_are_not_left_out_silently(tmp_path: Path):
    """gsm8k shows five examples from the training split; its twin gsm8k_cot brings its own."""
    mark = SUITE.benchmarks["gsm8k"].model_copy(update={"task": "gsm8k"})
    assert isinstance(mark, LmEval)
    item = Item("all", 0, {"question": "0", "answer": "#### 1"})
    with pytest.raises(ScoreError, match="examples from another split"):
        LmEvalScorer("x", mark, None, [item], tmp_path)


def test_punkt_is_found_without_a_download(monkeypatch: pytest.MonkeyPatch):
    import nltk

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(nltk, "download", refuse)
    harness.provide_punkt()
    assert nltk.data.find("tokenizers/punkt_tab/english")
