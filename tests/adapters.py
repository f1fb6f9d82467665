"""LoRA adapters on disk in PEFT's format, and what they make of a model by plain NumPy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.pools import DTYPES, Weights

PREFIX = "base_model.model."
ENDS = {
    False: ("lora_A.weight", "lora_B.weight"),
    True: ("lora_embedding_A", "lora_embedding_B"),
}
"""How the two factors are called, of linear layers and of embeddings."""


def write_adapter(
    folder: Path,
    model: Path,
    weights: Weights,
    seed: int = 0,
    modules: Sequence[str] = ("q_proj", "v_proj", "down_proj"),
    rank: int = 4,
    dtype: str = "f32",
    dora: bool = False,
    whole: Weights | None = None,
    embeddings: Sequence[str] = (),
    **config: Any,
) -> Path:
    """An adapter of the modules whose names end so; `whole` are weights that it brings itself."""
    rng = np.random.default_rng(seed)
    turned = bool(config.get("fan_in_fan_out"))
    tensors: Weights = {PREFIX + name: values for name, values in (whole or {}).items()}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or not module.endswith((*modules, *embeddings)):
            continue
        embedding = module.endswith(tuple(embeddings)) if embeddings else False
        out, into = weight.shape[::-1] if turned or embedding else weight.shape
        ranks = config.get("rank_pattern", {})
        own = next((r for p, r in ranks.items() if re.match(rf"(.*\.)?({p})$", module)), rank)
        for end, shape in zip(ENDS[embedding], ((own, into), (out, own)), strict=True):
            tensors[f"{PREFIX}{module}.{end}"] = rng.normal(0, 0.1, shape).astype(np.float32)
        if dora:
            lengths = rng.uniform(0.5, 2, out).astype(np.float32)
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = lengths
    folder.mkdir(parents=True)
    kept = {n: torch.tensor(v).to(DTYPES[dtype]).contiguous() for n, v in tensors.items()}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model),
        "r": rank, "lora_alpha": 6, "use_dora": dora,
        "target_modules": [*modules, *embeddings], **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(weights: Weights, folder: Path) -> Weights:
    """The model's weights with an adapter, in float32, entry by entry as the ruling says."""
    from safetensors.torch import load_file

    stored = {
        name.removeprefix(PREFIX): value.to(torch.float32).numpy()
        for name, value in load_file(folder / "adapter_model.safetensors").items()
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    result = {name: values.copy() for name, values in weights.items()}
    for name, values in stored.items():
        if "lora_" not in name:
            result[name] = values
    for name in stored:
        if name.endswith(("lora_A.weight", "lora_embedding_A")):
            module = re.sub(r"\.lora_(A\.weight|embedding_A)$", "", name)
            update = _update(module, stored, config)
            total = result[f"{module}.weight"] + update
            if config.get("use_dora"):
                axis = 0 if config.get("fan_in_fan_out") or "embedding" in name else 1
                total = _lengthened(total, stored[f"{module}.lora_magnitude_vector"], axis)
            result[f"{module}.weight"] = total
    return result


def _update(module: str, stored: Weights, config: Mapping[str, Any]) -> Any:
    embedding = f"{module}.lora_embedding_A" in stored
    a, b = (stored[f"{module}.{end}"].astype(np.float64) for end in ENDS[embedding])
    alphas = config.get("alpha_pattern", {})
    alpha = next(
        (v for p, v in alphas.items() if re.match(rf"(.*\.)?({p})$", module)), config["lora_alpha"]
    )
    scale = alpha / math.sqrt(len(a)) if config.get("use_rslora") else alpha / len(a)
    total = np.zeros((len(b), a.shape[1]))
    for k in range(len(a)):
        total += np.outer(b[:, k], a[k])
    update = (scale * total).astype(np.float32)
    return update.T if embedding or config.get("fan_in_fan_out") else update


def _lengthened(total: Any, lengths: Any, axis: int) -> Any:
    squares = total.astype(np.float64) ** 2
    sums = np.zeros(len(lengths))
    for part in np.moveaxis(squares, axis, 0):
        sums += part
    factors = np.expand_dims(lengths.astype(np.float64) / np.sqrt(sums), axis)
    return (total.astype(np.float64) * factors).astype(np.float32)
