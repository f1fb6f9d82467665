"""Loads checkpoints as models of transformers: names, adapters, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.source import FormedValues
from sigmerge.engine.machine import device_kind
from sigmerge.errors import PoolError, RecipeError, SigmergeError, is_panic
from sigmerge.probing.bounded import bounded
from sigmerge.probing.memory import full, is_full


@contextmanager
def loading(folder: Path | str, purpose: str) -> Iterator[None]:
    """In this context every exception of a library becomes a PoolError.

    A damaged configuration or tokenizer makes them raise errors of any kind.
    """
    try:
        with quiet():
            yield
    except SigmergeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if is_full(error):
            raise full(f"{folder} cannot be loaded for {purpose}", error) from error
        if "trust_remote_code" in str(error):
            raise PoolError(
                f"{folder} brings Python code of its own, which is not run unasked. Read it; if "
                "you trust it, pass --trust-remote-code."
            ) from error
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise PoolError(f"{folder} cannot be loaded for {purpose}: {kind}{error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers in this context; ours report how far the work is."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


HEADS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM")
"""Kinds of models that answer with logits: of text, of text beside pictures, encoder-decoder."""


def model_class(config: Any) -> Any:
    """What transformers builds models of a configuration by: the kind that `architectures` names.

    Without such an entry it is the first kind that knows the configuration, a causal model first.
    """
    import transformers

    kinds = [getattr(transformers, name) for name in HEADS if hasattr(transformers, name)]
    named = set(getattr(config, "architectures", None) or ())
    known = {kind: kind._model_mapping.get(type(config), None) for kind in kinds}
    for kind, classes in known.items():
        some = classes if isinstance(classes, tuple | list) else (classes,)
        if named & {one.__name__ for one in some if one is not None}:
            return kind
    return next((kind for kind, classes in known.items() if classes is not None), kinds[0])


def load_pretrained(folder: Path, trust: bool, **how: Any) -> Any:
    """The model of a folder, with its weights."""
    from transformers import AutoConfig

    options = {"local_files_only": True, "trust_remote_code": trust}
    with bounded(folder):
        config = AutoConfig.from_pretrained(str(folder), **options)
        return model_class(config).from_pretrained(str(folder), **options, **how)


def renaming(model: Any) -> Callable[[str], str]:
    """Returns transformers' name of a stored tensor of this model."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # before version 5, models were called as they are stored
        return lambda stored: stored

    rules = [r for r in get_model_conversion_mapping(model) or () if isinstance(r, WeightRenaming)]

    def renamed(stored: str) -> str:
        for rule in rules:
            stored, _ = rule.rename_source_key(stored)
        return stored

    return renamed


def joins(model: Any, names: Iterable[str]) -> Iterator[tuple[str, Any, str, str]]:
    """Names that are joined to one parameter: each with what joins it, its role, and the result."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # before version 5, models were stored as they are
        return
    rules = [r for r in get_model_conversion_mapping(model) or () if isinstance(r, WeightConverter)]
    for name in names:
        for rule in rules:
            target, pattern = rule.rename_source_key(name)
            if pattern is not None:
                yield name, rule, pattern, target
                break


@dataclass
class JoinedTensors:
    """The tensors that transformers joins to one parameter by its rule, and takes apart again.

    `members` are their stored names and roles, by the name that transformers gives each.
    """

    target: str
    rule: Any
    model: Any
    members: dict[str, tuple[str, str]] = field(default_factory=dict)

    def load(self, read: Callable[[str], Any]) -> Any:
        import torch

        rule = deepcopy(self.rule)
        for name, (stored, pattern) in self.members.items():
            rule.add_tensor(self.target, name, pattern, torch.from_numpy(read(stored)))
        made = rule.convert(self.target, model=self.model, config=self.model.config)[self.target]
        return made[0] if isinstance(made, list) else made

    def apart(self, values: Any) -> dict[str, Any]:
        rule = self.rule.reverse_transform()
        name, pattern = rule.rename_source_key(self.target)
        rule.add_tensor(name, self.target, pattern, values)
        made = rule.convert(name, model=self.model, config=self.model.config)
        return {
            self.members[name][0]: value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }


def set_head(model: Any, own: bool) -> None:
    """Give a head that is the model's embedding a weight of its own, or take it back."""
    from torch import nn

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return
    if own and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    elif not own and getattr(model.config, "tie_word_embeddings", False):
        head.weight = embedding.weight


def put_adapter(model: Any, path: Path) -> None:
    """Give a model of the folder in `model+adapter` the weights that the adapter changes."""
    import torch

    if home_of(path) == path:
        return
    adapted, plain = open_checkpoint(path), open_checkpoint(home_of(path)).tensors
    if adapted.head and adapted.embedding:
        set_head(model, own=True)
        plain.setdefault(adapted.head, replace(plain[adapted.embedding], name=adapted.head))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    renamed, values = renaming(model), FormedValues(Reader())
    for name, tensor in adapted.tensors.items():
        if tensor == plain.get(name):
            continue
        place = _parameter(renamed(name), parameters)
        weight = parameters.get(place or "")
        fits = weight is not None and tuple(weight.shape) == tensor.shape and not weight.is_meta
        if weight is None or not fits or name not in plain:
            raise PoolError(
                f"{adapted.place}: its {name} cannot be put into the loaded model; store the model "
                "with its adapter first, by merge_method: passthrough."
            )
        with torch.no_grad():
            whole = values(tensor, 0, tensor.size).reshape(tensor.shape)
            weight.copy_(torch.from_numpy(whole))


def _parameter(name: str, parameters: Mapping[str, Any]) -> str | None:
    """The parameter of a stored tensor, whose name may lack the model's own prefix."""
    ends = [n for n in parameters if n == name or n.endswith(f".{name}")]
    return name if name in parameters else ends[0] if len(ends) == 1 else None


def checked_device(device: str) -> str:
    """The device, or an error if it does not exist."""
    if device_kind(device) == "cpu":
        return device
    import torch

    if not torch.cuda.is_available():
        raise RecipeError("device: cuda is set, and torch finds no GPU; use cpu, or a machine "
                          "that has one.")  # fmt: skip
    return device
