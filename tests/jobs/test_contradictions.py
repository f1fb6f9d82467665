"""A configuration that its weights contradict is said before a merge, and is not published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import sigmerge
from sigmerge.errors import PoolError, SigmergeWarning
from sigmerge.jobs import pools
from sigmerge.probing import expected
from tests.checkpoints.damage import edit_config
from tests.command_line import refused
from tests.command_line import sigmerge as command
from tests.jobs.test_computation import stack
from tests.pools import PoolOnDisk, make_pool

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "more layers": ({"num_hidden_layers": 9}, "num_hidden_layers 9; the weights have 2 layers"),
    "fewer layers": ({"num_hidden_layers": 1}, "num_hidden_layers 1; the weights have 2 layers"),
    "more tokens": ({"vocab_size": 64}, "vocab_size 64; model.embed_tokens.weight has 48 rows"),
    "fewer tokens": ({"vocab_size": 32}, "vocab_size 32; model.embed_tokens.weight has 48 rows"),
    "a width": ({"hidden_size": 32}, "hidden_size 32; model.embed_tokens.weight has 16 columns"),
    "a width inside": (
        {"intermediate_size": 48},
        "intermediate_size 48; model.layers.0.mlp.down_proj.weight has 32 columns",
    ),
    "heads": (
        {"num_key_value_heads": 1},
        "num_key_value_heads 1 of 8; model.layers.0.self_attn.k_proj.weight has 16 rows",
    ),
    "a bias": ({"attention_bias": True}, "attention_bias is true; self_attn.q_proj has no bias"),
}


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", experts=1)


@pytest.mark.parametrize("what", WRONG)
def test_what_transformers_does_not_load_is_not_merged(
    pool: PoolOnDisk, tmp_path: Path, what: str
) -> None:
    changes, words = WRONG[what]
    for place in (pool.reference, *pool.experts.values()):
        edit_config(place, **changes)
    recipe = pool.write(pool.recipe("task_arithmetic"))
    for flags in ((), ("--dry-run",)):
        told = refused(3, "merge", recipe, tmp_path / "out", *flags, beside=tmp_path)
        assert "reference: config.json contradicts the weights" in told
        assert f"it says {words}" in told and "  - transformers: " in told
    assert f"warning: reference: config.json says {words}" in command("inspect", pool.reference).out


def test_the_configuration_of_an_expert_is_not_the_results(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    edit_config(pool.experts["math"], num_hidden_layers=9)
    assert sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out").plan.warnings == ()
    assert sigmerge.verify(tmp_path / "out")[0].ok


def test_a_head_that_is_said_and_not_stored(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, tied=True)
    for place in (pool.reference, *pool.experts.values()):
        edit_config(place, tie_word_embeddings=False)
    with pytest.raises(PoolError, match="tie_word_embeddings is false, and no output head"):
        sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out")


def test_experts_that_are_said_and_not_stored(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", experts=1, style="moe")
    edit_config(pool.reference, num_local_experts=4)
    with pytest.raises(PoolError, match="num_local_experts 4; the weights have 3 experts"):
        sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out")


def test_without_transformers_it_is_a_warning(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "reference: config.json says num_hidden_layers 9; the weights have 2 layers (not there)"
    monkeypatch.setattr(expected, "stored_problems", lambda config, shapes: "not there")
    pools._loading_problems.cache_clear()
    edit_config(pool.reference, num_hidden_layers=9)
    recipe = pool.recipe("task_arithmetic")
    with pytest.warns(SigmergeWarning, match=r"num_hidden_layers 9; the weights have 2 layers"):
        made = sigmerge.merge(recipe, tmp_path / "out")
    assert made.plan.warnings == (told,)
    assert f"- note: {told}" in (tmp_path / "out/README.md").read_text()
    with pytest.raises(PoolError, match="contradicts the weights, which --strict"):
        sigmerge.merge(recipe, tmp_path / "strict", strict=True)
    pools._loading_problems.cache_clear()


def test_a_doubt_that_transformers_does_not_share(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some architectures have other sizes than their configuration names."""
    monkeypatch.setattr(expected, "stored_problems", lambda config, shapes: [])
    pools._loading_problems.cache_clear()
    edit_config(pool.reference, vocab_size=40)
    made = sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out", strict=True)
    assert made.plan.warnings == ()
    pools._loading_problems.cache_clear()


def rows(count: int) -> Callable[[dict[str, Any]], None]:
    def cut(weights: dict[str, Any]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:count].clone()

    return cut


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_an_anchor_whose_configuration_contradicts_it(pool: PoolOnDisk, tmp_path: Path) -> None:
    sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "anchor")
    edit(tmp_path / "anchor", rows(40))
    decided = {"repair": {"shares": {"math": 1.0}, "capacity": 0.1, "scale": 0.5}}
    with pytest.raises(PoolError, match=r"vocab_size 48; .* has 40 rows"):
        sigmerge.repair(
            pool.recipe("ties", **decided), tmp_path / "out", anchor=tmp_path / "anchor"
        )


def test_a_stack_of_a_model_whose_configuration_is_wrong(pool: PoolOnDisk, tmp_path: Path) -> None:
    edit_config(pool.reference, intermediate_size=48)
    recipe = stack(pool, [("reference", 0, 2)], [("math", 1, 2)])
    with pytest.raises(PoolError, match="intermediate_size 48"):
        sigmerge.merge(recipe, tmp_path / "out")


def test_a_configuration_that_says_nothing_of_the_weights_is_no_contradiction(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    for place in (pool.reference, *pool.experts.values()):
        file = place / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({k: config[k] for k in ("model_type", "architectures")}))
    made = sigmerge.merge(pool.recipe("task_arithmetic"), tmp_path / "out")
    assert made.plan.warnings == ()
