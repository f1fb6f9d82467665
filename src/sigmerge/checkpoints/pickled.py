"""Pickled weights, only on request: loaded weights-only and kept as safetensors in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sigmerge.errors import MissingExtra, OutputError, PoolError
from sigmerge.files.cache import cache_folder
from sigmerge.files.digests import identity
from sigmerge.files.documents import whole
from sigmerge.files.locks import locked


def as_safetensors(pickles: list[Path]) -> list[Path]:
    """A safetensors twin of every pickle. Code inside a pickle is never run."""
    return [_twin(pickle) for pickle in pickles]


def _twin(pickle: Path) -> Path:
    """The twin, made by one process at a time: another may be reading it already."""
    key = hashlib.sha256(identity(pickle).encode()).hexdigest()[:24]
    twin = cache_folder("unpickled") / f"{key}.safetensors"
    if twin.exists():
        return twin
    try:
        with locked(twin.with_suffix(".lock"), wait=True):
            if not twin.exists():
                _convert(pickle, twin)
    except OSError as error:
        raise OutputError(f"{twin}: cannot be written ({error}).") from None
    return twin


def _convert(pickle: Path, twin: Path) -> None:
    try:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtra("torch", "models", "Reading pickled weights") from None
    try:
        state = torch.load(pickle, map_location="cpu", weights_only=True, mmap=True)
        copies = {name: value.contiguous().clone() for name, value in state.items()}
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PoolError(f"{pickle}: cannot be loaded weights-only ({reason}).") from None
    try:
        with whole(twin) as partial:
            save_file(copies, partial)
    except SafetensorError as error:
        raise OutputError(f"{twin}: cannot be written ({error}).") from None
