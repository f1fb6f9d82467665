"""Which quantised form a folder's configuration names, and its tensors as plain ones.

A weight and its scales are read as one tensor: float32 values that are computed strip by strip
when they are read, and stand for a tensor of the type in which the model computes. A form that
cannot be read is refused before a tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sigmerge.checkpoints import mxfp4, scaled
from sigmerge.checkpoints.header import Tensor
from sigmerge.errors import PoolError
from sigmerge.messages import few, shown

CONFIG_KEY = "quantization_config"
COMPUTE_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BESIDE = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
"""Files with which older exporters said it, in place of the configuration."""
_OLDER = "compression_config"
"""What compressed-tensors called its entry before."""


class Plain(NamedTuple):
    """Tensors of a quantised folder as plain ones; `title` is the form, `told` a note on it."""

    title: str
    tensors: dict[str, Tensor]
    told: str


def quantisation_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of quantised weights; {} where they are plain.

    PoolError for a form that cannot be read.
    """
    found = config.get(CONFIG_KEY) or config.get(_OLDER) or {}
    if not isinstance(found, dict):
        raise PoolError(f"{folder / 'config.json'}: {CONFIG_KEY}: {shown(found)} cannot be right.")
    beside = [(m, file) for file, m in _BESIDE.items() if (folder / file).exists()]
    if not found and beside:
        raise _unread(folder, f"{beside[0][0]}, see {beside[0][1]}")
    if found:
        method = str(found.get("quant_method", "unknown"))
        if method not in _READERS:
            raise _unread(folder, method)
        if why := _READERS[method].unread(found):
            raise _unread(folder, f"{method}, {why}")
    return found


def _unread(folder: Path, what: str) -> PoolError:
    return PoolError(
        f"{folder}: quantised weights ({what}) cannot be merged; use the checkpoint they were "
        "made from. What can be read: FP8 and int8 with a scale for each tensor, channel or block "
        "(quant_method fp8, fbgemm_fp8, compressed-tensors, modelopt), MXFP4, and GGUF."
    )


class _Reader(NamedTuple):
    unread: Callable[[Mapping[str, Any]], str]
    plain: Callable[..., tuple[dict[str, Tensor], list[str]]]
    title: Callable[[Mapping[str, Any]], str]


_SCALED = _Reader(scaled.unread, scaled.plain, scaled.title)
_READERS = {
    **dict.fromkeys(scaled.METHODS, _SCALED),
    mxfp4.MXFP4: _Reader(lambda _: "", mxfp4.plain, lambda _: "MXFP4"),
}


def plain_tensors(
    folder: Path,
    config: Mapping[str, Any],
    quantisation: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Plain:
    """The tensors of a quantised folder as plain ones; those of its scales are gone."""
    dtype = _computed_in(config)
    reader = _READERS[str(quantisation["quant_method"])]
    found, left = reader.plain(folder, quantisation, tensors, dtype)
    count = sum(name not in tensors or found[name] is not tensors[name] for name in found)
    title = reader.title(quantisation)
    told = f"{title}: {count} weights are dequantised while they are read (stands for {dtype})"
    told += f"; not used: {few(left)}" if left else ""
    return Plain(title, found, told)


def _computed_in(config: Mapping[str, Any]) -> str:
    """The type in which the model computes, which its quantised weights stand for."""
    for one in (config, config.get("text_config") or {}):
        named = str(one.get("dtype") or one.get("torch_dtype") or "").removeprefix("torch.")
        if named in COMPUTE_TYPES:
            return COMPUTE_TYPES[named]
    return "BF16"


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of plain weights."""
    return {k: v for k, v in config.items() if k not in (CONFIG_KEY, _OLDER)}
