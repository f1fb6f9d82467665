"""The safetensors container: what lies where in a file, read from its header alone.

A file is eight bytes of header length, a JSON header, and one contiguous run of tensor bytes. We
read it ourselves because tensors are then mapped, tiled and written in place without a copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from sigmerge.errors import PoolError

ITEM_SIZE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
FLOATING = ("BF16", "F16", "F32")
MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Tensor:
    """One stored tensor: `begin` and `end` are absolute byte positions in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATING


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; every way a header can lie is a PoolError."""
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER, total - 8):
                raise _broken(file, f"the header asks for {length} bytes, the file has {total}")
            raw = stream.read(length)
    except OSError as error:
        raise PoolError(f"{file}: cannot be read ({error.strerror}).") from None
    try:
        entries = json.loads(raw, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"the header is not valid JSON ({error})") from None
    if not isinstance(entries, dict):
        raise _broken(file, "the header is not a JSON object")
    entries.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(file, name, entry, start) for name, entry in entries.items()}
    _check_layout(file, tensors, start, total)
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """The notes in the header of a sound file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return dict(json.loads(stream.read(length)).get("__metadata__", {}))


def encode_header(
    tensors: list[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """Header bytes for tensors laid out in this order, and each one's absolute begin.

    The header is padded to a multiple of 64, so that aligned data follows.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    relative = []
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_SIZE[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        relative.append(offset)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [start + begin for begin in relative]


def _tensor(file: Path, name: str, entry: Any, start: int) -> Tensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(index(side) for side in entry["shape"])
        begin, end = (index(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise _broken(file, f"tensor {name!r} has a malformed header entry") from None
    if dtype not in ITEM_SIZE:
        raise _broken(file, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if min(shape, default=0) < 0 or begin < 0 or end < begin:
        raise _broken(file, f"tensor {name!r} has a negative shape or offset")
    if end - begin != math.prod(shape) * ITEM_SIZE[dtype]:
        raise _broken(
            file, f"tensor {name!r}: {dtype} {list(shape)} does not fill its {end - begin} bytes"
        )
    return Tensor(name, dtype, shape, file, start + begin, start + end)


def _check_layout(file: Path, tensors: dict[str, Tensor], start: int, total: int) -> None:
    position = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin < position:
            raise _broken(file, f"tensor {tensor.name!r} overlaps the one before it")
        if tensor.begin > position:
            raise _broken(file, f"{tensor.begin - position} unclaimed bytes before {tensor.name!r}")
        position = tensor.end
    if position > total:
        raise _broken(file, f"truncated: {total} bytes on disk, {position} announced")
    if position < total:
        raise _broken(file, f"{total - position} bytes follow the last tensor")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _broken(file: Path, why: str) -> PoolError:
    return PoolError(f"{file}: not a sound safetensors file: {why}. Copy or download it again.")
