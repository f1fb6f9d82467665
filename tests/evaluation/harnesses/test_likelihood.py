"""Reading without writing: every token's likelihood against a pass over each text alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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
    monkeypatch.setitem(reading.PASS, model.model.device.type, 1)
    pieces, usage = read_texts(model, PAIRS, 1024)
    assert usage.calls == len(PAIRS)
    for a, b in zip(whole, pieces, strict=True):
        assert a.log_likelihood == pytest.approx(b.log_likelihood, abs=1e-3)
        assert a[1:] == b[1:]


def all_logits(model: HfModel, pairs: list[tuple[str, str]]) -> list[tuple[float, int, int]]:
    """The same from one pass that makes the logits of every token, in float32."""
    end, rows = model.tokenizer.eos_token_id, []
    for prompt, text in pairs:
        first, last = (model.tokenizer(t)["input_ids"] for t in (prompt, text))
        rows.append(([*first, *last, end], len(first)))
    ids = torch.zeros(len(rows), max(len(row) for row, _ in rows), dtype=torch.long)
    for place, (row, _) in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    with torch.inference_mode():
        logits = model.model(ids, attention_mask=(ids != 0).long()).logits.float()
    found = []
    for place, (row, begin) in enumerate(rows):
        scores, wanted = logits[place, begin - 1 : len(row) - 1], torch.tensor(row[begin:])
        likely = scores.gather(1, wanted[:, None])[:, 0] - scores.logsumexp(1)
        right = int((scores.argmax(1) == wanted).sum())
        found.append((float(likely.double().sum()), right, len(wanted)))
    return found


SCALED = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8},
    "granite": {"logits_scaling": 4.0},
}
"""Kinds of models, and what they do to logits after the head."""


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("kind", SCALED)
def test_logits_of_responses_alone_are_those_of_all(folder: Path, kind: str, head: bool) -> None:
    model = HfModel(folder, "float32", 64)
    if kind != "llama":
        given = model.model.config.to_dict() | SCALED[kind]
        own = {"model_type", "architectures", "rope_parameters", "rope_scaling"}
        config = AutoConfig.for_model(kind, **{k: v for k, v in given.items() if k not in own})
        torch.manual_seed(1)
        model.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    expected = all_logits(model, PAIRS)
    widths = []
    model.model.get_output_embeddings().register_forward_hook(
        lambda _, given, made: widths.append(made.shape[:2].numel())
    )
    if not head:  # a model that does not say what its head is
        model.model.get_output_embeddings = lambda: None
    found, _ = read_texts(model, PAIRS, 1024, ends=True)
    for read, (total, right, tokens) in zip(found, expected, strict=True):
        assert read.log_likelihood == pytest.approx(total, rel=1e-6)
        assert read[1:] == (right, tokens)
    assert (widths == [sum(tokens for *_, tokens in expected)]) == head


def test_rows_of_a_pass_are_those_that_fit_the_memory_free_now(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes memory and gives it back: passes become small, then large again."""
    model, pairs = HfModel(folder, "float32", 64), [("say it", "yes")] * 12
    row = 9 * (8 * 16 + 3 * 32) * 4 + 3 * len(model.tokenizer) * 4
    free = [2 * row, 0, 1 << 30]
    seen: list[int] = []
    monkeypatch.setattr(reading, "free_now", lambda device: reading.FREE_SHARE * free.pop(0))
    model.model.register_forward_pre_hook(
        lambda _, args, given: seen.append(len(given["input_ids"])), with_kwargs=True
    )
    read_texts(model, pairs, 1024)
    assert seen == [2, 1, 9]


def test_a_pass_that_does_not_fit_is_halved_and_the_next_one_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pairs, forward, seen = HfModel(folder, "float32", 1), PAIRS * 8, None, []
    whole, _ = read_texts(model, pairs, 1024)
    forward = model.model.forward

    def short(input_ids: torch.Tensor, **how: Any) -> Any:
        seen.append(len(input_ids))
        if len(seen) < 3:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return forward(input_ids=input_ids, **how)

    monkeypatch.setattr(model.model, "forward", short)
    halved, _ = read_texts(model, pairs, 1024)
    assert seen == [16, 8, 4, 16, 12]
    for a, b in zip(whole, halved, strict=True):
        assert a.log_likelihood == pytest.approx(b.log_likelihood, rel=1e-5)


def test_a_long_prompt_loses_its_beginning(folder: Path) -> None:
    model = HfModel(folder, "float32", 4)
    [cut], usage = read_texts(model, [("zyxwvuts" * 8 + "bcdefgh", "yes")], 10)
    [short], _ = read_texts(model, [("bcdefgh", "yes")], 10)
    assert usage.prompt_tokens == 10
    assert cut.tokens == short.tokens == 3
    assert cut.log_likelihood == pytest.approx(short.log_likelihood, abs=1e-3)


def test_a_chat_template_writes_the_special_tokens_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer adds its own to other prompts alone, or a text would begin twice."""
    added, real = [], reading._rows

    def seen(tokenizer: Any, pairs: Any, longest: int, special: bool, ends: bool) -> Any:
        added.append(special)
        return real(tokenizer, pairs, longest, special, ends)

    monkeypatch.setattr(reading, "_rows", seen)
    model = HfModel(folder, "float32", 4)
    for template in (None, "{{ messages[0].content }}"):
        model.tokenizer.chat_template = template
        for templated in (False, True):
            read_texts(model, PAIRS[:1], 64, templated=templated)
    assert added == [True, True, True, False]


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
