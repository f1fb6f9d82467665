"""MXFP4 as gpt-oss stores it: against 64 bits and transformers, whole and in pieces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.source import FormedValues
from sigmerge.errors import PoolError
from sigmerge.merge3.candidate import stored_weights
from tests.oracles import oracle_quantised as oracle
from tests.quantised import say

EXPERTS, WIDTH = 3, 64
PARTS = ("gate_up_proj", "down_proj")


def make_folder(folder: Path, seed: int) -> Path:
    """A tiny gpt-oss, saved by transformers, with its experts packed at random."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(seed)
    config = GptOssConfig(
        num_hidden_layers=1, num_local_experts=EXPERTS, vocab_size=48, hidden_size=WIDTH,
        intermediate_size=32, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for part in PARTS:
        name = f"model.layers.0.mlp.experts.{part}"
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(116, 124, shape, dtype=torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    say(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder


def test_values_are_those_of_64_bits_and_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = make_folder(tmp_path / "model", 1)
    stored = load_file(folder / "model.safetensors")
    opened = open_checkpoint(folder)
    assert opened.form == "MXFP4"
    found = dict(stored_weights(opened))
    for part in PARTS:
        name = f"model.layers.0.mlp.experts.{part}"
        packed = stored[name + "_blocks"], stored[name + "_scales"]
        np.testing.assert_array_equal(found[name], oracle.mxfp4(*packed), err_msg=name)
        peer = convert_moe_packed_tensors(*packed, dtype=torch.float32)
        np.testing.assert_array_equal(found[name], peer.numpy(), err_msg=name)
    assert not any(name.endswith(("_blocks", "_scales")) for name in found)


def test_values_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    opened = open_checkpoint(make_folder(tmp_path / "model", 1))
    tensor = opened.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    values = FormedValues(Reader())
    whole, one = values(tensor, 0, tensor.size), tensor.size // EXPERTS
    for start, stop in ((0, 1), (63, 129), (one - 5, one + 7), (one + 3, 2 * one + 1)):
        np.testing.assert_array_equal(values(tensor, start, stop), whole[start:stop])


def test_a_merge_loads_in_transformers_as_a_plain_model(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    recipe = {
        "merge_method": "linear", "dtype": "bfloat16",
        "models": [{"model": str(f), "parameters": {"weight": 0.5}} for f in folders],
    }  # fmt: skip
    sigmerge.merge(recipe, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.bfloat16
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    name = "model.layers.0.mlp.experts.down_proj"
    parts = [dict(stored_weights(open_checkpoint(folder)))[name] for folder in folders]
    expected = torch.from_numpy((parts[0] + parts[1]) / 2).bfloat16()
    assert torch.equal(model.state_dict()[name], expected)


@pytest.mark.parametrize("lost", ["_blocks", "_scales"])
def test_half_of_a_weight(tmp_path: Path, lost: str) -> None:
    folder = make_folder(tmp_path / "model", 1)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj" + lost]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PoolError, match="MXFP4 weights that cannot be read"):
        open_checkpoint(folder)
