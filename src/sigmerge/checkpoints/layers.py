"""The layers of a model as PEFT adapters see them: updates of matrices, small modules whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sigmerge.checkpoints.blocks import positions
from sigmerge.checkpoints.folder import TURNED, Checkpoint, is_before, is_head, tied_head

Names = tuple[str, ...]
NOT_LINEAR = ("embed", "wte.", "wpe.", "relative_attention_bias", "norm", "conv")
"""What names of weights say that are no linear maps, where the model itself cannot be asked."""


@dataclass
class Layer:
    """Modules that are stored together, and their tensors.

    `tensors` are names in the checkpoint, each with what the model calls it: several names where
    modules share a tensor. An `even` update has the rank that the configuration names.
    """

    modules: dict[str, None] = field(default_factory=dict)
    tensors: dict[str, Names] = field(default_factory=dict)
    linear: bool = False
    turned: bool = False
    even: bool = False
    fits: bool = True

    @property
    def module(self) -> str:
        return next(iter(self.modules))

    @property
    def weight(self) -> str:
        """The matrix of a linear layer, as the checkpoint calls it."""
        return next(name for name, theirs in self.tensors.items() if theirs[0].endswith(".weight"))


def grouped(
    checkpoint: Checkpoint,
    places: Mapping[str, Names],
    linear: Mapping[str, bool],
    convolutions: Collection[str],
    unstored: Collection[str] = (),
) -> list[Layer]:
    """The layers of a model in the order of its tensors.

    `places` has the model's names of every stored tensor, `linear` the modules that take an update,
    each with whether its weight is stored as (in, out); `unstored` are tensors that a model makes.
    PEFT saves a module with all that it holds: one is saved whole if no linear module lies in it.
    Stacked matrices, as of the experts of a mixture, are neither an update nor small.
    """
    parents = {parent for name in (*linear, *unstored) for parent in _parents(name)}
    parents |= {
        _owner(name)
        for stored, names in places.items()
        for name in names
        if len(checkpoint.tensors[stored].shape) > 2 and _owner(name) not in convolutions
    }
    owners = {_owner(name) for names in places.values() for name in names}
    whole = owners - parents - set(linear)
    layers: dict[str, Layer] = {}
    for stored, names in places.items():
        held = tuple(n for n in names if _owner(n) not in parents)
        units = dict.fromkeys(_unit(_owner(name), whole) for name in held or names[:1])
        layer = Layer()
        for part in {id(layers[u]): layers[u] for u in units if u in layers}.values():
            layer.modules |= part.modules
            layer.tensors |= part.tensors
        layer.modules |= units
        layer.tensors[stored] = held or names
        layer.fits = bool(held)
        layer.linear = layer.module in linear
        layer.turned = linear.get(layer.module, False)
        layers.update(dict.fromkeys(layer.modules, layer))
    return list({id(layer): layer for layer in layers.values()}.values())


def layers_by_name(checkpoint: Checkpoint) -> list[Layer]:
    """The layers as names and shapes of tensors show them."""
    tensors = {name: t for name, t in sorted(checkpoint.tensors.items()) if t.floating}
    inside = positions(tensors)
    matrices = [
        name
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and name.endswith(".weight") and not is_head(name)
        and name in inside and not any(word in name.lower() for word in NOT_LINEAR)
    ]  # fmt: skip
    turned = checkpoint.config.get("model_type") in TURNED
    places: dict[str, Names] = {name: (name,) for name in tensors}
    if checkpoint.head is None and checkpoint.embedding is not None:
        places[checkpoint.embedding] += (tied_head(checkpoint.embedding),)
    convolutions = {_owner(name) for name in tensors if "conv" in name or is_before(name)}
    return grouped(checkpoint, places, {_owner(n): turned for n in matrices}, convolutions)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]


def _unit(owner: str, whole: Collection[str]) -> str:
    """The outermost module that is saved with this one."""
    return next((parent for parent in _parents(owner) if parent in whole), owner)
