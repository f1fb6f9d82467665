"""Quantised weights as numbers of 64 bits, one after another, by torch's own types."""

from __future__ import annotations

import itertools

import numpy as np
import torch

SIGNED = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def scaled(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> np.ndarray:
    """Each value times the scale of its block; `scale` has a row for each row of blocks."""
    values, scales = weight.double().numpy(), scale.double().numpy()
    found = np.empty(values.shape)
    for place in itertools.product(*map(range, values.shape)):
        *stack, row, column = place
        found[place] = values[place] * scales[(*stack, row // block[0], column // block[1])]
    return found


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """(expert, output, group, byte) and (expert, output, group) -> (expert, input, output)."""
    experts, outputs, groups, half = blocks.shape
    found = np.empty((experts, groups * half * 2, outputs))
    for expert, output, group, byte in itertools.product(*map(range, blocks.shape)):
        packed = int(blocks[expert, output, group, byte])
        power = 2.0 ** (int(scales[expert, output, group]) - 127)
        place = group * half * 2 + byte * 2
        found[expert, place, output] = SIGNED[packed % 16] * power
        found[expert, place + 1, output] = SIGNED[packed // 16] * power
    return found
