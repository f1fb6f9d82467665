"""MXFP4: numbers of four bits in groups of 32, each group with a power of two (as in gpt-oss).

`W_blocks` has, for each expert, output and group, sixteen bytes of two numbers, the first in the
lower half; `W_scales` has the group's exponent with the bias 127. The plain tensor W is
(expert, input, output): the groups lie along the input, which is its second dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.lazy import FormedTensor, TensorRun, Values
from sigmerge.core import Array
from sigmerge.errors import PoolError

MXFP4 = "mxfp4"
_GROUP = 32
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_HALF, -_HALF])
"""The values of the sixteen codes."""
_BLOCKS, _SCALES = "_blocks", "_scales"


def plain(
    folder: Path, quantisation: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: str
) -> tuple[dict[str, Tensor], list[str]]:
    """The plain tensors; none is left out but the scales."""
    found: dict[str, Tensor] = {}
    problems = []
    for name, stored in tensors.items():
        parts = (name.removesuffix(_BLOCKS), name.removesuffix(_SCALES))
        if stored.dtype != "U8" or parts == (name, name):
            found[name] = stored
        elif parts[0] == name:
            if parts[1] + _BLOCKS not in tensors:
                problems.append(f"{name}: no {parts[1]}{_BLOCKS}")
        elif (scales := tensors.get(parts[0] + _SCALES)) is None or not _fit(stored, scales):
            has = "no scales" if scales is None else f"scales of shape {list(scales.shape)}"
            problems.append(f"{name}: {stored.dtype} {list(stored.shape)} with {has}")
        else:
            experts, outputs, groups, _ = stored.shape
            shape = experts, groups * _GROUP, outputs
            found[parts[0]] = PackedTensor(
                parts[0], dtype, shape, stored.file, stored.begin, stored.end,
                version=stored.version, blocks=stored, scales=scales,
            )  # fmt: skip
    if problems:
        raise PoolError(f"{folder}: MXFP4 weights that cannot be read:", problems[:12])
    return found, []


def _fit(blocks: Tensor, scales: Tensor) -> bool:
    shaped = len(blocks.shape) == 4 and blocks.shape[3] == _GROUP // 2
    return shaped and scales.shape == blocks.shape[:3] and scales.dtype == "U8"


@dataclass(frozen=True)
class PackedTensor(FormedTensor):
    """Packed numbers, each multiplied by the power of two of its group, turned.

    A run is read from whole groups of all outputs of its experts.
    """

    blocks: Tensor
    scales: Tensor

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        """As many stored elements as the run takes; they lie scattered over their expert."""
        return [
            (part, start * part.size // self.size, stop * part.size // self.size)
            for part in (self.blocks, self.scales)
        ]

    def form(self, values: Values, start: int, out: Array) -> None:
        _, inputs, outputs = self.shape
        one, stop = inputs * outputs, start + out.size
        for expert in range(start // one, -(-stop // one)):
            first, last = max(start - expert * one, 0), min(stop - expert * one, one)
            place = expert * one + first - start
            out[place : place + last - first] = self._expert(values, expert, first, last)

    def _expert(self, values: Values, expert: int, first: int, last: int) -> Array:
        """Elements [first, last) of an expert's matrix."""
        _, outputs, groups, half = self.blocks.shape
        count = outputs * groups
        packed = values.raw(self.blocks, expert * count * half, (expert + 1) * count * half)
        exponents = values.raw(self.scales, expert * count, (expert + 1) * count)
        begin, end = first // (_GROUP * outputs), -(-last // (_GROUP * outputs))
        codes = packed.reshape(outputs, groups, half)[:, begin:end]
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(outputs, -1, _GROUP)
        powers = exponents.reshape(outputs, groups)[:, begin:end, None].astype(np.int32) - 127
        with np.errstate(over="ignore"):  # infinity is refused by whoever reads it
            found = np.ldexp(E2M1[pairs], powers).reshape(outputs, -1).T
        return found.reshape(-1)[first - begin * _GROUP * outputs :][: last - first]
