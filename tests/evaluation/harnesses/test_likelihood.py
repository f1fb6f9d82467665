"""Reading without writing: every token's likelihood against a pass over each text alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sigmerge
from sigmerge.errors import RecipeError, ScoreError
from sigmerge.evaluation.suite import load_suite
from sigmerge.probing import reading
from sigmerge.probing.generate import HfModel
from sigmerge.probing.reading import read_texts
from tests.evaluation.tiny import write_tiny

PAIRS = [
    ("say it", "yes"),
    ("a much longer prompt of many letters, " * 3, "no, never again"),
    ("x", "y"),
    ("say it", "a longer answer than the others had"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


def alone(folder: Path, prompt: str, text: str, ends: bool) -> tuple[float, int, int]:
    """The text's tokens one by one, each by a pass over all that stands before it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    seen = tokenizer(prompt)["input_ids"]
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    wanted += [tokenizer.eos_token_id] if ends else []
    total, first = 0.0, 0
    for token in wanted:
        with torch.inference_mode():
            scores = model(torch.tensor([seen])).logits[0, -1].double()
        total += float(scores.log_softmax(0)[token])
        first += int(int(scores.argmax()) == token)
        seen = [*seen, token]
    return total, first, len(wanted)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("batch", [1, 64])
def test_likelihoods_are_those_of_each_text_alone(folder: Path, ends: bool, batch: int) -> None:
    found, usage = read_texts(HfModel(folder, "float32", batch), PAIRS, 1024, ends=ends)
    for (prompt, text), read in zip(PAIRS, found, strict=True):
        total, first, tokens = alone(folder, prompt, text, ends)
        assert read.log_likelihood == pytest.approx(total, abs=1e-3)
        assert (read.first_choices, read.tokens) == (first, tokens)
    assert usage.calls == 1 and usage.generated_tokens == 0


def test_a_small_room_takes_more_passes_and_says_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HfModel(folder, "float32", 64)
    whole, _ = read_texts(model, PAIRS, 1024)
    monkeypatch.setitem(reading.LOGITS, model.model.device.type, 1)
    pieces, usage = read_texts(model, PAIRS, 1024)
    assert usage.calls == len(PAIRS)
    for a, b in zip(whole, pieces, strict=True):
        assert a.log_likelihood == pytest.approx(b.log_likelihood, abs=1e-3)
        assert a[1:] == b[1:]


def test_a_long_prompt_loses_its_beginning(folder: Path) -> None:
    model = HfModel(folder, "float32", 4)
    [cut], usage = read_texts(model, [("abcdefgh" * 8, "yes")], 10)
    [short], _ = read_texts(model, [("fghabcdefgh"[-7:], "yes")], 10)
    assert usage.prompt_tokens == 10
    assert cut.tokens == short.tokens == 3
    assert cut.log_likelihood == pytest.approx(short.log_likelihood, abs=1.0)


def suite(folder: Path, rows: list[dict[str, Any]], **section: Any) -> Path:
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mark = {"harness": "likelihood", "files": ["items.jsonl"], **section}
    file = folder / "suite.json"
    file.write_text(json.dumps({"name": "own", "domains": {"a": {"read": mark}}}))
    return file


def test_a_suite_of_responses(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "response": text} for prompt, text in PAIRS]
    metrics = {"accuracy": "token_accuracy", "probability": "probability"}
    file = suite(tmp_path, rows, response="response", metrics=metrics)
    found = sigmerge.evaluate(folder, suite=str(file), split="all", dtype="float32")
    each = [alone(folder, p, t, True) for p, t in PAIRS]
    assert found.domains["a"] == pytest.approx(sum(f / n for _, f, n in each) / len(each))
    likely = sum(math.exp(total / n) for total, _, n in each) / len(each)
    assert found.benchmarks["read"]["probability"] == pytest.approx(likely, abs=1e-4)


def test_a_suite_of_choices(folder: Path, tmp_path: Path) -> None:
    choices = ["zz", "q" * 9, "yes", "a longer one"]
    totals = {p: [alone(folder, p, c, False)[0] for c in choices] for p, _ in PAIRS}
    rates = {p: [t / len(c) for t, c in zip(totals[p], choices, strict=True)] for p in totals}
    right = {p: [each.index(max(each)) for each in (totals[p], rates[p])] for p in totals}
    assert any(plain != by_length for plain, by_length in right.values())
    rows = [{"prompt": p, "choices": choices, "answer": right[p][0]} for p, _ in PAIRS]
    rows[0]["answer"] = (rows[0]["answer"] + 1) % len(choices)
    metrics = {"right": "choice", "by_length": "choice_by_length"}
    file = suite(tmp_path, rows, choices="choices", metrics=metrics)
    found = sigmerge.evaluate(folder, suite=str(file), split="all", dtype="float32")
    plain = sum(row["answer"] == right[row["prompt"]][0] for row in rows)
    by_length = sum(row["answer"] == right[row["prompt"]][1] for row in rows)
    assert found.benchmarks["read"] == {
        "right": pytest.approx(plain / len(rows)),
        "by_length": pytest.approx(by_length / len(rows)),
    }


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "give response: or choices:"),
        (
            {"response": "a", "choices": "b", "metrics": {"m": "choice"}},
            "give response: or choices",
        ),
        ({"response": "a", "metrics": {"m": "choice"}}, "token_accuracy and probability"),
        ({"response": "a", "prompt": "{a.b}"}, "names no column"),
    ],
)
def test_wrong_sections_are_refused(section: dict[str, Any], said: str) -> None:
    mark = {"harness": "likelihood", "metrics": {"m": "token_accuracy"}, **section}
    with pytest.raises(RecipeError, match=said):
        load_suite({"name": "own", "domains": {"a": {"read": mark}}})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x", "choices": "ab", "answer": 0}, "needs a list in 'choices'"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": 2}, "none of its 2 choices"),
        ({"prompt": "x", "choices": ["a", "b"]}, "has no 'answer'"),
    ],
)
def test_wrong_records_are_refused(
    folder: Path, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    file = suite(tmp_path, [row], choices="choices", metrics={"right": "choice"})
    with pytest.raises(ScoreError, match=said):
        sigmerge.evaluate(folder, suite=str(file), split="all")
