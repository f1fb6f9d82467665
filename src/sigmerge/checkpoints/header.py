"""The safetensors container: types, shapes and positions, read from the header alone.

A file is eight bytes of header length, a JSON header, and one contiguous run of tensor bytes. We
read it ourselves because tensors are then read, tiled and written in place without a copy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any

from sigmerge.errors import PoolError
from sigmerge.files.objects import remote_file
from sigmerge.files.safe_open import open_regular
from sigmerge.messages import shown

ITEM_SIZE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
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
MAX_HEADER = 25_000_000
"""Bytes. The format allows four times as much; a quarter of a million tensors fit into this."""
MAX_NAME = 1000
MAX_RANK = 32
MAX_SIDE = 1 << 48


Version = tuple[int, ...]
"""What changes whenever a local file is replaced or written, and not when it is linked."""


def version_of(status: os.stat_result) -> Version:
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


@dataclass(frozen=True)
class Tensor:
    """One stored tensor: `begin` and `end` are absolute byte positions in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int
    version: Version = field(default=(), kw_only=True, compare=False, repr=False)
    """Version of the file when its header was read; empty for remote files."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "version": ()}  # another machine may see other times and inodes

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
    """The tensors of one safetensors file; an inconsistent header is a PoolError."""
    raw, total, version = _raw_header(file)
    try:
        entries = json.loads(raw, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"the header is not valid JSON ({error})") from None
    if not isinstance(entries, dict):
        raise _broken(file, "the header is not a JSON object")
    entries.pop("__metadata__", None)
    start = 8 + len(raw)
    tensors = {name: _tensor(file, name, entry, start, version) for name, entry in entries.items()}
    _check_layout(file, tensors, start, total)
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """The metadata in the header of a valid file."""
    return dict(json.loads(_raw_header(file)[0]).get("__metadata__", {}))


def _raw_header(file: Path) -> tuple[bytes, int, Version]:
    """The header's JSON, the size of the whole file, and which version of it that was."""
    with open_regular(file, "a safetensors file", PoolError) as stream:
        remote = remote_file(file)
        status = os.fstat(stream.fileno())
        total = remote.size if remote else status.st_size
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if prefix == b"version ":
            raise PoolError(f"{file}: is a Git LFS pointer, not weights; run `git lfs pull`.")
        if prefix.lstrip()[:1] == b"<":
            raise PoolError(f"{file}: is a web page, not weights; download the file itself.")
        if length > total - 8 and prefix.isascii() and prefix.decode().isprintable() and prefix:
            raise PoolError(f"{file}: is a text, not weights; look into it, and download it again.")
        if len(prefix) < 8 or length > total - 8:
            raise _broken(file, f"the header is {length} bytes long, the file has {total}")
        if length > MAX_HEADER:
            raise _broken(file, f"the header has {length} bytes, more than {MAX_HEADER}")
        raw = stream.read(length)
    if len(raw) < length:
        raise _broken(file, "it became shorter while it was read")
    return raw, total, () if remote else version_of(status)


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


def _tensor(file: Path, name: str, entry: Any, start: int, version: Version) -> Tensor:
    if len(name) > MAX_NAME:
        raise _broken(file, f"the name {shown(name)} has more than {MAX_NAME} characters")
    try:
        dtype, sides = str(entry["dtype"]), entry["shape"]
        if len(sides) > MAX_RANK:
            raise _broken(file, f"tensor {name!r} has more than {MAX_RANK} dimensions")
        shape = tuple(index(side) for side in sides)
        begin, end = (index(offset) for offset in entry["data_offsets"])
    except (TypeError, KeyError, ValueError, AttributeError):
        raise _broken(file, f"tensor {name!r} has a malformed header entry") from None
    if dtype not in ITEM_SIZE:
        raise _broken(file, f"tensor {name!r} has the unknown dtype {shown(dtype)}")
    if min(shape, default=0) < 0 or begin < 0 or end < begin:
        raise _broken(file, f"tensor {name!r} has a negative shape or offset")
    if max(*shape, begin, end) > MAX_SIDE:  # before they are multiplied
        raise _broken(file, f"tensor {name!r} has a shape or offset above {MAX_SIDE}")
    if end - begin != math.prod(shape) * ITEM_SIZE[dtype]:
        raise _broken(
            file, f"tensor {name!r}: {dtype} {list(shape)} does not fill its {end - begin} bytes"
        )
    return Tensor(name, dtype, shape, file, start + begin, start + end, version=version)


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
