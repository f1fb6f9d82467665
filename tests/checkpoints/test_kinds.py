"""Kinds of layers beside transformers' own configurations; logits are in tests/jobs/test_stacks."""

from __future__ import annotations

from typing import Any

import pytest

from sigmerge.checkpoints.kinds import LISTS, RULES, LayerSource, is_by_layer, with_kinds
from sigmerge.errors import PoolError

DERIVED = {
    "afmoe": {"global_attn_every_n_layers": 3},
    "cohere2": {},
    "cwm": {},
    "deepseek_v32": {"first_k_dense_replace": 2},
    "exaone4": {"sliding_window_pattern": 3, "sliding_window": 8},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {"first_k_dense_replace": 2},
    "gpt_oss": {},
    "granite_swa": {},
    "kolibri1": {},
    "lfm2": {"full_attn_idxs": [2, 5]},
    "llama4_text": {"no_rope_layer_interval": 3, "interleave_moe_layer_step": 2},
    "minimax": {},
    "modernbert": {},
    "modernbert-decoder": {},
    "olmo3": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "qwen3_5_text": {},
    "qwen3_next": {"mlp_only_layers": [1]},
    "smollm3": {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 3},
    "vaultgemma": {},
}


def stored(model_type: str, depth: int) -> tuple[Any, dict[str, Any]]:
    """A configuration of transformers, and what an older version stored of it: no lists."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](num_hidden_layers=depth, **DERIVED[model_type])
    given = {k: v for k, v in config.to_dict().items() if k not in (*LISTS, "moe_layers")}
    return config, {**given, "model_type": model_type}


@pytest.mark.parametrize("depth", [6, 13])
@pytest.mark.parametrize("model_type", DERIVED)
def test_kinds_are_those_that_transformers_derives(model_type: str, depth: int) -> None:
    config, given = stored(model_type, depth)
    compared = []
    for rule in RULES[model_type]:
        kinds = getattr(config, rule.key, None)
        if rule.key == "moe_layers":
            kinds = [i in config.moe_layers for i in range(depth)]
        if isinstance(kinds, list):
            assert rule.kinds(given, depth) == kinds, rule.key
            compared.append(rule.key)
    assert compared


@pytest.mark.parametrize("model_type", DERIVED)
def test_transformers_reads_the_kinds_that_the_layers_had(model_type: str) -> None:
    depth, places = 6, [0, 1, 2, 1, 2, 3, 4, 5]
    config, given = stored(model_type, depth)
    if model_type == "afmoe":
        places = [0, 1, 2, 2, 3, 4, 5]  # its first layers alone are dense
    if model_type == "minimax":
        places = list(range(6))
    result = {**given, "num_hidden_layers": len(places)}
    lists = {key: value for key, value in given.items() if is_by_layer(key, value, depth)}
    result |= {key: [value[place] for place in places] for key, value in lists.items()}
    said, problems = with_kinds(result, [LayerSource(given, depth, place) for place in places])
    assert not problems
    read = type(config)(**{k: v for k, v in said.items() if k not in ("transformers_version",)})
    for key in LISTS:
        kinds = getattr(config, key, None)
        if isinstance(kinds, list):
            assert getattr(read, key) == [kinds[place] for place in places], key


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1}, [0, 1, 0, 1]),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, [0, 1, 1, 2]),
        ({"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 0}, [0, 1, 1, 2]),
        ({"model_type": "nobody_knows", "sliding_window_pattern": 2}, [0, 1, 1, 2]),
        ({"model_type": "minimax"}, [0, 1, 1, 2]),
    ],
)
def test_what_no_configuration_can_say_is_refused(
    config: dict[str, Any], places: list[int]
) -> None:
    _, problems = with_kinds(config, [LayerSource(config, 4, place) for place in places])
    assert problems and "decides that by a layer's index" in problems[0]
    same = list(range(4))
    assert not with_kinds(config, [LayerSource(config, 4, place) for place in same])[1]


def test_dense_layers_that_stay_in_front_are_counted() -> None:
    config = {"model_type": "deepseek_v3", "first_k_dense_replace": 1}
    said, problems = with_kinds(config, [LayerSource(config, 4, i) for i in (0, 0, 1, 2, 3)])
    assert not problems and said["first_k_dense_replace"] == 2


def test_lists_of_indices_are_rewritten_and_never_taken_for_lists_of_layers() -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0, 2]}
    said, problems = with_kinds(config, [LayerSource(config, 4, i) for i in (0, 1, 0, 1, 2, 3)])
    assert not problems and said["mlp_only_layers"] == [0, 2, 4]
    assert not is_by_layer("mlp_only_layers", [0, 2], 2)
    assert not is_by_layer("eos_token_id", [1, 106], 2) and not is_by_layer(
        "architectures", [""], 1
    )


def test_what_one_configuration_leaves_out_is_refused() -> None:
    one = {"model_type": "other", "layer_types": ["a", "b"]}
    _, problems = with_kinds(
        one, [LayerSource(one, 2, 0), LayerSource({"model_type": "other"}, 2, 1)]
    )
    assert "layer_types: one of the configurations" in problems[0]


def test_a_value_of_the_wrong_type_is_named() -> None:
    config = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "many"}
    with pytest.raises(PoolError, match="what it says of layer_types cannot be right"):
        with_kinds(config, [LayerSource(config, 2, 0), LayerSource(config, 2, 1)])
