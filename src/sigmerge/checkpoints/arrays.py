"""Tensors in memory: the sink of a merge without a folder, and state dicts as inputs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.folder import SINGLE, Checkpoint
from sigmerge.checkpoints.header import ITEM_SIZE, encode_header
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.writer import Layout
from sigmerge.core.dtypes import STORAGE, WIDEN
from sigmerge.errors import PoolError
from sigmerge.messages import shown

if TYPE_CHECKING:
    from torch import Tensor

RawArray = np.ndarray[Any, Any]
NUMPY = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
    "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""The stored types that NumPy has; it lacks bfloat16 and float8."""
STORED_AS = {np.dtype(kind): name for name, kind in NUMPY.items()}
TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip


class Arrays:
    """A sink for a merge's tensors: the bytes that a file would have."""

    def __init__(self, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.done: dict[str, Any] = {}
        self.dtypes = {name: slot.dtype for name, slot in layout.slots.items()}
        self.shapes = shapes
        self._raw = {
            name: np.empty(slot.nbytes, np.uint8) for name, slot in layout.slots.items()
        }  # fmt: skip

    def write(self, tensor: str, start: int, raw: RawArray) -> None:
        begin = start * raw.itemsize
        self._raw[tensor][begin : begin + raw.nbytes] = raw.reshape(-1).view(np.uint8)

    def write_bytes(self, tensor: str, data: memoryview) -> None:
        self._raw[tensor][:] = np.frombuffer(data, np.uint8)

    def finish(self, block: str, record: Any = None, tensors: Iterable[str] | None = None) -> None:
        self.done[block] = record

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Arrays:
        """The tensors of a stored checkpoint."""
        made = cls.__new__(cls)
        made.done, reader = {}, Reader()
        made.dtypes = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
        made.shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        made._raw = {
            name: np.frombuffer(bytes(reader.bytes(tensor)), np.uint8).copy()
            for name, tensor in checkpoint.tensors.items()
        }
        return made

    def numpy(self) -> dict[str, RawArray]:
        """Arrays by name, of the stored types; bfloat16, which NumPy lacks, as float32."""
        return {name: self._array(name) for name in sorted(self._raw)}

    def torch(self) -> dict[str, Tensor]:
        """Torch tensors by name, of the stored types."""
        import torch

        return {
            name: torch.from_numpy(raw).view(getattr(torch, TORCH[self.dtypes[name]]))
            .reshape(self.shapes[name])
            for name, raw in sorted(self._raw.items())
        }  # fmt: skip

    def _array(self, name: str) -> RawArray:
        dtype, raw = self.dtypes[name], self._raw[name]
        if dtype in NUMPY:
            return raw.view(NUMPY[dtype]).reshape(self.shapes[name])
        if dtype not in WIDEN:
            raise PoolError(f"{name}: NumPy has no {dtype}; take torch tensors.")
        values = np.empty(raw.size // ITEM_SIZE[dtype], np.float32)
        WIDEN[dtype](raw.view(STORAGE[dtype]), values)
        return values.reshape(self.shapes[name])


def is_torch(value: object) -> bool:
    """Whether this is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def store(tensors: Mapping[str, Any], folder: Path) -> Path:
    """A folder with the arrays or torch tensors of a state dict, which opens as a checkpoint."""
    folder.mkdir()
    raw = {name: _bytes_of(name, value) for name, value in tensors.items()}
    names = sorted(raw)
    header, _ = encode_header([(name, raw[name][0], tuple(tensors[name].shape)) for name in names])
    with (folder / SINGLE).open("wb") as file:
        file.write(header)
        for name in names:
            file.write(raw[name][1].data)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def _bytes_of(name: str, value: Any) -> tuple[str, RawArray]:
    """The stored type and the bytes of a tensor."""
    if is_torch(value):
        import torch

        kinds = {getattr(torch, kind): dtype for dtype, kind in TORCH.items()}
        if value.dtype in kinds:
            flat = value.detach().cpu().contiguous().reshape(-1)
            return kinds[value.dtype], flat.view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray) and value.dtype in STORED_AS:
        return STORED_AS[value.dtype], np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    kind = getattr(value, "dtype", type(value).__name__)
    raise PoolError(f"{shown(name)}: {kind} is no type of tensor that a checkpoint has.")
