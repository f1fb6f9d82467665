"""FP8 and int8 weights with a scale for the tensor, for each row, or for each block.

A weight W of the type F8_E4M3, F8_E5M2 or I8 has its scales beside it, as `W_scale_inv` or
`W_scale`; both multiply. They have one value, one for each row, or a grid of two dimensions, the
last of which may be cut off at the end of the weight: ceil(rows / block) × ceil(columns / block).
A stack of experts has a grid for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.lazy import FormedTensor, TensorRun, Values
from sigmerge.core import Array
from sigmerge.errors import PoolError

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
EXPONENT = "F8_E8M0"
"""Scales that are powers of two: an exponent with the bias 127."""
_FORMATS = ("float-quantized", "naive-quantized", "int-quantized")
"""Formats of compressed-tensors with a value in each byte."""
_SUFFIXES = ("_scale_inv", "_scale")
_UNUSED = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale",
           "_activation_scale", ".input_scale_ub")  # fmt: skip
"""Scales of activations, which plain weights have no use for."""


def unread(quantisation: Mapping[str, Any]) -> str:
    """Why weights of this kind cannot be read; "" if they can."""
    method = quantisation.get("quant_method")
    named = str(quantisation.get("format", ""))
    if method == "compressed-tensors" and named not in _FORMATS:
        return f"format {named or 'unknown'}"
    algorithm = str(quantisation.get("quant_algo", "FP8"))
    if method == "modelopt" and not algorithm.upper().startswith("FP8"):
        return f"quant_algo {algorithm}"
    return ""


def title(quantisation: Mapping[str, Any]) -> str:
    block = _block(quantisation)
    kind = "int8" if quantisation.get("format") == "int-quantized" else "FP8"
    return f"{kind}, blocks of {block[0]}×{block[1]}" if block else f"{kind} with scales"


def _block(quantisation: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, where the configuration names them."""
    said = [quantisation.get("weight_block_size")]
    groups = quantisation.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = (group.get("weights") if isinstance(group, dict) else None) or {}
        said.append(weights.get("block_structure"))
        if isinstance(size := weights.get("group_size"), int) and size > 0:
            said.append([1, size])
    for one in said:
        if isinstance(one, list) and len(one) == 2 and all(
            isinstance(side, int) and side > 0 for side in one
        ):  # fmt: skip
            return one[0], one[1]
    return None


def plain(
    folder: Path, quantisation: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: str
) -> tuple[dict[str, Tensor], list[str]]:
    """The plain tensors, and the names of those that are left out besides the scales."""
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    problems = []
    for name, stored in tensors.items():
        if not _is_quantised(stored, quantisation):
            found[name] = stored
            continue
        scale = next((tensors[name + s] for s in _SUFFIXES if name + s in tensors), None)
        cut = None if scale is None else _cut(stored, scale, _block(quantisation))
        if scale is None or cut is None:
            has = "no scales" if scale is None else f"scales of shape {list(scale.shape)}"
            problems.append(f"{name}: {stored.dtype} {list(stored.shape)} with {has}")
            continue
        used.add(scale.name)
        found[name] = ScaledTensor(
            stored.name, dtype, stored.shape, stored.file, stored.begin, stored.end,
            version=stored.version, weight=stored, scale=scale, block=cut,
        )  # fmt: skip
    if problems:
        raise PoolError(f"{folder}: quantised weights that cannot be read:", problems[:12])
    left = sorted(name for name in found.keys() - used if name.endswith(_UNUSED))
    return {n: t for n, t in found.items() if n not in used and n not in left}, left


def _is_quantised(stored: Tensor, quantisation: Mapping[str, Any]) -> bool:
    whole = quantisation.get("format") in _FORMATS and stored.dtype == "I8"
    return stored.dtype in DECODED and stored.dtype != EXPONENT and (whole or stored.dtype != "I8")


def _cut(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns for which there is one scale; None if the two do not fit."""
    rows, columns = weight.shape[-2:] if len(weight.shape) > 1 else (1, weight.size)
    stack = math.prod(weight.shape[:-2])
    if not scale.floating and scale.dtype != EXPONENT:
        return None
    if scale.size == stack:
        return rows, columns
    if scale.size == stack * rows and block is None:
        return 1, columns
    grid = scale.shape[-2:] if len(scale.shape) > 1 else (scale.size, 1)
    if block is None and 0 not in grid and not rows % grid[0] and not columns % grid[1]:
        block = rows // grid[0], columns // grid[1]
    if block is None:
        return None
    fits = grid == (-(-rows // block[0]), -(-columns // block[1]))
    return block if fits and scale.size == stack * math.prod(grid) else (
        (1, columns) if scale.size == stack * rows else None
    )  # fmt: skip


def _exponents() -> Array:
    """Powers of two by their exponent with a bias; the last code is no number."""
    found = np.ldexp(1.0, np.arange(-127, 129))
    found[255] = np.nan
    return found.astype(np.float32)


def _small_floats(exponent_bits: int, has_infinity: bool) -> Array:
    """The float32 values of the 256 codes of a float of eight bits."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    normal = np.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias)
    small = np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias)
    values = np.where(exponent == 0, small, normal)
    if has_infinity:
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    else:
        values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


DECODED = {
    "F8_E4M3": _small_floats(4, has_infinity=False),
    "F8_E5M2": _small_floats(5, has_infinity=True),
    EXPONENT: _exponents(),
    "I8": np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32),
}
"""Stored type -> the values of its codes."""


@dataclass(frozen=True)
class ScaledTensor(FormedTensor):
    """Stored values, each multiplied by the scale of its block, in float32."""

    weight: Tensor
    scale: Tensor
    block: tuple[int, int]

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        return [(self.weight, start, stop), (self.scale, *self._scales(start, stop))]

    def form(self, values: Values, start: int, out: Array) -> None:
        stop = start + out.size
        codes = values.raw(self.weight, start, stop)
        np.take(DECODED[self.weight.dtype], codes, out=out)
        first, last = self._scales(start, stop)
        if self.scale.floating:
            scales = values(self.scale, first, last)
        else:
            scales = DECODED[EXPONENT][values.raw(self.scale, first, last)]
        # Whole rows of scales, of which one is repeated for each row and column of its block.
        columns = self._sides[1]
        top, bottom = start // columns, -(-stop // columns)
        grid = scales.reshape(-1, self._grid[1])
        rows = grid[self._grid_row(np.arange(top, bottom)) - first // self._grid[1]]
        wide = np.repeat(rows, self.block[1], axis=1)[:, :columns].reshape(-1)
        out *= wide[start - top * columns :][: out.size]

    @property
    def _sides(self) -> tuple[int, int]:
        return self.shape[-2:] if len(self.shape) > 1 else (1, self.size)  # type: ignore[return-value]

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of scales of one matrix."""
        (rows, columns), (high, wide) = self._sides, self.block
        return -(-rows // high), -(-columns // wide)

    def _grid_row(self, row: Any) -> Any:
        """The row of scales that belongs to a row of the stack of matrices."""
        rows = self._sides[0]
        return row // rows * self._grid[0] + row % rows // self.block[0]

    def _scales(self, start: int, stop: int) -> tuple[int, int]:
        """The whole rows of scales that these elements need."""
        columns, wide = self._sides[1], self._grid[1]
        first, last = self._grid_row(start // columns), self._grid_row((stop - 1) // columns)
        return first * wide, (last + 1) * wide
