"""The layers of a model as transformers builds it, for an adapter that PEFT loads."""

from __future__ import annotations

from typing import Any

from sigmerge.checkpoints.folder import Checkpoint, is_head
from sigmerge.checkpoints.layers import Layer, Names, grouped, layers_by_name
from sigmerge.errors import PoolError
from sigmerge.probing.bounded import bounded
from sigmerge.probing.loading import joins, loading, model_class, renaming

MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
REFUSED = dict.fromkeys(MAMBAS, ("out_proj",))
"""Modules that PEFT takes no update for, by the type of the model."""
CONVERTED = {
    "mixtral": ("w1", "w2", "w3", "gate"),
    "qwen2_moe": ("gate_proj", "up_proj", "down_proj", "gate"),
}
"""Mixtures whose updates of single experts PEFT joins, by transformers' name of the conversion.
It takes every update of these names for one of an expert."""


def model_layers(checkpoint: Checkpoint) -> list[Layer]:
    """The layers of a checkpoint; by their names where transformers does not know the model."""
    try:
        import torch
    except ImportError:
        return layers_by_name(checkpoint)
    try:
        with loading(checkpoint.path, "its layers"), bounded(checkpoint.path), torch.device("meta"):
            model = _model(checkpoint)
    except PoolError:
        return layers_by_name(checkpoint)
    return _layers(checkpoint, model)


def _model(checkpoint: Checkpoint) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    known = next((kind for kind in named if kind is not None), None)
    return known._from_config(config) if known else model_class(config).from_config(config)


def _layers(checkpoint: Checkpoint, model: Any) -> list[Layer]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    kind = checkpoint.config.get("model_type")
    converted = CONVERTED.get(_conversion(kind), ())
    refused = {*REFUSED.get(kind or "", ()), *converted}
    places, unstored = _places(checkpoint, model)
    alone = {names[0] for names in places.values() if len(names) == 1}
    modules = dict(model.named_modules())
    within = [f"{n}." for n, m in modules.items() if isinstance(m, nn.MultiheadAttention)]
    linear = {
        name: isinstance(module, Conv1D)
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D)
        and f"{name}.weight" in alone
        and not is_head(f"{name}.weight")
        and name.rpartition(".")[2] not in refused
        and not name.startswith(tuple(within))
    }
    convolutions = {n for n, m in modules.items() if isinstance(m, nn.modules.conv._ConvNd)}
    found = grouped(checkpoint, places, linear, convolutions, unstored)
    rest = sorted(n for n, t in checkpoint.tensors.items() if t.floating and n not in places)
    joined = {stored for stored, *_ in joins(model, rest)} if converted else set()
    for name in rest:
        module = name.rpartition(".")[0]
        even = name in joined and len(checkpoint.tensors[name].shape) == 2
        found.append(Layer({module: None}, {name: (name,)}, linear=even, even=even, fits=even))
    return found


def _places(checkpoint: Checkpoint, model: Any) -> tuple[dict[str, Names], list[str]]:
    """The model's names of every stored tensor; and those of tensors that are not stored."""
    renamed, prefix = renaming(model), model.base_model_prefix
    stored = {}
    for name in (name for name, tensor in checkpoint.tensors.items() if tensor.floating):
        stored[f"{prefix}.{renamed(name)}"] = stored[renamed(name)] = name
    groups: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), []).append(name)
    places: dict[str, Names] = {}
    unstored: list[str] = []
    for names in groups.values():
        own = [stored[name] for name in names if name in stored]
        if not own:
            unstored += names
        for name in names:  # a copy that is stored too may differ; transformers parts the two then
            place = stored.get(name, own[0]) if own else None
            if place is not None:
                places[place] = (*places.get(place, ()), name)
    return places, unstored


def _conversion(kind: Any) -> str:
    """Which conversion of transformers joins the experts of a type of models."""
    try:
        from transformers import conversion_mapping
    except ImportError:  # before version 5, experts were modules
        return ""
    known = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    return str({**known, "mixtral": "mixtral"}.get(kind, ""))
