"""Checkpoints of one model whose files name, join or copy tensors each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sigmerge
from sigmerge.checkpoints.align_names import alike
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.lazy import RetypedTensor
from sigmerge.errors import PoolError
from tests.pools import Weights, make_pool, read_weights, write_member

EMBEDDING = "model.embed_tokens.weight"
ROTARY = "model.layers.{}.self_attn.rotary_emb.inv_freq"

SPARE: dict[str, Callable[[Weights], Weights]] = {
    "frequencies": lambda _: {ROTARY.format(i): np.ones(4, np.float32) for i in range(2)},
    "masks": lambda _: {
        "model.layers.0.attn.bias": np.ones((1, 1, 4, 4), np.float32),
        "model.layers.0.attn.masked_bias": np.ones((), np.float32),
    },
    "positions": lambda _: {"model.embeddings.position_ids": np.ones((1, 4), np.float32)},
    "a value head": lambda _: {"v_head.summary.weight": np.ones((1, 16), np.float32)},
    "a copy of the embedding": lambda own: {"encoder.embed_tokens.weight": own[EMBEDDING].copy()},
}
NEEDED: dict[str, Callable[[Weights], Weights]] = {
    "a bias": lambda _: {"model.layers.0.attn.bias": np.ones(4, np.float32)},
    "another embedding": lambda own: {"encoder.embed_tokens.weight": own[EMBEDDING] + 1},
    "half an embedding": lambda own: {"encoder.embed_tokens.weight": own[EMBEDDING][:24]},
    "an unknown tensor": lambda _: {"model.adapter.weight": np.ones(4, np.float32)},
}


def rewritten(folder: Path, change: Callable[[Weights], Weights]) -> Path:
    """A member with other tensors, beside its own place."""
    return write_member(folder.with_name(f"{folder.name}-too"), change(read_weights(folder)))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("where", ["reference", "expert"])
@pytest.mark.parametrize("spare", SPARE)
def test_what_no_model_needs_is_left_out(tmp_path: Path, spare: str, where: str) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "plain")
    more = SPARE[spare]
    paths = {"reference": pool.reference, "expert": pool.experts["math"]}
    changed = rewritten(paths[where], lambda own: {**own, **more(own)})
    recipe = pool.recipe("task_arithmetic")
    if where == "reference":
        recipe["base_model"] = str(changed)
    else:
        recipe["models"][0]["model"] = str(changed)
    result = sigmerge.merge(recipe, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "plain")
    (told,) = [note for note in result.provenance.warnings if "left out" in note]
    assert next(iter(more(read_weights(pool.reference)))).split(".")[-1] in told
    assert ("(2 tensors)" in told) is (spare == "frequencies")


@pytest.mark.parametrize("needed", NEEDED)
def test_what_a_model_may_need_is_not(tmp_path: Path, needed: str) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    recipe = pool.recipe("task_arithmetic")
    changed = rewritten(pool.experts["math"], lambda own: {**own, **NEEDED[needed](own)})
    recipe["models"][0]["model"] = str(changed)
    with pytest.raises(PoolError, match="do not form a pool") as refused:
        sigmerge.merge(recipe, tmp_path / "out")
    assert "tensor that the reference does not have" in str(refused.value)


def test_what_all_models_store_stays(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    recipe = pool.recipe("linear")
    del recipe["base_model"]
    for model, path in zip(recipe["models"], pool.experts.values(), strict=True):
        changed = rewritten(path, lambda own: {**own, **SPARE["frequencies"](own)})
        model["model"] = str(changed)
    sigmerge.merge(recipe, tmp_path / "out")
    assert ROTARY.format(1) in read_weights(tmp_path / "out")


def test_other_names_of_the_same_tensors(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    sigmerge.merge(pool.recipe("ties", {"density": 0.5}), tmp_path / "plain")

    def bare(own: Weights) -> Weights:
        return {name.removeprefix("model."): values for name, values in own.items()}

    recipe = pool.recipe("ties", {"density": 0.5})
    recipe["models"][1]["model"] = str(rewritten(pool.experts["coding"], bare))
    sigmerge.merge(recipe, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "plain")


PAIRS = {
    "bert.encoder.layer.0.output.LayerNorm.gamma": "bert.encoder.layer.0.output.LayerNorm.weight",
    "bert.embeddings.LayerNorm.beta": "bert.embeddings.LayerNorm.bias",
    "language_model.model.layers.0.mlp.up_proj.weight": (
        "model.language_model.layers.0.mlp.up_proj.weight"
    ),
    "model.layers.0.mlp.up_proj.weight": "model.language_model.layers.0.mlp.up_proj.weight",
    "language_model.lm_head.weight": "lm_head.weight",
    "visual.blocks.0.norm1.weight": "model.visual.blocks.0.norm1.weight",
    "model.layers.0.mlp.gate.weight": "model.layers.0.block_sparse_moe.gate.weight",
}


def opened(folder: Path, own: Mapping[str, np.ndarray]) -> Checkpoint:
    """A member with these tensors."""
    return open_checkpoint(write_member(folder, dict(own)))


@pytest.mark.parametrize("old_first", [True, False])
@pytest.mark.parametrize("old", PAIRS)
def test_a_name_of_another_version(tmp_path: Path, old: str, old_first: bool) -> None:
    values = np.ones((2, 2), np.float32)
    other = dict.fromkeys(("model.a.weight", "bert.b.weight", "language_model.c.weight"), values)
    names = (old, PAIRS[old]) if old_first else (PAIRS[old], old)
    one, two = (opened(tmp_path / str(i), {name: values, **other}) for i, name in enumerate(names))
    found, notes = alike({"one": one, "two": two})
    assert found["two"].tensors.keys() == one.tensors.keys() and not notes
    assert found["two"].tensors[names[0]].begin == two.tensors[names[1]].begin


def test_a_name_that_may_mean_two_tensors_stays(tmp_path: Path) -> None:
    values = np.ones((2, 2), np.float32)
    both = {f"{part}.block.0.weight": values for part in ("encoder", "decoder")}
    one, two = opened(tmp_path / "0", both), opened(tmp_path / "1", {"block.0.weight": values})
    found, _ = alike({"one": one, "two": two})
    assert set(found["two"].tensors) == {"block.0.weight"}


def test_two_tensors_never_get_one_name(tmp_path: Path) -> None:
    values = np.ones((2, 2), np.float32)
    one = opened(tmp_path / "0", {"model.norm.weight": values})
    two = opened(tmp_path / "1", {"norm.weight": values, "norm.gamma": values})
    three = opened(tmp_path / "2", {"norm.weight": values, "model.norm.weight": values})
    found, _ = alike({"one": one, "two": two, "three": three})
    assert set(found["two"].tensors) == {"norm.weight", "norm.gamma"}
    assert set(found["three"].tensors) == {"norm.weight", "model.norm.weight"}


def test_models_of_other_depths_that_all_store_frequencies(tmp_path: Path) -> None:
    named = [{ROTARY.format(i): np.ones(4, np.float32) for i in range(depth)} for depth in (2, 3)]
    members = {str(i): opened(tmp_path / str(i), names) for i, names in enumerate(named)}
    found, notes = alike(members)
    assert not notes and [len(member.tensors) for member in found.values()] == [2, 3]


def mixture(rng: np.random.Generator, experts: int = 3) -> Weights:
    """The experts of one layer, each stored by itself."""
    shapes = {"w1": (4, 6), "w2": (6, 4), "w3": (4, 6)}
    return {
        f"model.layers.0.block_sparse_moe.experts.{i}.{role}.weight": rng.normal(size=shape).astype(
            np.float32
        )
        for i in range(experts)
        for role, shape in shapes.items()
    } | {"model.layers.0.block_sparse_moe.gate.weight": np.ones((3, 6), np.float32)}


def joined(own: Weights, experts: int = 3) -> Weights:
    """The same as transformers 5 holds them."""
    name = "model.layers.0.block_sparse_moe.experts.{}.{}.weight".format
    up = [np.concatenate([own[name(i, "w1")], own[name(i, "w3")]]) for i in range(experts)]
    return {
        "model.layers.0.mlp.experts.gate_up_proj": np.stack(up),
        "model.layers.0.mlp.experts.down_proj": np.stack(
            [own[name(i, "w2")] for i in range(experts)]
        ),
        "model.layers.0.mlp.gate.weight": own["model.layers.0.block_sparse_moe.gate.weight"],
    }


@pytest.mark.parametrize("joined_first", [True, False])
def test_experts_joined_or_one_by_one(tmp_path: Path, joined_first: bool) -> None:
    rng = np.random.default_rng(5)
    one, two = mixture(rng), mixture(rng)
    stored = (joined(one), two) if joined_first else (one, joined(two))
    paths = [write_member(tmp_path / str(i), own, layers=1) for i, own in enumerate(stored)]
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in paths]
    sigmerge.merge({"merge_method": "linear", "models": models}, tmp_path / "out")
    found = {
        name.replace("block_sparse_moe.gate", "mlp.gate"): values
        for name, values in read_weights(tmp_path / "out").items()
    }
    wanted = {
        name.replace("block_sparse_moe.gate", "mlp.gate"): (values + two[name]) / 2
        for name, values in one.items()
    }
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)


ODD: dict[str, Callable[[Weights], Weights]] = {
    "of no expert": lambda own: {name: values[:0] for name, values in own.items()},
    "beside single ones": lambda own: {
        **own, "model.layers.0.block_sparse_moe.experts.0.w2.weight": np.ones((6, 4), np.float32),
    },
    "of an odd number of rows": lambda own: {name: values[:, :7] for name, values in own.items()},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_joined_experts_that_cannot_be_taken_apart_stay(tmp_path: Path, odd: str) -> None:
    single = mixture(np.random.default_rng(7))
    whole = joined(single)
    del whole["model.layers.0.mlp.gate.weight"]
    if odd == "of an odd number of rows":
        del whole["model.layers.0.mlp.experts.down_proj"]
    strange = ODD[odd](whole)
    found, _ = alike(
        {"one": opened(tmp_path / "1", single), "two": opened(tmp_path / "2", strange)}
    )
    assert set(found["two"].tensors) >= set(strange) - {
        "model.layers.0.mlp.experts.gate_up_proj" if odd == "beside single ones" else ""
    }


def test_joined_experts_that_an_adapter_changes_are_not_taken_apart_by_bytes(
    tmp_path: Path,
) -> None:
    single = mixture(np.random.default_rng(8))
    one, two = opened(tmp_path / "1", single), opened(tmp_path / "2", joined(single))
    name = "model.layers.0.mlp.experts.down_proj"
    stored = two.tensors[name]
    place = (stored.name, stored.dtype, stored.shape, stored.file, stored.begin, stored.end)
    two.tensors[name] = RetypedTensor(*place, stored=stored)
    found, _ = alike({"one": one, "two": two})
    assert name in found["two"].tensors


@pytest.mark.parametrize("parted", [True, False])
def test_a_copy_that_is_a_masked_head_stays_where_a_model_says_it_is_no_copy(
    tmp_path: Path, parted: bool
) -> None:
    values = np.ones((4, 2), np.float32)
    own = {"roberta.embeddings.word_embeddings.weight": values, "lm_head.bias": values[:, 0]}
    copies = {"lm_head.decoder.weight": values, "lm_head.decoder.bias": values[:, 0]}
    one, two = opened(tmp_path / "1", own), opened(tmp_path / "2", {**own, **copies})
    one.config["tie_word_embeddings"], two.config["tie_word_embeddings"] = not parted, True
    found, notes = alike({"one": one, "two": two})
    assert ("lm_head.decoder.weight" in found["two"].tensors) is parted
    assert "lm_head.decoder.bias" not in found["two"].tensors and notes


def test_a_copy_of_another_type_is_none(tmp_path: Path) -> None:
    own = {EMBEDDING: np.zeros((4, 2), np.float32)}
    two = opened(tmp_path / "2", {**own, "encoder.embed_tokens.weight": own[EMBEDDING]})
    copy = two.tensors["encoder.embed_tokens.weight"]
    two.tensors[copy.name] = replace(copy, dtype="I32")
    found, notes = alike({"one": opened(tmp_path / "1", own), "two": two})
    assert copy.name in found["two"].tensors and not notes


def test_slices_tell_what_was_left_out(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    more = rewritten(pool.experts["math"], lambda own: {**own, **SPARE["frequencies"](own)})
    pieces = [
        {"sources": [{"model": str(path), "layer_range": [0, 2]}]}
        for path in (more, pool.experts["coding"])
    ]
    made = sigmerge.merge({"merge_method": "passthrough", "slices": pieces}, tmp_path / "out")
    assert any("left out" in note for note in made.provenance.warnings)
    assert not any("inv_freq" in name for name in read_weights(tmp_path / "out"))


def test_joined_experts_of_all_members_stay(tmp_path: Path) -> None:
    own = joined(mixture(np.random.default_rng(6)))
    members = {str(i): opened(tmp_path / str(i), own) for i in range(2)}
    members["1"].tensors["lm_head.weight"] = members["1"].tensors["model.layers.0.mlp.gate.weight"]
    found, _ = alike(members)
    assert "model.layers.0.mlp.experts.gate_up_proj" in found["1"].tensors


@pytest.mark.parametrize("differ", [True, False])
def test_whole_numbers_that_differ_are_told(tmp_path: Path, differ: bool) -> None:
    pool = make_pool(tmp_path / "pool", experts=2)
    for i, folder in enumerate((pool.reference, *pool.experts.values())):
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["model.position_ids"] = torch.arange(4) + (i if differ else 0)
        save_file(weights, file, {"format": "pt"})
    made = sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out")
    told = [note for note in made.provenance.warnings if "whole numbers that differ" in note]
    assert bool(told) is differ and all("the reference's are kept" in note for note in told)
    kept = load_file(tmp_path / "out/model.safetensors")["model.position_ids"]
    assert kept.tolist() == [0, 1, 2, 3]
