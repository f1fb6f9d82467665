"""Pickled weights, only on request: loaded weights-only and kept as safetensors in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sigmerge.errors import MissingExtra, OutputError, PoolError
from sigmerge.files.cache import cache_folder
from sigmerge.files.digests import identity
from sigmerge.files.documents import whole


def as_safetensors(pickles: list[Path]) -> list[Path]:
    """A safetensors twin of every pickle. Code inside a pickle is never run."""
    try:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtra("torch", "models", "Reading pickled weights") from None
    twins = []
    for pickle in pickles:
        key = hashlib.sha256(identity(pickle).encode()).hexdigest()[:24]
        twin = cache_folder("unpickled") / f"{key}.safetensors"
        if not twin.exists():
            try:
                state = torch.load(pickle, map_location="cpu", weights_only=True, mmap=True)
                copies = {name: value.contiguous().clone() for name, value in state.items()}
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise PoolError(f"{pickle}: cannot be loaded weights-only ({reason}).") from None
            try:
                with whole(twin) as partial:
                    save_file(copies, partial)
            except (OSError, SafetensorError) as error:
                raise OutputError(f"{twin}: cannot be written ({error}).") from None
        twins.append(twin)
    return twins
