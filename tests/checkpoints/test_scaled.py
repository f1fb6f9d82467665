"""FP8 with scales of blocks, rows and tensors: against 64 bits, transformers, and plain folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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
from tests.command_line import sigmerge as command
from tests.oracles import oracle_quantised as oracle
from tests.pools import PoolOnDisk, make_pool
from tests.quantised import FP8, say, to_fp8

BLOCK = (6, 5)
"""Divides neither rows nor columns: the last blocks are cut off."""


def blocks(method: str = "fp8", block: tuple[int, int] = BLOCK) -> dict[str, Any]:
    return {"quant_method": method, "fmt": "e4m3", "weight_block_size": list(block)}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


FORMS = {
    "blocks": (blocks(), BLOCK, "_scale_inv"),
    "blocks of compressed-tensors": (compressed("block", block_structure=[6, 5]), BLOCK, "_scale"),
    "rows": (compressed("channel"), (1, 10**6), "_scale"),
    "tensors": (compressed("tensor"), None, "_scale"),
    "tensors of modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, None, "_scale"),
    "rows of fbgemm": ({"quant_method": "fbgemm_fp8"}, (1, 10**6), "_scale"),
}


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", experts=2, layers=1, dtype="bf16")


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_64_bits(pool: PoolOnDisk, form: str) -> None:
    config, block, suffix = FORMS[form]
    folder = pool.experts["math"]
    made = to_fp8(folder, config, block, suffix)
    found = open_checkpoint(folder)
    assert "quantization_config" not in found.config
    values = dict(stored_weights(found))
    assert values.keys() == load_file(pool.reference / "model.safetensors").keys()
    for name, (codes, scale) in made.items():
        expected = oracle.scaled(codes, scale, block or tuple(codes.shape))
        assert found.tensors[name].dtype == "BF16"
        np.testing.assert_array_equal(values[name], expected.astype(np.float32), err_msg=name)


def test_values_do_not_depend_on_the_cut(pool: PoolOnDisk) -> None:
    to_fp8(pool.reference, blocks(), BLOCK)
    tensor = open_checkpoint(pool.reference).tensors["model.layers.0.mlp.down_proj.weight"]
    values = FormedValues(Reader())
    whole = values(tensor, 0, tensor.size)
    for start, stop in ((0, 1), (31, 33), (100, 401), (tensor.size - 3, tensor.size)):
        np.testing.assert_array_equal(values(tensor, start, stop), whole[start:stop])


def test_a_stack_of_experts_and_exponents_as_scales(tmp_path: Path, pool: PoolOnDisk) -> None:
    folder, name = pool.reference, "model.layers.0.mlp.experts.down_proj"
    draw = torch.Generator().manual_seed(3)
    codes = torch.randn(3, 12, 10, generator=draw).to(FP8)
    exponents = torch.randint(120, 134, (3, 2, 2), generator=draw, dtype=torch.uint8)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: codes, name + "_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    save_file(tensors, folder / "model.safetensors")
    say(folder, blocks())
    found = dict(stored_weights(open_checkpoint(folder)))[name]
    powers = torch.exp2(exponents.double() - 127)
    np.testing.assert_array_equal(found, oracle.scaled(codes, powers, BLOCK))


def test_a_merge_is_that_of_the_dequantised_folders(pool: PoolOnDisk, tmp_path: Path) -> None:
    """And its configuration does not say that it is quantised; transformers loads it."""
    plain = tmp_path / "plain"
    shutil.copytree(pool.root, plain)
    for folder in (pool.reference, *pool.experts.values()):
        made = to_fp8(folder, blocks(), BLOCK)
        twin = plain / folder.name / "model.safetensors"
        exact = {
            n: torch.from_numpy(oracle.scaled(*pair, BLOCK)).float() for n, pair in made.items()
        }
        save_file(load_file(twin) | exact, twin)

    def merge(root: Path, out: Path) -> dict[str, torch.Tensor]:
        recipe = {
            "merge_method": "ties", "base_model": str(root / "reference"), "dtype": "bfloat16",
            "models": [{"model": str(root / name)} for name in pool.experts],
            "parameters": {"density": 0.5, "weight": 0.5},
        }  # fmt: skip
        sigmerge.merge(recipe, out)
        return load_file(out / "model.safetensors")

    one, other = merge(pool.root, tmp_path / "one"), merge(plain, tmp_path / "other")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    config = json.loads((tmp_path / "one/config.json").read_text())
    assert "quantization_config" not in config
    from transformers import AutoModelForCausalLM

    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]


def test_transformers_reads_the_same_numbers(tmp_path: Path) -> None:
    """Its own dequantisation of blocks, in the type that the model computes in."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    pool = make_pool(tmp_path / "pool", experts=1, layers=1, dtype="bf16")
    to_fp8(pool.reference, blocks(block=(8, 8)), (8, 8))
    how = FineGrainedFP8Config(weight_block_size=(8, 8), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        pool.reference, quantization_config=how, dtype=torch.float32
    )
    peer, found = model.state_dict(), dict(stored_weights(open_checkpoint(pool.reference)))
    for name, values in found.items():
        np.testing.assert_array_equal(peer[name].float().numpy(), values, err_msg=name)


def test_scales_of_activations_are_left_out_and_named(pool: PoolOnDisk) -> None:
    folder, name = pool.reference, "model.layers.0.mlp.up_proj.input_scale"
    to_fp8(folder, blocks(), BLOCK)
    tensors = load_file(folder / "model.safetensors") | {name: torch.tensor(0.5)}
    save_file(tensors, folder / "model.safetensors")
    found = open_checkpoint(folder)
    assert name not in found.tensors
    assert any(name in note for note in found.notes)


def test_the_dry_run_and_inspect_say_it(pool: PoolOnDisk) -> None:
    to_fp8(pool.experts["math"], blocks(), BLOCK)
    seen = command("inspect", pool.experts["math"])
    assert "FP8, blocks of 6×5" in seen.out
    recipe = pool.write(pool.recipe("linear"))
    told = command("merge", recipe, pool.root / "out", "--dry-run")
    assert "math: FP8, blocks of 6×5: 7 weights are dequantised while they are read" in told.out


WRONG = {
    "no scales": (lambda t, n: t.pop(n + "_scale_inv"), "with no scales"),
    "scales of another shape": (
        lambda t, n: t.update({n + "_scale_inv": torch.ones(2, 2)}), "with scales of shape [2, 2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_weights_whose_scales_do_not_fit(pool: PoolOnDisk, what: str) -> None:
    change, said = WRONG[what]
    folder = pool.reference
    name = sorted(to_fp8(folder, blocks(), BLOCK))[0]
    tensors = load_file(folder / "model.safetensors")
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(PoolError) as raised:
        open_checkpoint(folder)
    assert said in str(raised.value) and name in str(raised.value)


@pytest.mark.parametrize("config", [
    {"quant_method": "awq"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
])  # fmt: skip
def test_other_forms_are_refused_with_what_to_do(pool: PoolOnDisk, config: dict[str, Any]) -> None:
    say(pool.reference, config)
    (pool.reference / "model.safetensors").unlink()  # no tensor is looked at before
    with pytest.raises(PoolError, match="use the checkpoint they were made from"):
        open_checkpoint(pool.reference)


def test_a_value_that_is_no_number_is_named(pool: PoolOnDisk, tmp_path: Path) -> None:
    folder = pool.experts["math"]
    name = sorted(to_fp8(folder, blocks(), BLOCK))[0]
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(torch.uint8)[1, 2] = 0x7F
    save_file(tensors, folder / "model.safetensors")
    recipe = {"merge_method": "linear", "models": [
        {"model": str(f), "parameters": {"weight": 0.5}} for f in pool.experts.values()
    ]}  # fmt: skip
    with pytest.raises(PoolError, match=f"{name} holds nan"):
        sigmerge.merge(recipe, tmp_path / "out")
