"""Experts of mixtures in another order merge as if they stood in the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.matched_experts import _assigned, assignment, find_mixtures
from sigmerge.errors import PoolError, RecipeError
from tests.command_line import sigmerge as command

EXPERTS = 8
SIZE = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 48,
    "max_position_embeddings": 64, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_shared_experts": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
COUNTS = {
    "mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_experts",
    "deepseek_v3": "n_routed_experts", "gpt_oss": "num_local_experts",
}  # fmt: skip


def models(root: Path, kind: str) -> dict[str, Path]:
    """A base and two models that were moved away from it, as transformers stores them."""
    import transformers

    groups = {"n_group": 2} if kind == "deepseek_v3" else {}
    config = transformers.AutoConfig.for_model(kind, **SIZE, **groups, **{COUNTS[kind]: EXPERTS})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    start = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    for name in ("base", "math", "coding"):
        moved = {n: v + (0.3 * torch.randn_like(v) if name != "base" else 0)
                 for n, v in start.items()}  # fmt: skip
        model.load_state_dict(moved)
        model.save_pretrained(root / name)
    return {name: root / name for name in ("base", "math", "coding")}


def stacked(folder: Path) -> None:
    """Store the experts of each layer as one tensor, as newer versions of transformers do."""
    found = load_file(folder / "model.safetensors")
    for kind in ("gate_proj", "up_proj", "down_proj"):
        for part in {n.partition(".experts.")[0] for n in found if f".experts.0.{kind}" in n}:
            names = [f"{part}.experts.{i}.{kind}.weight" for i in range(EXPERTS)]
            found[f"{part}.experts.{kind}"] = torch.stack([found.pop(name) for name in names])
    save_file(found, folder / "model.safetensors")


def permuted(folder: Path, out: Path, order: Mapping[str, list[int]]) -> Path:
    """A copy whose place i has expert order[i], by the names of its mixtures' parts."""
    shutil.copytree(folder, out)
    found = load_file(out / "model.safetensors")
    mixtures = find_mixtures(open_checkpoint(folder))
    changed = dict(found)
    for part, mixture in mixtures.items():
        for names in mixture.single.values():
            changed |= {name: found[names[order[part][i]]] for i, name in enumerate(names)}
        for name in mixture.stacked:
            rows = found[name].shape[0] == EXPERTS
            changed[name] = found[name][order[part]] if rows else found[name][:, order[part]]
    save_file({n: v.clone() for n, v in changed.items()}, out / "model.safetensors")
    return out


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def recipe(folders: Mapping[str, Path], coding: Path, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(f), "name": n, "parameters": {"weight": 0.7, "density": 0.6}}
               for n, f in (("math", folders["math"]), ("coding", coding))]  # fmt: skip
    return {"merge_method": "ties", "base_model": str(folders["base"]), "models": entries, **more}


@pytest.mark.parametrize("kind", [*COUNTS, "stacked"])
def test_a_permuted_copy_merges_as_the_model_does(kind: str, tmp_path: Path) -> None:
    folders = models(tmp_path, "qwen3_moe" if kind == "stacked" else kind)
    if kind == "stacked":
        for folder in folders.values():
            stacked(folder)
    mixtures = find_mixtures(open_checkpoint(folders["base"]))
    assert len(mixtures) == (1 if kind == "deepseek_v3" else 2)
    draw = np.random.default_rng(1)
    order = {part: draw.permutation(EXPERTS).tolist() for part in mixtures}
    if kind == "deepseek_v3":  # its router chooses a group first, so groups stay together
        order = {part: [6, 4, 7, 5, 1, 0, 3, 2] for part in mixtures}
    other = permuted(folders["coding"], tmp_path / "other", order)
    plain = sigmerge.merge(recipe(folders, folders["coding"]), tmp_path / "plain")
    made = sigmerge.merge(recipe(folders, other, match_experts=True), tmp_path / "made")
    assert weights(tmp_path / "made") == weights(tmp_path / "plain")
    back = {part: np.argsort(found).tolist() for part, found in order.items()}
    same = dict.fromkeys(mixtures, tuple(range(EXPERTS)))
    assert made.plan.matched["math"] == same and not plain.plan.matched
    assert {p: list(o) for p, o in made.plan.matched["coding"].items()} == back
    sigmerge.merge(recipe(folders, other), tmp_path / "unmatched")
    assert weights(tmp_path / "unmatched") != weights(tmp_path / "plain")


def test_what_a_dry_run_says(tmp_path: Path) -> None:
    folders = models(tmp_path, "qwen3_moe")
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(folders, folders["coding"], match_experts=True)))
    ran = command("merge", file, tmp_path / "out", "--dry-run")
    assert ran.code == 0, ran.err
    said = " ".join((ran.out + ran.err).split())
    assert "coding: 0 of 16 experts, in 2 mixtures, are merged under another number" in said
    base, own = (load_file(folders[n] / "model.safetensors") for n in ("base", "coding"))
    far = []
    for layer in range(2):
        block = [n for n in base if f".layers.{layer}." in n and ".mlp." not in n]
        apart = sum(float((own[n] - base[n]).double().square().sum()) for n in block)
        far.append((apart / sum(float(base[n].double().square().sum()) for n in block)) ** 0.5)
    assert f"a router moved by up to {100 * max(far):.2g} % of its norm" in said


def test_a_repair_of_a_permuted_copy(tmp_path: Path) -> None:
    """Its task vectors are those of the matched experts, and a replay finds the same ones."""
    folders = models(tmp_path, "mixtral")
    mixtures = find_mixtures(open_checkpoint(folders["base"]))
    other = permuted(folders["coding"], tmp_path / "other",
                     {part: [3, 1, 2, 0, 7, 6, 5, 4] for part in mixtures})  # fmt: skip
    scores = {"experts": {"math": {"math": 0.9, "coding": 0.1},
                          "coding": {"math": 0.1, "coding": 0.8}},
              "anchor": {"math": 0.6, "coding": 0.5}}  # fmt: skip
    repair = {"scores": scores}
    sigmerge.merge(recipe(folders, folders["coding"], repair=repair), tmp_path / "plain")
    made = recipe(folders, other, repair=repair, match_experts=True)
    done = sigmerge.merge(made, tmp_path / "made")
    assert weights(tmp_path / "made") == weights(tmp_path / "plain")
    assert set(done.plan.matched) == {"math", "coding"}
    assert command("verify", tmp_path / "made").code == 0


def test_what_cannot_be_matched(tmp_path: Path) -> None:
    import transformers

    for name in ("a", "b"):
        config = transformers.LlamaConfig(**SIZE)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    dense = {"merge_method": "linear", "match_experts": True, "models": [
        {"model": str(tmp_path / n), "parameters": {"weight": 1}} for n in ("a", "b")]}  # fmt: skip
    with pytest.raises(PoolError, match="has no experts behind routers"):
        sigmerge.merge(dense, tmp_path / "out")
    with pytest.raises(RecipeError, match="captures what enters each expert"):
        sigmerge.merge({**dense, "merge_method": "regmean"}, tmp_path / "out")
    whole = {"model": str(tmp_path / "a"), "layer_range": [0, 2]}
    stack = {"merge_method": "passthrough", "match_experts": True,
             "slices": [{"sources": [whole]}, {"sources": [whole]}]}  # fmt: skip
    with pytest.raises(RecipeError, match="whole models are matched, not of slices"):
        sigmerge.merge(stack, tmp_path / "out")


def test_assignments_are_the_best() -> None:
    draw = np.random.default_rng(0)
    for count in (1, 2, 5):
        for _ in range(20):
            gain = draw.integers(0, 5, (count, count)).astype(float)
            found = assignment(gain)
            assert sorted(found) == list(range(count))
            best = max(sum(gain[i, p[i]] for i in range(count)) for p in permutations(range(count)))
            assert sum(gain[i, found[i]] for i in range(count)) == best
    assert _assigned(np.ones((6, 6)), 1) == tuple(range(6))  # equal experts stay
