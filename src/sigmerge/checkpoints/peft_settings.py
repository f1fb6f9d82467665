"""What PEFT needs to load an adapter: names of its tensors, and adapter_config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.folder import TURNED, Checkpoint, is_head
from sigmerge.checkpoints.layers import Layer

STORED_PREFIX = "base_model.model."


def bias_name(module: str) -> str:
    """The bias of a linear layer that has an update."""
    return f"{STORED_PREFIX}{module}.base_layer.bias"


def factor_names(module: str, embedding: bool = False) -> tuple[str, str]:
    """A and B of a module."""
    ends = (("lora_embedding_A", "lora_embedding_B") if embedding
            else ("lora_A.weight", "lora_B.weight"))  # fmt: skip
    return f"{STORED_PREFIX}{module}.{ends[0]}", f"{STORED_PREFIX}{module}.{ends[1]}"


def peft_settings(
    layout: Checkpoint,
    base: str,
    ranks: Mapping[str, int],
    saved: Collection[Layer],
    biases: bool,
) -> dict[str, Any]:
    """adapter_config.json. Every α is its rank, so that the update is b a itself."""
    usual = max(ranks.values(), default=1)
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    whole = dict.fromkeys(module for layer in saved for module in layer.modules)
    pairs = [n for layer in saved for n in layer.tensors.values() if len(n) == 2]
    return {
        "peft_type": "LORA",
        "task_type": _task(layout),
        "base_model_name_or_path": base,
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks, key=natural),
        "modules_to_save": sorted(whole, key=natural) or None,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": layout.config.get("model_type") in TURNED,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        # PEFT ties a head; to an encoder's embedding it would give the class of a head.
        "ensure_weight_tying": any(is_head(names[1]) for names in pairs),
        "inference_mode": True,
    }


def _task(layout: Checkpoint) -> str | None:
    """What PEFT calls the kind of model; None is any kind."""
    if layout.config.get("is_encoder_decoder"):
        return "SEQ_2_SEQ_LM"
    named = "".join(layout.config.get("architectures") or ["LMHead"])
    speaks = any(word in named for word in ("CausalLM", "LMHead", "ConditionalGeneration"))
    return "CAUSAL_LM" if speaks else None
