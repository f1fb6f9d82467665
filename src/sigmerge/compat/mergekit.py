"""mergekit's Python names: a script that merges by them runs with one line changed.

    from sigmerge.compat.mergekit import MergeConfiguration, MergeOptions, run_merge

Options that mean nothing here are taken, and a line of the log says why each is not needed.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sigmerge.api import merge
from sigmerge.checkpoints.arrays import store
from sigmerge.errors import RecipeError
from sigmerge.files.scratch import scratch
from sigmerge.files.yaml_documents import as_yaml, parse_yaml
from sigmerge.jobs.options import Keywords
from sigmerge.objects import Recipe
from sigmerge.operators.table import operator
from sigmerge.results import Merged

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("sigmerge")

IDLE: Final[Mapping[str, str]] = {
    "allow_crimes": "architectures may differ where the recipe says override_architecture",
    "unsafe_truncate_embeddings": "rows are moved by token: tokenizer_source: base or union",
    "lora_merge_cache": "adapters are added while they are read, and no merged copy is kept",
    "lora_merge_dtype": "an adapter's update is computed in float32 and rounded once",
    "low_cpu_memory": "memory is bounded by the size of a tile, on any device",
    "clone_tensors": "every tensor is written by itself",
    "read_to_gpu": "tiles go to the GPU as they are read",
    "multi_gpu": "one GPU is used; a Ray cluster uses one on each node",
    "async_write": "shards are written while others are read",
    "write_threads": "the threads that merge write, too",
    "copy_tokenizer": "the tokenizer goes into every result",
    "write_model_card": "a card goes into every result",
    "safe_serialization": "results are safetensors",
}
"""Options that change nothing, and why."""


@dataclass(frozen=True)
class MergeOptions:
    """The options of mergekit 0.1.5 under its names, with its defaults."""

    allow_crimes: bool = False
    unsafe_truncate_embeddings: bool = False
    transformers_cache: str | None = None
    lora_merge_cache: str | None = None
    lora_merge_dtype: str | None = None
    cuda: bool = False
    device: str | None = None
    low_cpu_memory: bool = False
    out_shard_size: int = 5 * 10**9
    copy_tokenizer: bool = True
    clone_tensors: bool = False
    trust_remote_code: bool = False
    random_seed: int | None = None
    lazy_unpickle: bool = False
    write_model_card: bool = True
    safe_serialization: bool = True
    verbosity: int = 0
    quiet: bool = False
    read_to_gpu: bool = False
    multi_gpu: bool = False
    num_threads: int | None = None
    gpu_rich: bool = False
    async_write: bool = False
    write_threads: int = 1

    @property
    def on_gpu(self) -> bool:
        if self.device in (None, "auto"):
            return self.cuda or self.gpu_rich or (self.device == "auto" and _has_gpu())
        return str(self.device).startswith("cuda")

    def unneeded(self) -> list[str]:
        """Options that were given and change nothing, each with the reason."""
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return [f"{name} is not needed: {IDLE[name]}" for name in given if name in IDLE]

    def keywords(self) -> Keywords:
        """The same as arguments of `sigmerge.merge`; a folder that is there is replaced."""
        found: Keywords = {
            "overwrite": True,
            "allow_pickle": self.lazy_unpickle,
            "trust_remote_code": self.trust_remote_code,
            "device": "cuda" if self.on_gpu else "cpu",
            "max_shard_size": f"{self.out_shard_size}",
        }
        if self.num_threads is not None:
            found["threads"] = self.num_threads
        return found


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


class MergeConfiguration(dict[str, Any]):
    """A recipe as mergekit's class of this name has it: the keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get(name)

    @classmethod
    def model_validate(cls, content: Any) -> MergeConfiguration:
        if not isinstance(content, Mapping):
            raise RecipeError("The recipe is no mapping.")
        return cls(content)

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> MergeConfiguration:
        plain = text if isinstance(text, str) else text.decode()
        return cls.model_validate(parse_yaml(plain, "the recipe", RecipeError).value)

    def model_dump(self, **how: Any) -> dict[str, Any]:
        return dict(self)

    def to_yaml(self) -> str:
        return as_yaml(dict(self))


def run_merge(
    merge_config: MergeConfiguration | Mapping[str, Any],
    out_path: str | os.PathLike[str],
    options: MergeOptions | None = None,
    config_source: str | None = None,
) -> Merged:
    """Merge as the configuration says into a folder, which is replaced if it is there.

    `config_source` is what the result keeps as mergekit_config.yml, in place of the configuration.
    """
    chosen = options or MergeOptions()
    for line in chosen.unneeded():
        _LOG.info(line)
    if chosen.transformers_cache:
        _download_to(chosen.transformers_cache)
    content = dict(merge_config)
    if chosen.random_seed is not None:
        content.setdefault("seed", chosen.random_seed)
    done = merge(content, out_path, **chosen.keywords())
    text = config_source or MergeConfiguration(merge_config).to_yaml()
    Path(done.out, "mergekit_config.yml").write_text(text, encoding="utf-8")
    return done


def merge_tensors(
    tensors: Sequence[torch.Tensor],
    method: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    ids: Sequence[Hashable] | None = None,
    base_index: int | None = None,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Merge tensors of one shape; the arguments are mergekit's."""
    called = list(ids) if ids is not None else list(range(len(tensors)))
    if len(called) != len(tensors):
        raise RecipeError(f"ids: {len(called)} are given for {len(tensors)} tensors.")
    key = name or "weight"
    models = {one: {key: tensor} for one, tensor in zip(called, tensors, strict=True)}
    base = None if base_index is None else called[base_index]
    made = merge_state_dicts(
        models, method, parameters=parameters, base=base, dtype=dtype, out_dtype=out_dtype
    )
    return made[key]


def merge_state_dicts(
    models: Mapping[Hashable, Any] | Sequence[Any],
    method: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    base: Hashable | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    batch_options: Any = None,
) -> dict[str, torch.Tensor]:
    """Merge modules or state dicts; the arguments are mergekit's.

    A parameter that models have of their own is one value, a sequence in their order, or a mapping
    by their keys. Memory is bounded without batches, so `batch_options` change nothing. Results
    have no gradients.
    """
    given = dict(models) if isinstance(models, Mapping) else dict(enumerate(models))
    if base is not None and base not in given:
        raise RecipeError(f"base: {base!r} is none of the models ({', '.join(map(str, given))}).")
    dicts = {key: _state_dict(model) for key, model in given.items()}
    names = list(next(iter(dicts.values()), {}))
    for key, one in dicts.items():
        if strict and (differing := sorted(set(names) ^ one.keys())):
            raise RecipeError(f"{key!r}: not all models have {differing[0]}; strict=False merges "
                              "what all have.")  # fmt: skip
        names = [name for name in names if name in one]
    with scratch() as folder:
        places = {
            key: str(store({name: one[name] for name in names}, folder / f"model {number}"))
            for number, (key, one) in enumerate(dicts.items())
        }
        recipe = _in_memory(places, method, parameters or {}, base)
        written = out_dtype or dtype
        if written is not None:
            recipe["dtype"] = str(written).removeprefix("torch.")
        found = Recipe.from_mapping(recipe).plan().state_dict()
    return {name: found[name] for name in names}


def _state_dict(model: Any) -> Mapping[str, torch.Tensor]:
    found = model.state_dict() if hasattr(model, "state_dict") else model
    if not isinstance(found, Mapping):
        raise TypeError(f"Expected a module or a state dict, got {type(model).__name__}")
    return found


def _in_memory(
    places: Mapping[Hashable, str],
    method: str,
    parameters: Mapping[str, Any],
    base: Hashable | None,
) -> dict[str, Any]:
    """The recipe of stored models; the base is merged like others where a method has no base."""
    known = operator(method)
    own = {each.name for each in known.parameters if each.per_model}
    entries: dict[Hashable, dict[str, Any]] = {
        key: {"model": place, "name": f"model_{number}", "parameters": {}}
        for number, (key, place) in enumerate(places.items())
        if key != base or not known.needs_reference
    }
    shared: dict[str, Any] = {}
    for name, value in parameters.items():
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if name not in own or not (listed or isinstance(value, Mapping)):
            shared[name] = value
            continue
        if listed and len(value) != len(places):
            raise RecipeError(f"{name}: {len(value)} values are given for {len(places)} models.")
        each = value if isinstance(value, Mapping) else dict(zip(places, value, strict=True))
        for key, one in each.items():
            if key in entries:
                entries[key]["parameters"][name] = one
    recipe = {"merge_method": method, "models": list(entries.values()), "parameters": shared}
    return recipe if base is None else {**recipe, "base_model": places[base]}


def _download_to(folder: str) -> None:
    """Where models of the hub are kept from now on."""
    os.environ["HF_HUB_CACHE"] = folder
    if loaded := sys.modules.get("huggingface_hub.constants"):
        loaded.HF_HUB_CACHE = folder  # type: ignore[attr-defined]


def parse_kmb(value: str | int) -> int:
    """A number with K, M or B behind it."""
    found = re.fullmatch(r"(\d+)\s*([KMB]?)", str(value).strip(), re.I)
    if found is None:
        raise RecipeError(f"{value!r}: is no number such as 500M or 5B.")
    return int(found[1]) * 1000 ** " KMB".index(found[2].upper() or " ")
