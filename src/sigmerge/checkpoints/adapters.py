"""LoRA adapters in PEFT's format: lazy tensors of a model with the adapter's update.

The value of an entry is float32(w) + float32(s · Σ_k b_k a_k), the sum in float64 in the order of k
(Hu et al. 2022). s is α/r, or α/√r (rsLoRA; Kalajdzievski 2023). With DoRA (Liu et al. 2024) every
row of the sum is then scaled to its learnt magnitude.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sigmerge.checkpoints.adapter_folders import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_config,
)
from sigmerge.checkpoints.equal import same_tensor
from sigmerge.checkpoints.header import ITEM_SIZE, Tensor, read_header
from sigmerge.checkpoints.lazy import FormedTensor, RetypedTensor, TensorRun, Values
from sigmerge.checkpoints.links import check_file, is_there
from sigmerge.core import TILE, Array
from sigmerge.core.low_rank import add_low_rank, add_squares, multiply_along
from sigmerge.errors import PoolError
from sigmerge.files.identity import InputIdentity
from sigmerge.files.objects import open_stored
from sigmerge.messages import shown

NOT_READ = (
    "layer_replication", "trainable_token_indices", "target_parameters", "lora_bias", "use_qalora",
    "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Unsupported options of PEFT: with them an adapter is more than s·BA."""
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


def module_of_factor(stored: str) -> str:
    """PEFT's name of the module whose factor is stored under this name."""
    found = _PAIR.match(stored.removeprefix("base_model.model."))
    assert found is not None
    return found[1]


@dataclass
class _Module:
    """The tensors of an adapter for one module of the model."""

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
    pickles: Mapping[Path, InputIdentity]


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
    file, pickles = folder / ADAPTER_WEIGHTS, {}
    if is_there(file):
        check_file(folder, file)
    else:
        from sigmerge.checkpoints.pickled import as_safetensors

        [file] = pickles = as_safetensors([_pickled(folder, allow_pickle)])
    tensors = read_header(file)
    if not tensors:
        raise PoolError(f"{folder}: its weight file holds no tensor.")
    return Adapter(folder, config, tensors, (file, folder / ADAPTER_CONFIG), pickles)


def _pickled(folder: Path, allow_pickle: bool) -> Path:
    pickled = folder / "adapter_model.bin"
    if not is_there(pickled):
        raise PoolError(f"{folder}: no weights; expected {ADAPTER_WEIGHTS}.")
    if not allow_pickle:
        raise PoolError(
            f"{folder}: pickled weights ({pickled.name}) can run code when loaded and are refused. "
            "Convert them to safetensors, or pass --allow-pickle to load them weights-only."
        )
    check_file(folder, pickled)
    return pickled


@dataclass(frozen=True)
class TiedHead:
    """A head that is the model's embedding: two names of one weight.

    `head` is what the head's own tensor is called, `names` what adapters may call it.
    """

    embedding: str
    head: str
    names: tuple[str, ...]

    def other(self, name: str) -> str | None:
        return {self.embedding: self.head, self.head: self.embedding}.get(name)


@dataclass
class _Parts:
    """What an adapter stores: updates, and whole weights by the names that its model has.

    `loaded` are weights that PEFT puts into the model's own parameters, `saved` those of
    `modules_to_save`, of which it trains copies beside them.
    """

    modules: dict[str, _Module] = field(default_factory=dict)
    loaded: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Adapted(NamedTuple):
    """A model's tensors with an adapter's update, and what the adapter names and lacks."""

    tensors: dict[str, Tensor]
    lacking: list[str]


def adapted_tensors(
    adapter: Adapter,
    model: Mapping[str, Tensor],
    embedding: str | None,
    tie: TiedHead | None,
    turned: bool,
) -> Adapted:
    """A model with an adapter; a tied head has a tensor of its own beside the others.

    As in PEFT in use, an update belongs to its module: that of the embedding leaves a tied head as
    it is, and the other way round. `turned`: the model stores linear weights as (in, out); one that
    is not known to shows it by the shape of another weight of its layers.
    """
    tensors, shared = dict(model), {}
    if tie is not None:
        tensors[tie.head] = replace(tensors[tie.embedding], name=tie.head)
        shared = dict.fromkeys(tie.names, tie.head)
    parts = _sorted_out(adapter)
    problems = parts.problems
    found = dict(tensors)
    own = _put_whole(parts, tensors, found, embedding, tie, shared)
    modules = parts.modules.values()
    targets = {m.name: _target(f"{m.name}.weight", tensors, shared) for m in modules}
    shown_in = {
        _stack(m.name)
        for m in modules
        if turned or _shows_turned(m, tensors.get(targets[m.name] or ""))
    }
    for module in modules:
        target, in_turned = targets[module.name], _stack(module.name) in shown_in
        if target is None:
            problems.append(f"{module.name}: the model has no such module")
        elif why := _unfit(module, found[target], adapter.config, in_turned):
            problems.append(f"{module.name}: {why}")
        else:
            found[target] = _adapted(module, found[target], adapter.config, in_turned)
    if problems:
        some = problems[:12] + ([f"and {len(problems) - 12} more"] if problems[12:] else [])
        raise PoolError(f"{adapter.folder}: the adapter does not fit its model:", some)
    if tie is not None and _follows(adapter, tie, {*own, *targets.values()}):
        found[tie.head] = replace(found[tie.embedding], name=tie.head)
    changed = {name for name, tensor in found.items() if tensor is not tensors[name]}
    return Adapted(found, _lacking(adapter.config, tensors, changed))


def _lacking(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], changed: Collection[str]
) -> list[str]:
    """Modules in an adapter's list of targets for which it stores nothing."""
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        return []
    wanted = {str(target): str(target) for target in targets}
    longer = {end: target for target in wanted for end in _ends(target)}
    found, lacking = set(), set()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        named = {wanted[end] for end in _ends(module) if end in wanted} or (
            {longer[module]} if module in longer else set()
        )
        if named and len(tensor.shape) == 2:
            found |= named
            if name not in changed and _is_meant(module, config):
                lacking.add(module)
    return sorted(lacking | (wanted.keys() - found))


def _ends(name: str) -> Iterator[str]:
    """A dotted name, and what is left of it without its first parts."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _is_meant(module: str, config: Mapping[str, Any]) -> bool:
    """Whether the other settings also select a module whose name matches `target_modules`."""
    excluded, saved = config.get("exclude_modules") or [], config.get("modules_to_save") or []
    if isinstance(excluded, str):
        return False  # a pattern of names that transformers has, and the file may not
    if not {*excluded, *saved}.isdisjoint(_ends(module)):
        return False
    layers, number = config.get("layers_to_transform"), re.search(r"\.(\d+)\.", module)
    wanted = layers if isinstance(layers, list) else [] if layers is None else [layers]
    return not wanted or (number is not None and int(number[1]) in wanted)


def _put_whole(
    parts: _Parts,
    tensors: Mapping[str, Tensor],
    found: dict[str, Tensor],
    embedding: str | None,
    tie: TiedHead | None,
    shared: Mapping[str, str],
) -> list[str | None]:
    """Put weights that are stored whole in their places; what copies of their own are put in.

    One that is loaded into a tied weight is loaded into both. A copy of the embedding for which the
    model has no tensor is passed over: PEFT saves every module by itself.
    """
    own = {stored for whole in (parts.saved, parts.loaded) for name, stored in whole.items()
           if embedding and _target(name, {embedding: tensors[embedding]}, {})}  # fmt: skip
    for whole in (parts.loaded, parts.saved):
        targets = {name: _target(name, tensors, shared) for name in whole}
        for name, stored in whole.items():
            target = targets[name] or _target(_tied_bias(name), tensors, {})
            if target is None:
                if not any(same_tensor(stored, one) for one in own):
                    parts.problems.append(f"{name}: the model has no such tensor")
            elif not _takes(target, stored, tensors[target]):
                why = _misfit(stored.shape, tensors[target].shape)
                parts.problems.append(f"{name}: {why}")
            else:
                found[target] = _replaced(tensors[target], stored)
                other = tie.other(target) if tie and whole is parts.loaded else None
                if other is not None and other not in targets.values():
                    found[other] = _replaced(tensors[other], stored)
    return [_target(name, tensors, shared) for name in parts.saved]


def _follows(adapter: Adapter, tie: TiedHead, own: Collection[str | None]) -> bool:
    """Whether PEFT gives a tied head that has nothing of its `own` what the embedding has.

    It knows a tied embedding by this name alone.
    """
    named = tie.embedding.removesuffix(".weight").rpartition(".")[2] == "embed_tokens"
    alone = tie.embedding in own and tie.head not in own
    return bool(adapter.config.get("ensure_weight_tying")) and named and alone


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, stored or adapted, have the same values; one may be an embedding."""
    if isinstance(one, AdaptedTensor) and isinstance(other, AdaptedTensor):
        if one.magnitude is not None or other.magnitude is not None:
            return replace(one, name=other.name) == other
        factors = (other.a, other.b) if one.transposed == other.transposed else (other.b, other.a)
        turned = one.transposed != other.transposed
        pairs = zip((one.a, one.b), factors, strict=True)
        same = one.scale == other.scale and are_equal(one.weight, other.weight)
        return same and all(_same_matrix(a, b, turned) for a, b in pairs)
    if isinstance(one, RetypedTensor) and isinstance(other, RetypedTensor):
        return same_tensor(one.stored, other.stored)
    return same_tensor(one, other)


def _same_matrix(one: Tensor, other: Tensor, turned: bool) -> bool:
    """Whether a matrix has the bytes of another, or of its transpose."""
    if not turned:
        return same_tensor(one, other)
    if (one.dtype, one.shape) != (other.dtype, other.shape[::-1]):
        return False
    left, right = (_entries(tensor) for tensor in (one, other))
    return np.array_equal(left, right.T)


def _entries(tensor: Tensor) -> Array:
    with open_stored(tensor.file) as stream:
        stream.seek(tensor.begin)
        raw = stream.read(tensor.nbytes)
    return np.frombuffer(raw, f"u{ITEM_SIZE[tensor.dtype]}").reshape(tensor.shape)


def _sorted_out(adapter: Adapter) -> _Parts:
    named = adapter.config.get("modules_to_save")
    ends = tuple(f"{module}.weight" for module in named) if isinstance(named, list) else ()
    parts = _Parts()
    for stored, tensor in sorted(adapter.tensors.items()):
        name = stored.removeprefix("base_model.model.")
        if pair := _PAIR.match(name):
            module = parts.modules.setdefault(pair[1], _Module(pair[1]))
            module.pair[pair[3]] = tensor
            module.embedding |= bool(pair[2])
        elif length := _MAGNITUDE.match(name):
            parts.modules.setdefault(length[1], _Module(length[1])).magnitude = tensor
        elif "lora_" in name or "trainable_tokens" in name or not tensor.floating:
            parts.problems.append(f"{stored}: is of a kind that is not read")
        else:
            wrapper, plain = _WRAPPER.search(name), _WRAPPER.sub("", name)
            copy = wrapper[1].startswith("modules") if wrapper else plain.endswith(ends)
            (parts.saved if copy else parts.loaded)[plain] = tensor
    return parts


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
    """True if a weight's shape shows that it is stored as (in, out)."""
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
    """The reason why an update cannot be added to a weight."""
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
    """Whether a weight can replace another; embedding and head may have other vocabularies."""
    words = ("embed", "wte", "lm_head", "output")
    rows = any(word in name for word in words) and new.shape[1:] == old.shape[1:]
    return rows or new.shape == old.shape


def _misfit(update: tuple[int, ...], weight: tuple[int, ...]) -> str:
    return f"an update of shape {list(update)} for a weight of shape {list(weight)}"
