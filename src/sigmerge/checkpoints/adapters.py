"""LoRA adapters in PEFT's format: a model's tensors with the adapter's update, formed when read.

The value of an entry is float32(w) + float32(s · Σ_k b_k a_k), the sum in float64 in the order of k
(Hu et al. 2022). s is α/r, or α/√r (rsLoRA; Kalajdzievski 2023). With DoRA (Liu et al. 2024) every
row of the sum is then scaled to its learnt magnitude.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.adapter_folders import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_config,
)
from sigmerge.checkpoints.equal import same_tensor
from sigmerge.checkpoints.formed import FormedTensor, RetypedTensor, TensorRun, Values
from sigmerge.checkpoints.header import Tensor, read_header
from sigmerge.checkpoints.links import check_file, is_there
from sigmerge.errors import PoolError
from sigmerge.kernels import TILE, Array
from sigmerge.kernels.low_rank import add_low_rank, add_squares, multiply_along
from sigmerge.words import shown

NOT_READ = (
    "layer_replication", "trainable_token_indices", "target_parameters", "lora_bias", "use_qalora",
    "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Options of PEFT with which an adapter is more than s·BA."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "default")
"""Values of init_lora_weights that leave the model's own weights as they are."""

_PAIR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?$")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?$")
_WRAPPER = re.compile(r"\.(modules_to_save(\.default)?|original_module|base_layer)(?=\.)")


@dataclass(frozen=True)
class AdaptedTensor(FormedTensor):
    """weight + scale · b a, or its transpose; rows as long as `magnitude` says, where it is given.

    `transposed` is a weight that is stored as (in, out), as embeddings are.
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float
    transposed: bool
    magnitude: Tensor | None = None

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        small = [part for part in (self.a, self.b, self.magnitude) if part is not None]
        return [(self.weight, start, stop), *((part, 0, part.size) for part in small)]

    def form(self, values: Values, start: int, out: Array) -> None:
        self._add(values, start, out)
        if self.magnitude is not None:
            factors, columns = self._factors(values, self.magnitude), self.shape[1]
            multiply_along(out, columns, start, not self.transposed, factors)

    def _add(self, values: Values, start: int, out: Array) -> None:
        out[:] = values(self.weight, start, start + out.size)
        rank, columns = self.a.shape[0], self.shape[1]
        first, last = start // columns, -(-(start + out.size) // columns)
        if self.transposed:
            left = values(self.a, 0, self.a.size).reshape(rank, -1)[:, first:last].T
            right = values(self.b, 0, self.b.size).reshape(-1, rank).T
        else:
            left = values(self.b, first * rank, last * rank).reshape(-1, rank)
            right = values(self.a, 0, self.a.size).reshape(rank, columns)
        left, right = (np.ascontiguousarray(factor, np.float64) for factor in (left, right))
        add_low_rank(left, right, self.scale, start - first * columns, out)

    def _factors(self, values: Values, magnitude: Tensor) -> Array:
        """magnitude / ‖row‖, in float64; rows of the weight as (out, in)."""
        if self not in values.kept:
            sums = np.zeros(magnitude.size)
            for start in range(0, self.size, TILE):
                piece = np.empty(min(TILE, self.size - start), np.float32)
                self._add(values, start, piece)
                add_squares(piece, self.shape[1], start, not self.transposed, sums)
            wanted = values(magnitude, 0, magnitude.size).astype(np.float64)
            values.kept[self] = wanted / np.sqrt(sums)
        return values.kept[self]


@dataclass
class _Module:
    """What an adapter stores for one module of the model."""

    name: str
    pair: dict[str, Tensor] = field(default_factory=dict)
    embedding: bool = False
    magnitude: Tensor | None = None


@dataclass(frozen=True)
class Adapter:
    """An adapter folder: its settings and its tensors. Reads headers only."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]


def open_adapter(folder: Path, allow_pickle: bool) -> Adapter:
    """Read an adapter's settings and headers, or raise why it cannot be used."""
    config = adapter_config(folder)
    problems = [f"{key} is set, which is not read" for key in NOT_READ if config.get(key)]
    if str(config.get("peft_type", "")).upper() != "LORA":
        problems = [f"peft_type is {shown(config.get('peft_type'))}; only LORA is read"]
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool | str | None) or start not in PLAIN_STARTS:
        problems.append(
            f"init_lora_weights: {shown(start)} changes the model's own weights; convert it with "
            "PEFT first (save_pretrained, path_initial_model_for_weight_conversion)"
        )
    if problems:
        raise PoolError(
            f"{folder}: this adapter cannot be used as it is; merge it into its model with PEFT "
            "(merge_and_unload), and give the folder of that:",
            problems,
        )
    file = folder / ADAPTER_WEIGHTS
    if is_there(file):
        check_file(folder, file)
    else:
        file = _pickled(folder, allow_pickle)
    tensors = read_header(file)
    if not tensors:
        raise PoolError(f"{folder}: its weight file holds no tensor.")
    return Adapter(folder, config, tensors, (file, folder / ADAPTER_CONFIG))


def _pickled(folder: Path, allow_pickle: bool) -> Path:
    pickled = folder / "adapter_model.bin"
    if not is_there(pickled):
        raise PoolError(f"{folder}: no weights; expected {ADAPTER_WEIGHTS}.")
    if not allow_pickle:
        raise PoolError(
            f"{folder}: pickled weights ({pickled.name}) can run code when loaded and are refused. "
            "Convert them to safetensors, or pass --allow-pickle to load them weights-only."
        )
    from sigmerge.checkpoints.pickled import as_safetensors

    check_file(folder, pickled)
    return as_safetensors([pickled])[0]


def adapted_tensors(
    adapter: Adapter, tensors: Mapping[str, Tensor], shared: Mapping[str, str], turned: bool
) -> dict[str, Tensor]:
    """The model's tensors with the adapter's update.

    `shared` are names of modules' weights that the model does not store, each with the tensor that
    stands for it: a tied head is the embedding. `turned`: the model stores linear weights as
    (in, out); one that is not known to shows it by the shape of another weight of its layers.
    """
    found = dict(tensors)
    problems: list[str] = []
    modules, whole = _sorted_out(adapter.tensors, problems)
    targets = {m.name: _target(f"{m.name}.weight", tensors, shared) for m in modules.values()}
    shown_in = {
        _stack(m.name)
        for m in modules.values()
        if turned or _shows_turned(m, tensors.get(targets[m.name] or ""))
    }
    for name, stored in whole.items():
        target = _target(name, tensors, {}) or _target(_tied_bias(name), tensors, {})
        if target is None:
            problems.append(f"{name}: the model has no such tensor")
        elif not _takes(target, stored, tensors[target]):
            problems.append(f"{name}: {_misfit(stored.shape, tensors[target].shape)}")
        else:
            found[target] = _replaced(tensors[target], stored)
    for module in modules.values():
        target = targets[module.name]
        if target is None:
            problems.append(f"{module.name}: the model has no such module")
        elif why := _unfit(module, found[target], adapter.config, _stack(module.name) in shown_in):
            problems.append(f"{module.name}: {why}")
        else:
            in_turned = _stack(module.name) in shown_in
            found[target] = _adapted(module, found[target], adapter.config, in_turned)
    if problems:
        some = problems[:12] + ([f"and {len(problems) - 12} more"] if problems[12:] else [])
        raise PoolError(f"{adapter.folder}: the adapter does not fit its model:", some)
    return found


def replaced_whole(adapter: Adapter) -> set[str]:
    """The names, as the adapter's model has them, of weights that it brings whole."""
    return set(_sorted_out(adapter.tensors, [])[1])


def without_copies(adapter: Adapter, embedding: str, tensors: Mapping[str, Tensor]) -> Adapter:
    """The adapter without copies of its embedding for which the model has no tensor of their own.

    PEFT saves every module by itself, also those that share one tensor.
    """
    whole = _sorted_out(adapter.tensors, [])[1]
    own = next((t for n, t in whole.items() if _target(n, {embedding: t}, {})), None)
    others = [t for n, t in whole.items() if not _target(n, tensors, {})]
    copies = [other for other in others if own and same_tensor(other, own)]
    kept = {name: tensor for name, tensor in adapter.tensors.items() if tensor not in copies}
    return replace(adapter, tensors=kept)


def saves_embedding(adapter: Adapter, embedding: Tensor) -> bool:
    """Whether an adapter brings an embedding of that shape, trained as one of `modules_to_save`.

    PEFT trains a copy of it, and a head that was tied to it stays as it was.
    """
    named = adapter.config.get("modules_to_save")
    saved = tuple(f"{module}.weight" for module in named) if isinstance(named, list) else ()
    whole = _sorted_out(adapter.tensors, [])[1]
    return any(
        name.endswith(saved) and tensor.shape == embedding.shape
        for name, tensor in whole.items()
        if _target(name, {embedding.name: embedding}, {})
    )


def _sorted_out(
    tensors: Mapping[str, Tensor], problems: list[str]
) -> tuple[dict[str, _Module], dict[str, Tensor]]:
    """The modules with an update, and the weights that are stored whole."""
    modules: dict[str, _Module] = {}
    whole: dict[str, Tensor] = {}
    for stored, tensor in sorted(tensors.items()):
        name = stored.removeprefix("base_model.model.")
        if pair := _PAIR.match(name):
            module = modules.setdefault(pair[1], _Module(pair[1]))
            module.pair[pair[3]] = tensor
            module.embedding |= bool(pair[2])
        elif length := _MAGNITUDE.match(name):
            modules.setdefault(length[1], _Module(length[1])).magnitude = tensor
        elif "lora_" in name or "trainable_tokens" in name or not tensor.floating:
            problems.append(f"{stored}: is of a kind that is not read")
        else:
            whole[_WRAPPER.sub("", name)] = tensor
    return modules, whole


def _target(name: str, tensors: Mapping[str, Tensor], shared: Mapping[str, str]) -> str | None:
    """The model's tensor of that name; prefixes such as `model.` may be stored or not."""
    if name in tensors:
        return name
    ends = [n for n in tensors if n.endswith(f".{name}") or name.endswith(f".{n}")]
    if len(ends) != 1:
        ends = [n for n in tensors if _core(n) == _core(name)]
    if len(ends) == 1:
        return ends[0]
    return next((t for n, t in shared.items() if name == n or name.endswith(f".{n}")), None)


def _tied_bias(name: str) -> str:
    """The stored bias that a head which fills gaps shares with the module in it."""
    return name.replace(".decoder.bias", ".bias")


@lru_cache(1 << 16)
def _core(name: str) -> str:
    """A name without what transformers renames when it loads a model."""
    parts = [part for part in name.split(".") if part not in ("model", "language_model")]
    return ".".join("mlp" if part == "block_sparse_moe" else part for part in parts)


def _stack(module: str) -> str:
    """The stack of layers that a module lies in: an encoder's are of another class."""
    return re.split(r"\.\d+\.", module, maxsplit=1)[0]


def _shows_turned(module: _Module, weight: Tensor | None) -> bool:
    """Whether a weight's shape shows that it is stored as (in, out)."""
    if weight is None or len(module.pair) < 2 or module.embedding:
        return False
    sides = module.pair["B"].shape[0], module.pair["A"].shape[-1]
    return sides[0] != sides[1] and weight.shape == sides[::-1]


def _turned(module: _Module, weight: Tensor, turned: bool) -> bool:
    """Whether an update is added transposed: by the shape, or by the model where that is square.

    PEFT turns a weight by the class of its module, whatever the settings say.
    """
    square = len(weight.shape) == 2 and weight.shape[0] == weight.shape[1]
    return module.embedding or (turned if square else _shows_turned(module, weight))


def _unfit(module: _Module, weight: Tensor, config: Mapping[str, Any], turned: bool) -> str | None:
    """Why an update cannot be added to a weight."""
    if len(module.pair) < 2:
        return "lora_A or lora_B is missing"
    a, b = module.pair["A"], module.pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or len(weight.shape) != 2:
        return "updates of matrices are read, not of other shapes"
    if a.shape[0] != b.shape[1]:
        return f"lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}"
    rank = _setting(config, "rank_pattern", module.name, config.get("r"))
    if rank != a.shape[0]:
        return f"rank {a.shape[0]}, {ADAPTER_CONFIG} has {shown(rank)}"
    alpha = _setting(config, "alpha_pattern", module.name, config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        return f"lora_alpha: {shown(alpha)} is no number"
    update = (b.shape[0], a.shape[1])
    if _turned(module, weight, turned):
        update = update[::-1]
    if update != weight.shape:
        return _misfit(update, weight.shape)
    if config.get("use_dora") and module.magnitude is None:
        return "use_dora is set, and lora_magnitude_vector is missing"
    if module.magnitude is not None and module.magnitude.size != b.shape[0]:
        return f"{module.magnitude.size} magnitudes for {b.shape[0]} rows"
    return None


def _adapted(
    module: _Module, weight: Tensor, config: Mapping[str, Any], turned: bool
) -> AdaptedTensor:
    a, b = module.pair["A"], module.pair["B"]
    alpha = float(_setting(config, "alpha_pattern", module.name, config["lora_alpha"]))
    scale = alpha / math.sqrt(a.shape[0]) if config.get("use_rslora") else alpha / a.shape[0]
    return AdaptedTensor(
        **_place(weight), weight=weight, a=a, b=b, scale=scale,
        transposed=_turned(module, weight, turned), magnitude=module.magnitude,
    )  # fmt: skip


def _replaced(old: Tensor, new: Tensor) -> Tensor:
    if old.dtype == new.dtype:
        return replace(new, name=old.name)
    return RetypedTensor(**{**_place(old), "shape": new.shape}, stored=new)


def _place(tensor: Tensor) -> dict[str, Any]:
    names = ("name", "dtype", "shape", "file", "begin", "end")
    return {name: getattr(tensor, name) for name in names}


def _setting(config: Mapping[str, Any], patterns: str, module: str, default: Any) -> Any:
    """A module's own rank or α: the first pattern that the end of its name matches, as in PEFT."""
    given = config.get(patterns)
    for pattern, value in given.items() if isinstance(given, dict) else ():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error:
            raise PoolError(f"{patterns}: {shown(pattern)} is no pattern.") from None
    return default


def _takes(name: str, new: Tensor, old: Tensor) -> bool:
    """Whether a weight can stand for another; embedding and head may have other vocabularies."""
    words = ("embed", "wte", "lm_head", "output")
    rows = any(word in name for word in words) and new.shape[1:] == old.shape[1:]
    return rows or new.shape == old.shape


def _misfit(update: tuple[int, ...], weight: tuple[int, ...]) -> str:
    return f"an update of shape {list(update)} for a weight of shape {list(weight)}"
