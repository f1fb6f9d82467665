"""Checkpoints that are sound alone but form no pool: told by member and tensor, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints.damage import (
    NAME,
    Break,
    check_refused,
    edit_config,
    edit_weights,
    truncated,
    weights_file,
)
from tests.command_line import refused, sigmerge, tree
from tests.pools import (
    PoolOnDisk,
    make_pool,
    read_weights,
    shapes,
    write_weights,
)


def wider(tensors: dict[str, Any]) -> None:
    tensors[NAME] = torch.zeros(33, 16)


def several(pool: PoolOnDisk) -> None:
    edit_weights(lambda t: (t.pop(NAME), wider(t), t.pop("model.norm.weight")))(pool)
    edit_config(pool.experts["coding"], architectures=["MistralForCausalLM"])


BROKEN: dict[str, tuple[Break, list[str]]] = {
    "tensor missing": (edit_weights(lambda t: t.pop(NAME)), [f"math: tensor missing: {NAME}"]),
    "extra bias": (
        edit_weights(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)})),
        ["math: tensor that the reference does not have", "q_proj.bias"],
    ),
    "other shape": (
        edit_weights(wider),
        [f"math: {NAME}: shape [33, 16], the reference has [32, 16]"],
    ),
    "other dtype": (
        edit_weights(lambda t: t.update({NAME: t[NAME].int()})),
        [f"math: {NAME}: dtype I32, the reference has F32"],
    ),
    "other architecture": (
        lambda p: edit_config(p.experts["math"], architectures=["GPT2LMHeadModel"]),
        ["math: architecture GPT2LMHeadModel, the reference has LlamaForCausalLM"],
    ),
    "other vocabulary": (
        lambda p: (
            edit_config(p.experts["math"], vocab_size=50),
            edit_weights(lambda t: t.update({"model.embed_tokens.weight": torch.zeros(50, 16)}))(p),
        ),
        ["math: vocabulary of 50 tokens, the reference has 48", "outside: reference"],
    ),
    "copy of the reference": (
        lambda p: weights_file(p).write_bytes((p.reference / "model.safetensors").read_bytes()),
        ["math: every tensor equals the reference's", "not an expert"],
    ),
    "copy of the reference in other shards": (
        lambda p: (
            weights_file(p).unlink(),
            write_weights(p.experts["math"], read_weights(p.reference), shards=3, order=5),
        ),
        ["math: every tensor equals the reference's"],
    ),
    "several at once": (
        several,
        [
            f"math: {NAME}: shape",
            "math: tensor missing: model.norm.weight",
            "coding: architecture MistralForCausalLM",
        ],
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_members_that_do_not_fit(pool: PoolOnDisk, broken: str) -> None:
    check_refused(pool, *BROKEN[broken])


def test_problems_of_all_members_are_reported_together(pool: PoolOnDisk) -> None:
    recipe = pool.write(pool.recipe("task_arithmetic"))
    (pool.reference / "config.json").unlink()
    truncated(pool)
    (pool.experts["coding"] / "model.safetensors").unlink()
    said = refused(3, "merge", recipe, pool.root / "out", beside=pool.root)
    assert [line.split(":")[0] for line in said.splitlines()[1:]] == [
        "  - reference",
        "  - math",
        "  - coding",
    ]


def test_a_long_list_of_problems_is_cut_short(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, layers=4)
    names = list(shapes(layers=4))
    edit_weights(lambda t: [t.pop(name) for name in names if "proj" in name])(pool)
    recipe = pool.write(pool.recipe("linear"))
    said = refused(3, "merge", recipe, pool.root / "out", beside=pool.root)
    assert said.count("tensor missing: model.") == 12
    assert "tensor missing: and 16 more" in said


def test_the_same_folder_twice(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("task_arithmetic")
    recipe["models"].append({"model": str(pool.experts["math"]), "name": "again"})
    said = refused(2, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert f"models[{len(pool.experts)}]: {pool.experts['math']} is listed twice" in said


def test_the_same_folder_twice_through_a_symlink(pool: PoolOnDisk) -> None:
    (pool.root / "alias").symlink_to(pool.experts["math"])
    recipe = pool.recipe("task_arithmetic")
    recipe["models"].append({"model": str(pool.root / "alias")})
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "math, alias: the folder" in said and "is given twice" in said


def test_the_reference_as_an_expert_through_a_symlink(pool: PoolOnDisk) -> None:
    (pool.root / "alias").symlink_to(pool.reference)
    recipe = pool.recipe("task_arithmetic")
    recipe["models"].append({"model": str(pool.root / "alias")})
    said = refused(3, "merge", pool.write(recipe), pool.root / "out", beside=pool.root)
    assert "is the reference itself" in said


def test_mixed_precision_is_fine_when_the_recipe_says_what_to_write(pool: PoolOnDisk) -> None:
    edit_weights(lambda t: t.update({NAME: t[NAME].half()}))(pool)
    recipe = pool.write(pool.recipe("task_arithmetic", dtype="float32"))
    assert sigmerge("merge", recipe, pool.root / "out").code == 0


def test_another_vocabulary_is_fine_when_embeddings_are_kept(pool: PoolOnDisk) -> None:
    edit_config(pool.experts["math"], vocab_size=50)
    grown = {"model.embed_tokens.weight": torch.zeros(50, 16), "lm_head.weight": torch.ones(50, 16)}
    edit_weights(lambda t: t.update(grown))(pool)
    recipe = pool.write(pool.recipe("task_arithmetic", {"outside": "reference"}))
    assert sigmerge("merge", recipe, pool.root / "out").code == 0
    written, reference = read_weights(pool.root / "out"), read_weights(pool.reference)
    for name in grown:
        np.testing.assert_array_equal(written[name], reference[name])


def test_another_vocab_size_is_fine_when_the_tensors_are_of_one_size(pool: PoolOnDisk) -> None:
    """Padding is counted in one configuration and not in the other."""
    edit_config(pool.experts["math"], vocab_size=47)
    recipe = pool.write(pool.recipe("task_arithmetic"))
    assert sigmerge("merge", recipe, pool.root / "out").code == 0


def test_a_refused_pool_leaves_no_trace(pool: PoolOnDisk) -> None:
    before = tree(pool.root)
    truncated(pool)
    recipe = pool.recipe("ties")
    assert sigmerge("merge", pool.write(recipe), pool.root / "deep/er/out").code == 3
    assert tree(pool.root) == before | {"recipe.yaml"}
