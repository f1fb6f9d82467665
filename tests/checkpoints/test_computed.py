"""Configurations of one shape that compute something else, or say the same in other words."""

from __future__ import annotations

from typing import Any

import pytest

from sigmerge.checkpoints.computed import decides, disagreements
from sigmerge.errors import PoolError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None,
    "max_position_embeddings": 8192,
}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 3}  # fmt: skip
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 16,
          "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 8}  # fmt: skip
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2,
          "rope_theta": 1e6, "rope_local_base_freq": 1e4}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
OTHER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("rope_theta", LLAMA, {"rope_theta": 10000.0}),
    ("rope_scaling", LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("num_attention_heads", LLAMA, {"num_attention_heads": 4}),
    ("num_key_value_heads", LLAMA, {"num_key_value_heads": None}),
    ("head_dim", LLAMA, {"head_dim": 16}),
    ("hidden_act", LLAMA, {"hidden_act": "gelu"}),
    ("rms_norm_eps", LLAMA, {"rms_norm_eps": 1e-6}),
    ("sliding_window", LLAMA, {"sliding_window": 128}),
    ("attn_logit_softcapping", GEMMA2, {"attn_logit_softcapping": None}),
    ("query_pre_attn_scalar", GEMMA2, {"query_pre_attn_scalar": 16}),
    ("layer_types of layer 1", GEMMA2, {"layer_types": ["sliding_attention"] * 4}),
    ("layer_types of layer 3", QWEN, {"use_sliding_window": True}),
    ("rope_theta of sliding_attention", GEMMA3, {"rope_local_base_freq": 5e4}),
    ("layer_types of layer 1", GEMMA3, {"sliding_window_pattern": 3}),
    ("use_qk_norm", LLAMA, {"use_qk_norm": True}),
    ("text_config.rope_theta", {"text_config": LLAMA}, {"text_config": {**LLAMA, "rope_theta": 1}}),
    ("text_config.layer_types of layer 0",
        {"text_config": GEMMA2}, {"text_config": {**GEMMA2, "layer_types": ["full_attention"] * 4}},
    ),
    ("id2label", {**LLAMA, "architectures": ["LlamaForSequenceClassification"],
                  "id2label": {"0": "no", "1": "yes"}}, {"id2label": {"0": "yes", "1": "no"}}),
    ("a_setting_of_nobody", {**LLAMA, "a_setting_of_nobody": 1}, {"a_setting_of_nobody": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "config", "change"), OTHER)
def test_what_computes_something_else_is_named(
    key: str, config: dict[str, Any], change: dict[str, Any]
) -> None:
    found = disagreements({"reference": config, "math": {**config, **change}}, "reference")
    assert key in [text.partition(":")[0] for text in found], found
    assert all(text.endswith("; the result takes the reference's") for text in found)


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "what says how it is trained and run": (LLAMA, {
        "attention_dropout": 0.1, "torch_dtype": "float16", "use_cache": False, "eos_token_id": 7,
        "_name_or_path": "x", "transformers_version": "4.1", "initializer_range": 0.1,
        "vocab_size": 99, "pretraining_tp": 2, "max_position_embeddings": 4096,
        "unsloth_fixed": True, "tie_word_embeddings": True, "a_key_of_nobody": "x",
    }),
    "version 5 of transformers": (LLAMA, {
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 500000, "rope_type": "default"},
    }),
    "a scaling with its type under another name": (
        {**LLAMA, "rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": None}},
    ),
    "both kinds of rotary positions in version 5": (GEMMA3, {
        "rope_theta": None, "rope_local_base_freq": None, "sliding_window_pattern": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "a part of a head": ({**LLAMA, "rotary_pct": 0.25}, {
        "rotary_pct": None, "partial_rotary_factor": 0.25,
    }),
    "what is usual, left out": (LLAMA, {
        "head_dim": 8, "attention_bias": False, "logit_scale": 1.0, "sliding_window": None,
    }),
    "the usual base": ({**LLAMA, "rope_theta": 10000}, {"rope_theta": None}),
    "a window that no layer has": (QWEN, {"sliding_window": 8, "max_window_layers": 1}),
    "kinds that an index gives": (GEMMA2, {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "an activation by another name": (LLAMA, {"hidden_act": "swish"}),
    "a length that scales nothing": (
        {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"max_position_embeddings": 16384},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SAME)
def test_what_computes_the_same_is_not(what: str) -> None:
    config, change = SAME[what]
    other = {key: value for key, value in {**config, **change}.items() if value is not None}
    assert disagreements({"reference": config, "math": other}, "reference") == []


def test_a_length_that_a_scaling_reads() -> None:
    one = {**LLAMA, "rope_scaling": YARN}
    other = {**one, "max_position_embeddings": 16384}
    (found,) = disagreements({"reference": one, "math": other}, "reference")
    assert found.startswith("rope_scaling: ")


def test_every_member_and_value_is_named() -> None:
    bases = {"reference": 1e4, "math": 1e6, "code": 10000, "law": 1e6, "chat": 5.0}
    members = {name: {**LLAMA, "rope_theta": base} for name, base in bases.items()}
    assert disagreements(members, "math") == [
        "rope_theta: 10000.0 in reference, code, 1000000.0 in math, law, 5.0 in chat; the result "
        "takes that of math"
    ]


def test_a_configuration_that_cannot_be_right_names_its_member() -> None:
    wrong = {**QWEN, "use_sliding_window": True, "max_window_layers": "x"}
    with pytest.raises(PoolError, match=r"math: config\.json: what it says of layer_types"):
        disagreements({"reference": QWEN, "math": wrong}, "reference")


@pytest.mark.parametrize(
    "key",
    ["rms_norm_eps", "layer_norm_epsilon", "clip_qkv", "relative_attention_num_buckets",
     "rope_theta", "rope_scaling", "num_attention_heads", "head_dim", "hidden_act",
     "activation_function", "sliding_window", "final_logit_softcapping", "embedding_multiplier",
     "num_experts_per_tok", "n_group"],
)  # fmt: skip
def test_each_of_these_decides_what_is_computed(key: str) -> None:
    assert decides(key, 3) and not decides("initializer_range", 3)
