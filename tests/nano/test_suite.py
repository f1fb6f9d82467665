"""Answers to a pool's items: those of transformers' own generation, on one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import evaluate, nano_scores
from sigmerge.evaluation.suite import nano_suite
from sigmerge.nano import suite
from sigmerge.nano.facts import NANO_DOMAINS
from sigmerge.nano.files import POOL, load_items
from sigmerge.nano.suite import ANSWER_STEPS, answer
from tests.nano.measure import answers

pytestmark = pytest.mark.usefixtures("own_cache")


def test_batched_answers_are_those_of_generate() -> None:
    """The pool's scores are those of generation one prompt at a time, with no code of ours."""
    folder, limit = POOL / "reference", 8
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    items = [item for domain in NANO_DOMAINS for item in load_items("evaluation", domain)[:limit]]
    expected = {}
    for item in items:
        batch = tokenizer(item.prompt, return_tensors="pt")
        ids = model.generate(**batch, max_new_tokens=ANSWER_STEPS, do_sample=False)
        text = tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        expected[item.id] = (text, text == item.answer)
    assert {right for _, right in expected.values()} == {True, False}
    assert answers(folder, "evaluation", limit=limit) == expected
    prompts = [item.prompt for item in items]
    assert answer(model, tokenizer, prompts, batch_size=3) == [t for t, _ in expected.values()]


def test_an_answer_without_an_end_is_wrong(mini: Path) -> None:
    """A checkpoint that cannot say <eos> has no exact answer, however it begins."""
    model = AutoModelForCausalLM.from_pretrained(mini / "safety")
    model.lm_head.weight.data[model.config.eos_token_id] = 0
    mute = mini.parent / "mute"
    model.save_pretrained(mute)
    AutoTokenizer.from_pretrained(mini / "safety").save_pretrained(mute)
    found = answers(mute, "calibration", mini)
    endless = [right for output, right in found.values() if len(output.split()) >= ANSWER_STEPS]
    assert endless and not any(endless)


def test_one_thread_answers_and_their_number_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, during = torch.get_num_threads(), []

    def spied(model: object, ids: torch.Tensor, eos: int, plain: object = suite._greedy) -> object:
        during.append(torch.get_num_threads())
        return plain(model, ids, eos)  # type: ignore[operator]

    monkeypatch.setattr(suite, "_greedy", spied)
    try:
        torch.set_num_threads(2)
        how = How(limit=2, only=("nano_math",))
        nano_scores(POOL / "math", "calibration", how=how)
        assert set(during) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_another_pool_is_known_by_its_content(mini: Path, tmp_path: Path) -> None:
    """Equal items elsewhere are not scored again; other items are, also under the same ids."""
    how = How(limit=5)
    first = evaluate(POOL / "math", nano_suite(), "calibration", how)
    moved = tmp_path / "moved"
    (moved / "splits").parent.mkdir()
    (moved / "splits").symlink_to(POOL / "splits")
    again = evaluate(POOL / "math", nano_suite(moved), "calibration", how)
    assert (again.reused_items, again.domains) == (25, first.domains)
    lines = (
        (POOL / "splits/calibration/math.jsonl").read_text().replace('"answer": "', '"answer": "x')
    )
    (moved / "splits").unlink()
    for split in ("calibration", "evaluation"):
        (moved / "splits" / split).mkdir(parents=True)
        for domain in NANO_DOMAINS:
            file = moved / "splits" / split / f"{domain}.jsonl"
            file.write_text((POOL / "splits" / split / f"{domain}.jsonl").read_text())
    (moved / "splits/calibration/math.jsonl").write_text(
        lines.replace('"answer": "', '"answer": "x')
    )
    other = evaluate(POOL / "math", nano_suite(moved), "calibration", how)
    assert other.reused_items == 20
    assert other.domains == {**first.domains, "math": 0.0}
