"""Kinds of adapters beside PEFT in use; benchmarks/meaning/adapters.py has all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.meaning.adapters import KINDS, Kind, make_adapter, make_model, outcome
from benchmarks.meaning.page import PAGE

import sigmerge
from sigmerge.errors import SigmergeError

ROOT = Path(__file__).parents[2]
BY_TITLE = {kind.title: kind for kind in KINDS}
PARTED = {
    "Llama, tied: embedding": True,
    "Llama, tied: embedding and head": True,
    "Llama, tied: embedding, `ensure_weight_tying`": False,
    "Llama, tied: head, `save_embedding_layers: false`": True,
    "Llama, tied: both tied, another α for the head": True,
    "Llama, tied: both tied, DoRA": True,
    "Llama, tied: embedding; the file has a head": True,
    "Llama, tied: embedding in `modules_to_save`, two more tokens": True,
    "GPT-2: embedding": True,
    "GPT-2: both in `modules_to_save`": True,
    "Gemma-3 with eyes: embedding": True,
}
"""Whether head and embedding part; kinds that stay whole are the business of other tests."""


def tied_in(config: dict[str, object]) -> set[object]:
    """What a configuration, and that of the model of text in it, says about the tie."""
    inner = config.get("text_config")
    more = tied_in(inner) if isinstance(inner, dict) else set()
    return {config.get("tie_word_embeddings", True), *more}


@pytest.mark.parametrize("title", PARTED)
def test_a_tied_model_computes_what_it_does_with_the_adapter_in_use(
    tmp_path: Path, title: str
) -> None:
    found = outcome(BY_TITLE[title], tmp_path)
    assert found.equal, found
    assert found.tied is not PARTED[title]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tied_in(config) == {not PARTED[title]}
    (report,) = sigmerge.verify(tmp_path / "out")
    assert not report.findings


@pytest.mark.parametrize(
    "title", ["BERT, masked: embedding", "BERT, masked: embedding in `modules_to_save`"]
)
def test_what_cannot_be_parted_is_refused(tmp_path: Path, title: str) -> None:
    assert "which is not done for a masked model" in outcome(BY_TITLE[title], tmp_path).refused


def test_a_scaled_head_is_parted_only_where_the_configuration_says_that_it_is_scaled(
    tmp_path: Path,
) -> None:
    kind = BY_TITLE["T5: head"]
    assert outcome(kind, tmp_path).equal
    base, adapter = tmp_path / "model", tmp_path / "adapter"
    config = json.loads((base / "config.json").read_text())
    assert config.pop("scale_decoder_outputs") is True
    (base / "config.json").write_text(json.dumps(config))
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{base}+{adapter}"}]}
    with pytest.raises(SigmergeError, match="not done for an encoder-decoder"):
        sigmerge.merge(recipe, tmp_path / "other")


def test_the_page_has_every_kind_and_counts_them() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    section = text.partition("## Adapters\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", section, re.M)[1:]]
    assert {f"{row[0]}: {row[1]}" for row in rows} == set(BY_TITLE)
    told = re.search(r"Of (\d+) kinds of adapter (\d+) give .* (\d+) are refused", section)
    assert told is not None
    refused = [row for row in rows if row[3] == "refused"]
    assert [int(told[1]), int(told[3])] == [len(KINDS), len(refused)]
    assert len(refused) < len(KINDS) / 3


def test_a_head_that_peft_ties_by_its_setting_follows_an_embedding(tmp_path: Path) -> None:
    """A file without the head's own update; PEFT makes it of the embedding's when it loads it."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    settings = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    base, adapter = tmp_path / "model", tmp_path / "adapter"
    make_model(base, "Llama, tied", copied=False)
    make_adapter(adapter, base, Kind("Llama, tied", "without", settings))
    file = adapter / "adapter_model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "lm_head" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    recipe = {"merge_method": "passthrough", "models": [{"model": f"{base}+{adapter}"}]}
    sigmerge.merge(recipe, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    theirs = PeftModel.from_pretrained(plain, str(adapter)).eval()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    prompt = torch.tensor([[3, 7, 5]])
    torch.testing.assert_close(ours(prompt).logits, theirs(prompt).logits)
    assert ours.config.tie_word_embeddings
