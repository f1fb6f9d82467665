"""The modules of a model: parts with layers of their own.

mergekit knows the modules of few model types, and by these names. Here the part that a tensor
belongs to follows from the components of its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sigmerge.checkpoints.blocks import Stack, find_stack
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.header import Tensor

EYES = ("vision_tower", "vision_model")
"""mergekit's names of the vision module."""

FAMILIES = (
    ("text_decoder", "multi_modal_projector", EYES[0]),
    ("text_decoder", "multi_modal_projector", EYES[1]),
    ("encoder", "decoder", "shared"),
)
"""The modules of models that see, and of those that encode and decode."""

LAYERLESS = ("multi_modal_projector", "shared")
"""Modules that are taken whole: numbers in the names of a projector are no layers to stack."""

SPEAKING = ("", "text_decoder", "shared")
"""Modules with embedding and head; "" is a model that is one module."""

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""How configurations call the number of layers."""

_DEPTH_KEYS = {
    "encoder": ("num_layers", "num_hidden_layers", "encoder_layers"),
    "decoder": ("num_decoder_layers", "decoder_layers"),
    **dict.fromkeys(EYES, (*DEPTH_KEYS, "depth")),
}
_CONFIGS = {"text_decoder": "text_config", **dict.fromkeys(EYES, "vision_config")}


class ModulePart(NamedTuple):
    """The tensors of a module, and its stack of layers."""

    tensors: Mapping[str, Tensor]
    stack: Stack


def module_of(tensor: str, modules: Collection[str]) -> str:
    """The module of a tensor, from the components of its name."""
    names = set(tensor.split("."))
    if "encoder" in modules and "text_decoder" not in modules:
        return next((name for name in ("encoder", "decoder") if name in names), "shared")
    merges = {"merger", "merger_list", "deepstack_merger_list"} & names
    if "multi_modal_projector" in names or ("visual" in names and merges):
        return "multi_modal_projector"
    if names & {*EYES, "visual"}:
        return next(name for name in EYES if name in modules)
    return "text_decoder"


def module_part(checkpoint: Checkpoint, module: str, modules: Collection[str]) -> ModulePart:
    """A module of a checkpoint, one of `modules`; "" is all of it."""
    if not module:
        return ModulePart(checkpoint.tensors, checkpoint.stack)
    inside = {n: t for n, t in checkpoint.tensors.items() if module_of(n, modules) == module}
    stack = find_stack((name, tensor.size) for name, tensor in inside.items())
    if module in LAYERLESS and stack.gap is not None:
        stack = Stack("", 0)  # a sequence, some of whose members have no weights
    return ModulePart(inside, stack)


def config_key(module: str, config: Mapping[str, Any]) -> str | None:
    """The entry of a configuration that a module's own lies in; None: the configuration itself."""
    key = _CONFIGS.get(module)
    return key if key and isinstance(config.get(key), dict) else None


def depth_keys(module: str) -> tuple[str, ...]:
    """How configurations call the number of a module's layers; most often by the first name."""
    return _DEPTH_KEYS.get(module, DEPTH_KEYS)
