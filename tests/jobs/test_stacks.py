"""Stacks beside their parts in transformers; benchmarks/meaning/stacks.py has all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.meaning.stacks import stack

WRITTEN = {
    "Llama": {},
    "Qwen2, a window from a layer on": {"layer_types"},
    "Gemma-2": {"layer_types"},
    "Gemma-3": {"layer_types"},
    "gpt-oss": {"layer_types"},
    "SmolLM3": {"no_rope_layers"},
    "GPT-Neo": {"attention_types"},
    "LFM2": {"layer_types", "full_attn_idxs"},
    "Qwen3-MoE": {"mlp_only_layers"},
    "Llama-4": {"layer_types", "no_rope_layers", "moe_layers"},
    "DeepSeek-V3": {"first_k_dense_replace"},
}
"""Of each kind of model, where its stack's configuration says what an index decided."""


@pytest.mark.parametrize("name", WRITTEN)
def test_every_layer_computes_what_it_did_in_its_own_model(tmp_path: Path, name: str) -> None:
    found = stack(name, tmp_path)
    assert found.equal, found
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.keys() >= set(WRITTEN[name])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("GLM-4-MoE", "first_k_dense_replace"),
        ("Jamba", "attn_layer_period"),
        ("MiniMax", "the decay of its linear attention"),
        ("GPT-2, attention scaled by index", "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(tmp_path: Path, name: str, key: str) -> None:
    found = stack(name, tmp_path)
    assert f"{key} of the configuration decides that by a layer's index" in found.refused
    assert not (tmp_path / "out").exists()
