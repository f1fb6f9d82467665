"""What enters the matrices of a mixture's experts: token by token, float64, from stored tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.probing import models

Array = np.ndarray[Any, Any]
MIXTRAL = ("block_sparse_moe", "gate", ("w1", "w3", "w2"))
QWEN = ("mlp", "gate", ("gate_proj", "up_proj", "down_proj"))


def routed(
    folder: Path, family: str, texts: Sequence[Sequence[int]], top: int = 2, skip_bos: bool = False
) -> dict[str, Array]:
    """Rows by stored name, those of a stack as name[number]: one for every token sent there."""
    model = models.load(folder)
    stored = {n: v.double() for n, v in load_file(folder / "model.safetensors").items()}
    found: dict[str, list[Any]] = {}

    def hook(layer: int) -> Any:
        def note(_: Any, args: Any) -> None:
            for token in args[0][0].double()[1 if skip_bos else 0 :]:
                for name, row in _token(stored, f"model.layers.{layer}", family, token, top):
                    found.setdefault(name, []).append(row)

        return note

    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(hook(i))
    with torch.no_grad():
        for ids in texts:
            model(input_ids=torch.tensor([ids]))
    return {name: torch.stack(rows).numpy() for name, rows in found.items()}


def _token(
    stored: dict[str, Any], layer: str, family: str, x: Any, top: int
) -> Iterator[tuple[str, Any]]:
    if family == "gpt_oss":
        yield from _gpt_oss(stored, f"{layer}.mlp", x, top)
        return
    block, router, (gate, up, down) = MIXTRAL if family == "mixtral" else QWEN
    logits = stored[f"{layer}.{block}.{router}.weight"] @ x
    for number in logits.argsort(descending=True)[:top].tolist():
        names = [f"{layer}.{block}.experts.{number}.{part}.weight" for part in (gate, up, down)]
        opened = torch.nn.functional.silu(stored[names[0]] @ x)
        yield from ((names[0], x), (names[1], x), (names[2], opened * (stored[names[1]] @ x)))


def _gpt_oss(stored: dict[str, Any], mlp: str, x: Any, top: int) -> Iterator[tuple[str, Any]]:
    """Stacked, (in, out), gates and ups in turn."""
    logits = stored[f"{mlp}.router.weight"] @ x + stored[f"{mlp}.router.bias"]
    both, down = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
    for number in logits.argsort(descending=True)[:top].tolist():
        out = x @ stored[both][number] + stored[f"{both}_bias"][number]
        gate, up = out[::2].clamp(max=7.0), out[1::2].clamp(-7.0, 7.0)
        yield f"{both}[{number}]", x
        yield f"{down}[{number}]", (up + 1) * gate * torch.sigmoid(1.702 * gate)
