"""A configuration may name a billion layers; a model is built no larger than its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import PoolError
from sigmerge.files.documents import read_json_object

MOST_LAYERS = 100_000
"""Of a configuration: transformers makes a list of them before it makes a layer."""
SPARE = 1000
"""Parts that a model may have besides four for every tensor: dropouts, activations, containers."""


class TooLarge(ValueError):
    """Raised if a configuration names many more parts than there are weights."""


@contextmanager
def bounded(model: Path | str | Mapping[str, Any], stored: int = MOST_LAYERS) -> Iterator[None]:
    """In this context transformers builds a model; ValueError if it is far too large.

    It is that of a folder, or of a configuration with so many `stored` tensors.
    """
    from torch.nn.modules import module

    if isinstance(model, Mapping):
        _check_layers(model)
    else:
        stored = _stored(Path(model))
    counted, most = 0, 4 * stored + SPARE

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1
        if counted > most:
            raise TooLarge(f"the configuration has more than {most} parts")

    hooks = [
        module.register_module_module_registration_hook(count),
        module.register_module_parameter_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _stored(folder: Path) -> int:
    try:
        _check_layers(read_json_object(folder / "config.json", "a configuration", PoolError))
        return len(open_checkpoint(folder).tensors)
    except PoolError:  # pickled weights, or none; whoever loads the model says so
        return MOST_LAYERS


def _check_layers(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _check_layers(value)
        elif isinstance(value, int) and value > MOST_LAYERS and ("layer" in key or "expert" in key):
            raise TooLarge(f"{key} is larger than {MOST_LAYERS}")
