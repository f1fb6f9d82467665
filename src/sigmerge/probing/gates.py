"""Rows of a router from prompts: where a dense model's hidden states point on them.

The hidden states that enter a block are kept for all prompts; the block is loaded, the prompts pass
through it, and it is forgotten. So memory is that of one block, whatever the depth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.declared import checkpoint_files, named, shown_folder
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.source import PoolSource
from sigmerge.core import Array
from sigmerge.core.philox import key_of, normal, uniform
from sigmerge.engine.machine import device_kind
from sigmerge.errors import PoolError, RecipeError
from sigmerge.kept import Derivation, Given, Inputs, KeptEntry
from sigmerge.probing.exemplars import Tokens, tokenizer_of
from sigmerge.probing.memory import in_memory

Prompts = tuple[tuple[str, ...], tuple[str, ...]]
"""What is to be sent to an expert, and what is not."""
_Passed = Callable[[int, int], None]
"""Gets blocks done, and blocks in all."""
_FILE = "gates.npy"
_LEAST = 1e-8
"""Of a norm that is divided by."""


def gate_rows(
    base: Checkpoint, prompts: Sequence[Prompts], mode: str, device: str, trust: bool,
    progress: _Passed = lambda done, total: None,
) -> Derivation:  # fmt: skip
    """Rows of unit length, (blocks, experts, width): the mean over positive prompts less that over
    negative ones.

    `hidden_last` takes what enters a block at a prompt's last token, `hidden_avg` the mean over its
    tokens, `cheap_embed` the embeddings of its tokens for every block.
    """
    return Derivation(
        "gates",
        partial(_measured, base, prompts, mode, device, trust, progress),
        Inputs.of(base=checkpoint_files(base)),
        {
            "mode": mode,
            "prompts": json.dumps(prompts),
            "device": device_kind(device),
            "trust_remote_code": trust,
        },
        ("torch", "transformers", "tokenizers"),
        of=base.place,
        near=base.path,
    )


def read_gates(entry: KeptEntry) -> Array:
    found: Array = np.load(entry.folder / _FILE, allow_pickle=False)
    return found


def random_gates(shape: tuple[int, int, int], mode: str, seed: int) -> Array:
    """Rows that follow from the seed: normal, or as torch begins a linear layer."""
    rows = np.empty(int(np.prod(shape)), np.float32)
    key = key_of(seed, "gates")
    if mode == "random":
        normal(key, 0, rows)
    else:
        uniform(key, 0, rows)
        rows = ((2 * rows - 1) / np.sqrt(shape[2])).astype(np.float32)
    return rows.reshape(shape)


def undecided(gates: Array, most: float = 5.0) -> list[int]:
    """Blocks whose rows are so alike that some expert is hardly chosen: by their condition."""
    return [i for i, rows in enumerate(gates) if np.linalg.cond(rows.astype(np.float64)) > most]


def tokens_of(folder: Path, texts: Sequence[str], trust: bool) -> list[Tokens]:
    """Each prompt behind the token that begins a text, without other special tokens."""
    tokenizer = tokenizer_of(folder, trust)
    begin = tokenizer.bos_token or ""
    rows = []
    for text in texts:
        ids = tokenizer(begin + text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise RecipeError(f"The prompt {text!r} is empty to the tokenizer of {folder}.")
        rows.append(Tokens(tuple(ids), len(ids)))
    return rows


def _measured(
    base: Checkpoint, prompts: Sequence[Prompts], mode: str, device: str, trust: bool,
    progress: _Passed, given: Given,
) -> dict[str, Any]:  # fmt: skip
    """Write the rows; returns what is told about them."""
    given.allow(base.files)
    folder = shown_folder(given, "base", base)
    own = replace(base, path=home_of(folder))
    texts = list(dict.fromkeys(text for pair in prompts for side in pair for text in side))
    with named(folder, base), in_memory(f"{base.place}: the hidden states of prompts"):
        rows = tokens_of(own.path, texts, trust)
        if mode == "cheap_embed":
            states = _embedded(base, rows)
        else:
            states = _hidden(own, base, rows, mode == "hidden_avg", device, trust, progress)
    place = {text: at for at, text in enumerate(texts)}
    gates = [
        [
            _direction(layer, [place[t] for t in yes], [place[t] for t in no], mode)
            for yes, no in prompts
        ]
        for layer in states
    ]
    np.save(given.out / _FILE, np.array(gates, np.float32))
    return {"blocks": len(gates), "prompts": len(texts), "tokens": sum(len(r.ids) for r in rows)}


def _direction(states: Array, yes: Sequence[int], no: Sequence[int], mode: str) -> Array:
    """Of unit length: from what is not meant to what is. Sums are float64."""
    point = _mean(states, yes, mode)
    if no:
        point = point - _mean(states, no, mode)
    return point / max(float(np.linalg.norm(point)), _LEAST)


def _mean(states: Array, rows: Sequence[int], mode: str) -> Array:
    """The mean over prompts; of embeddings the sum over all tokens, of unit length, as mergekit."""
    mean: Array = states[list(rows)].sum(axis=0, dtype=np.float64)
    if mode == "cheap_embed":
        return mean / max(float(np.linalg.norm(mean)), _LEAST)
    return mean / len(rows)


def _embedded(base: Checkpoint, rows: Sequence[Tokens]) -> list[Array]:
    """The sum of every prompt's embeddings, for all blocks. Only rows of its tokens are read."""
    if base.embedding is None:
        raise PoolError(f"{base.place}: no embedding of tokens is found by its name.")
    width = base.tensors[base.embedding].shape[1]
    sums, one = np.zeros((len(rows), width)), np.empty(width, np.float32)
    with PoolSource({"base": base}) as source:
        for at, row in enumerate(rows):
            for token in row.ids:
                source.fill("base", base.embedding, token * width, one)
                sums[at] += one
    return [sums] * base.stack.depth


def _hidden(
    shown: Checkpoint, base: Checkpoint, rows: Sequence[Tokens], averaged: bool, device: str,
    trust: bool, progress: _Passed,
) -> list[Array]:  # fmt: skip
    """Of every block the state with which each prompt enters it, at its last token or averaged."""
    import torch

    from sigmerge.probing.skeleton import Skeleton, reader
    from sigmerge.probing.threads import one_torch_thread

    model, found = Skeleton(shown, reader(base), device=device, trust=trust), []
    with one_torch_thread(), torch.no_grad():
        states, calls = model.enter(rows)
        for i in range(len(model.blocks)):
            points = [
                (s[0].double().mean(dim=0) if averaged else s[0, -1].double()) for s in states
            ]
            found.append(torch.stack(points).cpu().numpy())
            if i + 1 < len(model.blocks):  # nothing reads what the last one gives
                with model.loaded(i) as block:
                    for at, (state, call) in enumerate(zip(states, calls, strict=True)):
                        out = block(state, *call[i][0], **call[i][1])
                        states[at] = out[0] if isinstance(out, tuple) else out
            progress(i + 1, len(model.blocks))
    return found
