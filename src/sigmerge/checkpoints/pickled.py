"""Pickled weights, only on request: loaded weights-only and kept as safetensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sigmerge import kept
from sigmerge.errors import MissingExtra, OutputError, PoolError
from sigmerge.files.documents import whole
from sigmerge.files.identity import InputIdentity, identify
from sigmerge.kept import Derivation, Given, Inputs

_TWIN = "weights.safetensors"


def as_safetensors(pickles: Iterable[Path]) -> dict[Path, InputIdentity]:
    """A safetensors twin of every pickle, and what the pickle was. No code inside one is run."""
    found = {}
    for pickle in pickles:
        [before] = identify([pickle])
        wanted = Derivation(
            "unpickled",
            _convert,
            Inputs.of(pickle=pickle),
            libraries=("torch", "safetensors"),
            of=str(pickle),
        )
        found[kept.get(wanted).folder / _TWIN] = before
    return found


def _convert(given: Given) -> None:
    pickle, twin = given.path("pickle"), given.out / _TWIN
    try:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtra("Reading pickled weights", ["torch"], ["models"]) from None
    try:
        state = torch.load(pickle, map_location="cpu", weights_only=True, mmap=True)
        state = state.get("state_dict", state)  # of a trainer's checkpoint
        copies = {name: value.contiguous().clone() for name, value in state.items()}
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PoolError(f"{pickle}: cannot be loaded weights-only ({reason}).") from None
    try:
        with whole(twin) as partial:
            save_file(copies, partial)
    except (SafetensorError, OSError) as error:
        raise OutputError(f"{twin}: cannot be written ({error}).") from None
