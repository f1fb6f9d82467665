"""The prompt Grams of an expert, kept: what the representation view is made of."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.declared import checkpoint_files, files_around, named, shown_folder
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.core import Array
from sigmerge.engine.machine import device_kind, free_memory
from sigmerge.files.scratch import scratch
from sigmerge.kept import Derivation, Given, Inputs, KeptEntry
from sigmerge.probing.exemplars import read_prompts

_FILE = "grams.npy"


def prompt_grams(
    expert: Checkpoint, tokenizer: Path, prompts: Path, device: str, trust: bool, near: Path
) -> Derivation:
    """One Gram matrix of the prompts per block; `tokenizer` is the folder of the tokenizer."""
    return Derivation(
        "grams",
        partial(_probed, expert, tokenizer, device, trust),
        Inputs.of(
            expert=checkpoint_files(expert), tokenizer=files_around(tokenizer), prompts=prompts
        ),
        {"device": device_kind(device), "trust_remote_code": trust},
        ("torch", "transformers", "tokenizers"),
        of=expert.place,
        near=near,
    )


def read_grams(entry: KeptEntry) -> Array:
    found: Array = np.load(entry.folder / _FILE, allow_pickle=False)
    return found


def _probed(expert: Checkpoint, tokenizer: Path, device: str, trust: bool, given: Given) -> Any:
    """Layers that memory does not hold in float32 stay on the disk."""
    from sigmerge.probing.hidden import probe

    prompts = read_prompts(given.path("prompts"))
    how: dict[str, Any] = {
        "tokenizer": given.folder("tokenizer", tokenizer.name),
        "trust_remote_code": trust,
    }
    folder = shown_folder(given, "expert", expert)
    held = 4 * sum(tensor.size for tensor in expert.tensors.values()) < 0.8 * free_memory()
    with named(folder, expert):
        if held or device_kind(device) != "cpu":
            grams = probe(folder, prompts, device=device, **how)
        else:
            with scratch(given.out) as place:
                grams = probe(folder, prompts, offload_folder=place, **how)
    np.save(given.out / _FILE, grams)
    return {"blocks": len(grams), "prompts": len(prompts)}
