"""Results of every class of transformers are checked as that class loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import sigmerge
from tests.command_line import sigmerge as command

TINY: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 2,
}  # fmt: skip
EYES = {k: v for k, v in TINY.items() if k not in ("vocab_size", "max_position_embeddings")}
EYES |= {"image_size": 8, "patch_size": 4}
GPT = {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
CLASSES = {
    "LlamaModel": lambda: hf.LlamaConfig(**TINY),
    "LlamaForSequenceClassification": lambda: hf.LlamaConfig(**TINY, num_labels=3),
    "LlamaForTokenClassification": lambda: hf.LlamaConfig(**TINY),
    "LlamaForQuestionAnswering": lambda: hf.LlamaConfig(**TINY),
    "Qwen2ForSequenceClassification": lambda: hf.Qwen2Config(**TINY, tie_word_embeddings=True),
    "GPT2Model": lambda: hf.GPT2Config(**GPT),
    "GPT2ForTokenClassification": lambda: hf.GPT2Config(**GPT),
    "GPT2DoubleHeadsModel": lambda: hf.GPT2Config(**GPT, num_labels=1),
    "BertModel": lambda: hf.BertConfig(**TINY),
    "BertForTokenClassification": lambda: hf.BertConfig(**TINY),
    "BertForSequenceClassification": lambda: hf.BertConfig(**TINY),
    "BertForMultipleChoice": lambda: hf.BertConfig(**TINY),
    "BertForNextSentencePrediction": lambda: hf.BertConfig(**TINY),
    "BertForPreTraining": lambda: hf.BertConfig(**TINY),
    "AlbertForMaskedLM": lambda: hf.AlbertConfig(**TINY, embedding_size=8),
    "RobertaModel": lambda: hf.RobertaConfig(**TINY),
    "T5EncoderModel": lambda: hf.T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=2,
                                          num_heads=2),
    "ViTForImageClassification": lambda: hf.ViTConfig(**EYES),
    "CLIPModel": lambda: hf.CLIPConfig(
        text_config=hf.CLIPTextConfig(**TINY).to_dict(),
        vision_config=hf.CLIPVisionConfig(**EYES).to_dict()),
}  # fmt: skip


def make(name: str, folder: Path) -> list[Path]:
    places = [folder / member for member in ("reference", "one", "other")]
    for seed, place in enumerate(places):
        torch.manual_seed(seed)
        getattr(hf, name)(CLASSES[name]()).save_pretrained(place)
    return places


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_that_its_class_loads_is_as_it_should_be(tmp_path: Path, name: str) -> None:
    reference, *experts = make(name, tmp_path)
    found = command("verify", "--pool", "--strict", reference, *experts)
    assert found.code == 0 and found.out.startswith(f"{reference}: as it should be")
    models = [{"model": str(each), "parameters": {"weight": 0.5}} for each in experts]
    recipe = {
        "merge_method": "task_arithmetic", "base_model": str(reference), "models": models,
    }  # fmt: skip
    sigmerge.merge(recipe, tmp_path / "out", strict=True)
    (report,) = sigmerge.verify(tmp_path / "out")
    assert report.findings == () and "architecture" in report.checked


def test_a_classifier_without_its_classes_is_damaged(tmp_path: Path) -> None:
    reference, expert, _ = make("LlamaForSequenceClassification", tmp_path)
    for place in (reference, expert):
        weights = load_file(place / "model.safetensors")
        del weights["score.weight"]
        save_file(weights, place / "model.safetensors", {"format": "pt"})
    models = [{"model": str(e), "parameters": {"weight": 0.5}} for e in (reference, expert)]
    sigmerge.merge({"merge_method": "linear", "models": models}, tmp_path / "out")
    (report,) = sigmerge.verify(tmp_path / "out")
    assert [str(f) for f in report.findings] == ["architecture: score.weight: is missing"]


def test_a_layer_that_predicts_a_further_token_is_counted(tmp_path: Path) -> None:
    """transformers leaves it out; the configuration says that it is there."""
    reference, expert, _ = make("LlamaModel", tmp_path)
    for place in (reference, expert):
        file = place / "config.json"
        config = json.loads(file.read_text())
        file.write_text(
            json.dumps({**config, "num_hidden_layers": 1, "num_nextn_predict_layers": 1})
        )
    found = command("verify", "--pool", reference, expert)
    assert found.code == 0, found
