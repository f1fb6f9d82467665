"""The scorer: equal to transformers' own generation, item by item, and to its own results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sigmerge.nano.facts import DOMAINS
from sigmerge.nano.files import POOL, load_items
from sigmerge.nano.suite import STEPS, Result, Scores, score


def test_batched_answers_are_those_of_generate() -> None:
    folder, limit = POOL / "reference", 8
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    items = [item for domain in DOMAINS for item in load_items("evaluation", domain)[:limit]]
    expected = []
    for item in items:
        batch = tokenizer(item.prompt, return_tensors="pt")
        ids = model.generate(**batch, max_new_tokens=STEPS, do_sample=False)
        text = tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        expected.append(Result(item.id, item.domain, text == item.answer, text))
    assert {result.correct for result in expected} == {True, False}
    assert score(folder, "evaluation", limit=limit, batch_size=3).results == tuple(expected)


def test_an_answer_without_an_end_is_wrong(mini: Path) -> None:
    """A checkpoint that cannot say <eos> has no exact answer, however it begins."""
    model = AutoModelForCausalLM.from_pretrained(mini / "safety")
    model.lm_head.weight.data[model.config.eos_token_id] = 0
    mute = mini.parent / "mute"
    model.save_pretrained(mute)
    AutoTokenizer.from_pretrained(mini / "safety").save_pretrained(mute)
    results = score(mute, "calibration", pool=mini, domains=["safety"]).results
    ended = [len(result.output.split()) < STEPS for result in results]
    assert not all(ended)
    assert not any(r.correct for r, end in zip(results, ended, strict=True) if not end)


def test_limit_domains_and_progress() -> None:
    heard: list[tuple[int, int]] = []
    scores = score(
        POOL / "safety",
        "calibration",
        limit=5,
        domains=["safety", "math"],
        batch_size=2,
        progress=lambda *event: heard.append(event),
    )
    items = [i for d in ("safety", "math") for i in load_items("calibration", d)[:5]]
    assert [result.id for result in scores.results] == [item.id for item in items]
    assert heard == [(n, 10) for n in (2, 4, 5, 7, 9, 10)]


def test_the_number_of_threads_is_given_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        during: list[int] = []
        score(
            POOL / "math",
            limit=2,
            domains=["math"],
            progress=lambda *_: during.append(torch.get_num_threads()),
        )
        assert set(during) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_fractions_and_macro() -> None:
    marks = [("a", True), ("a", False), ("a", False), ("a", False), ("b", True)]
    scores = Scores(tuple(Result(str(i), d, ok, "") for i, (d, ok) in enumerate(marks)))
    assert scores.domains == {"a": 0.25, "b": 1.0}
    assert scores.macro == pytest.approx(0.625)
