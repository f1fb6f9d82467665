"""Tiny quantised folders, made by torch from the folders of a pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn


def scales_of(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest value of each block, by the largest of the type."""
    rows, columns = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
    found = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * block[0] :, column * block[1] :][: block[0], : block[1]]
            found[row, column] = part.abs().max() / 448
    return found


def spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def to_fp8(
    folder: Path, config: dict[str, Any], block: tuple[int, int] | None, suffix: str = "_scale_inv"
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Quantise the projections of a folder in place; what is stored of each.

    `block` None is one scale for each tensor. Returns weight and scales by name.
    """
    file = folder / "model.safetensors"
    tensors, made = load_file(file), {}
    for name, weight in list(tensors.items()):
        if "_proj.weight" not in name:
            continue
        side = block or tuple(weight.shape)
        scale = scales_of(weight.float(), side)
        codes = (weight.float() / spread(scale, weight.shape, side)).clamp(-448, 448).to(FP8)
        made[name] = codes, scale
        tensors[name] = codes
        tensors[name + suffix] = scale if block else scale.reshape(())
    save_file(tensors, file)
    say(folder, config)
    return made


def say(folder: Path, quantisation: dict[str, Any]) -> None:
    """Name the form in the configuration."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"quantization_config": quantisation}))
