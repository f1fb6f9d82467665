"""`sigmerge try`: a good merge passes, broken ones do not, and what was asked is answered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sigmerge.nano.files import POOL
from tests.command_line import refused
from tests.command_line import sigmerge as command

CHATML = (
    "{% for m in messages %}<bos> {{ m.role }} {{ m.content }} END {% endfor %}"
    "{% if add_generation_prompt %}<bos> assistant {% endif %}"
)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("try")
    pool = root / "pool"
    for name in ("reference", "math", "coding"):
        shutil.copytree(POOL / name, pool / name)
    recipe = {
        "merge_method": "task_arithmetic", "base_model": str(pool / "reference"),
        "models": [{"model": str(pool / name), "name": name} for name in ("math", "coding")],
        "parameters": {"weight": 0.4}, "dtype": "bfloat16",
    }  # fmt: skip
    (root / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    command("merge", root / "recipe.yaml", root / "merged")
    return root / "merged"


def copied(merged: Path, to: Path) -> dict[str, torch.Tensor]:
    shutil.copytree(merged, to)
    return load_file(to / "model.safetensors")


def store(weights: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_template(folder: Path, template: str) -> None:
    file = folder / "tokenizer_config.json"
    told = json.loads(file.read_text(encoding="utf-8")) | {"chat_template": template}
    file.write_text(json.dumps(told), encoding="utf-8")


def tried(folder: Path, *more: str, code: int = 0) -> dict[str, Any]:
    ran = command("try", folder, *more, "--json")
    assert ran.code == code, ran
    return dict(ran.json)


def test_a_merge_stands_beside_its_parents(merged: Path) -> None:
    found = tried(merged)
    assert found["verdict"] == "fine"
    assert [each["name"] for each in found["parents"]] == ["reference", "math", "coding"]
    assert set(found["checkpoint"]["perplexity"]) == {"math", "code"}  # its tokenizer's words
    own = {each["name"]: each["perplexity"] for each in found["parents"]}
    assert own["math"]["math"] < found["checkpoint"]["perplexity"]["math"] < own["coding"]["math"]
    assert own["coding"]["code"] < found["checkpoint"]["perplexity"]["code"] < own["math"]["code"]
    assert any("english" in note for note in found["notes"])


def test_the_perplexity_is_that_of_transformers(merged: Path) -> None:
    """Against a plain loop over the texts that the tokenizer knows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sigmerge.probing.trial import trial_texts

    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    nats = tokens = 0
    for first, rest in trial_texts()[0]["math"]:
        before, after = (
            tokenizer(each, add_special_tokens=False).input_ids for each in (first, rest)
        )
        if tokenizer.unk_token_id in [*before, *after]:
            continue
        begun = tokenizer(first).input_ids
        logits = model(torch.tensor([[*begun, *after]])).logits[0].float().log_softmax(-1)
        for place, token in enumerate(after, len(begun)):
            nats -= float(logits[place - 1, token])
            tokens += 1
    expected = float(torch.tensor(nats / tokens).exp())
    assert tried(merged, "--alone")["checkpoint"]["perplexity"]["math"] == pytest.approx(
        expected, 1e-3
    )


def test_shuffled_weights_are_broken(merged: Path, tmp_path: Path) -> None:
    weights = copied(merged, tmp_path / "bad")
    drawn = torch.Generator().manual_seed(0)
    for name, each in weights.items():
        if ".mlp." in name:
            order = torch.randperm(each.numel(), generator=drawn)
            weights[name] = each.flatten()[order].reshape(each.shape)
    store(weights, tmp_path / "bad")
    found = tried(tmp_path / "bad", code=3)
    assert found["verdict"] == "broken"
    assert any("worse than its worst parent" in reason for reason in found["reasons"])
    assert any(
        "guessing" in reason for reason in tried(tmp_path / "bad", "--alone", code=3)["reasons"]
    )


def test_a_layer_of_zeros_and_numbers_that_are_not_finite(merged: Path, tmp_path: Path) -> None:
    weights = copied(merged, tmp_path / "zero")
    layer = [name for name in weights if name.startswith("model.layers.2.")]
    store(weights | {name: torch.zeros_like(weights[name]) for name in layer}, tmp_path / "zero")
    ran = command("try", tmp_path / "zero")
    said = ran.out
    assert ran.code == 3
    assert "verdict: broken" in said and "Nothing but zeros is in model.layers.2." in said
    weights["model.norm.weight"][0] = float("nan")
    copied(merged, tmp_path / "nan")
    store(weights, tmp_path / "nan")
    said = command("try", tmp_path / "nan", "--alone").out
    assert "not finite" in said and "verdict: broken" in said


def test_a_template_whose_answers_do_not_end(merged: Path, tmp_path: Path) -> None:
    copied(merged, tmp_path / "chat")
    with_template(tmp_path / "chat", CHATML.replace("END", "<eos>"))
    found = tried(tmp_path / "chat", "--alone")
    assert found["verdict"] == "fine" and found["checkpoint"]["template"]
    with_template(tmp_path / "chat", CHATML.replace("END", "<|im_end|>"))
    found = tried(tmp_path / "chat")
    assert found["verdict"] == "doubtful"
    assert any("<|im_end|>, which is no token" in reason for reason in found["reasons"])
    assert any("answers will not end" in reason for reason in found["reasons"])
    with_template(tmp_path / "chat", "{{ raise_exception('no') }}")
    [reason] = tried(tmp_path / "chat", "--alone")["reasons"]
    assert "cannot be applied" in reason


def test_a_prompt_is_answered(merged: Path, tmp_path: Path) -> None:
    found = json.loads(command("try", merged, "7 + 20 =", "--json").out)
    assert (found["answer"], found["templated"]) == ("27", False)
    assert command("try", merged, "7 + 20 =").out.strip() == "27"
    assert (
        json.loads(command("try", merged, "7 +", "--max-new-tokens", "1", "--json").out)["tokens"]
        == 1
    )


def test_a_dry_run_says_what_is_loaded(merged: Path) -> None:
    [step] = json.loads(command("try", merged, "--dry-run", "--json").out)["steps"]
    assert list(step["models"]) == ["merged", "reference", "math", "coding"]
    weights = sum(Path(p, "model.safetensors").stat().st_size for p in step["models"].values())
    assert 0.95 * weights < step["bytes_to_read"] <= weights


def test_a_parent_that_was_changed_is_not_compared(merged: Path, tmp_path: Path) -> None:
    copied(merged, tmp_path / "moved")
    record = tmp_path / "moved/sigmerge/provenance.json"
    shutil.rmtree(record.parent)
    found = tried(tmp_path / "moved")
    assert not found["parents"] and any("provenance" in note for note in found["notes"])


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "config.json" in refused(3, "try", tmp_path, beside=tmp_path)


def test_repeated_triples() -> None:
    from sigmerge.probing.trial import repeated_share

    assert repeated_share([[1, 2, 3, 4]]) == 0
    assert repeated_share([[7] * 12]) == pytest.approx(0.9)
    assert repeated_share([[1, 2, 3], [1, 2, 3]]) == 0  # two answers may say the same
    assert repeated_share([[1]]) == 0
