"""What capture passes measured, on disk: one folder an expert, one safetensors file a block.

    features-<key>/layer-00000.safetensors    Grams and energies of block 0
    features-<key>/outside.safetensors        energies of norms outside the blocks
    features-<key>/capture.json               what this is; written last

A Gram is symmetric and kept as its upper triangle in float64, row after row: exact, and no larger
than the whole in float32. Every file says for each tensor which statistic is its own, so tensors
that read the same input share one.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sigmerge.checkpoints.cache import whole, write_json
from sigmerge.checkpoints.header import Tensor, encode_header, read_header, read_metadata
from sigmerge.errors import PoolError

Array = np.ndarray[Any, Any]
Made = TypeVar("Made")
DONE = "capture.json"
OUTSIDE = "outside"
KEPT = 3
"""Derived matrices that are remembered: those of one block's inputs that tensors share."""


@dataclass(frozen=True)
class Entry:
    """What is known about a tensor: the kind, under which name it is stored, over how many rows.

    A weight that reads features with its first dimension, (in, out), is `transposed`.
    """

    kind: str
    stored: str
    rows: int
    transposed: bool = False


def block_file(folder: Path, block: int | None) -> Path:
    return folder / f"{OUTSIDE if block is None else f'layer-{block:05d}'}.safetensors"


def write_block(file: Path, entries: Mapping[str, Entry], arrays: Mapping[str, Array]) -> None:
    """The statistics of one block, published by rename."""
    names = {np.dtype(np.float64): "F64", np.dtype(np.float32): "F32"}
    specs = [(name, names[array.dtype], array.shape) for name, array in arrays.items()]
    table = {tensor: asdict(entry) for tensor, entry in entries.items()}
    header, _ = encode_header(specs, {"statistics": json.dumps(table)})
    with whole(file) as partial, partial.open("wb") as stream:
        stream.write(header)
        for array in arrays.values():
            stream.write(np.ascontiguousarray(array).data)


def norm_of(folder: Path) -> float:
    """The Euclidean norm of all that a folder's files hold, one tensor in memory at a time."""
    total = 0.0
    for file in sorted(folder.glob("*.safetensors")):
        for stored in read_header(file).values():
            values = _values(stored).astype(np.float64)
            total += float(values @ values)
    return float(np.sqrt(total))


def packed(gram: Array) -> Array:
    """The upper triangle, row after row."""
    return np.concatenate([row[i:] for i, row in enumerate(gram)])


def unpacked(triangle: Array) -> Array:
    """The symmetric matrix of an upper triangle."""
    size = (int(np.sqrt(8 * triangle.size + 1)) - 1) // 2
    gram, position = np.empty((size, size)), 0
    for i in range(size):
        row = triangle[position : position + size - i]
        gram[i, i:] = row
        gram[i:, i] = row
        position += size - i
    return gram


class StatisticsFolders:
    """The statistics of all experts of a pool, each from its own folder; experts go by name."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.names = {expert: folder.name for expert, folder in folders.items()}
        self._entries: dict[str, dict[str, Entry]] = {}
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._norms: dict[str, float] = {}
        for expert, folder in folders.items():
            self._norms[expert] = float(_finished(folder).get("norm", 0.0))
            self._entries[expert], self._tensors[expert] = {}, {}
            for file in sorted(folder.glob("*.safetensors")):
                self._tensors[expert] |= read_header(file)
                table = json.loads(read_metadata(file)["statistics"])
                self._entries[expert] |= {name: Entry(**entry) for name, entry in table.items()}
        self._made: OrderedDict[Hashable, Any] = OrderedDict()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def measured(self, tensor: str) -> str:
        """What is known about a tensor of every expert."""
        kinds = {e[tensor].kind if tensor in e else "" for e in self._entries.values()}
        return kinds.pop() if len(kinds) == 1 else ""

    def transposed(self, tensor: str) -> bool:
        return any(tensor in e and e[tensor].transposed for e in self._entries.values())

    def gram(self, expert: str, tensor: str) -> Array:
        return unpacked(self._read(expert, tensor))

    def energy(self, expert: str, tensor: str) -> Array:
        return self._read(expert, tensor)

    def rows(self, expert: str, tensor: str) -> int:
        return self._entries[expert][tensor].rows

    def fisher(self, expert: str, tensor: str, start: int, stop: int) -> Array:
        return self._read(expert, tensor, start, stop)

    def fisher_norm(self, expert: str) -> float:
        return self._norms[expert]

    def once(self, tensor: str, key: Hashable, make: Callable[[], Made]) -> Made:
        """The latest few are kept; a worker that needs what another is making waits for it."""
        inputs = tuple(entries[tensor].stored for entries in self._entries.values())
        with self._lock:
            lock = self._locks.setdefault((inputs, key), threading.Lock())
        with lock:
            if (inputs, key) not in self._made:
                made = make()
                with self._lock:
                    self._made[inputs, key] = made
                    while len(self._made) > KEPT:
                        del self._locks[self._made.popitem(last=False)[0]]
                return made
            return self._made[inputs, key]

    def _read(self, expert: str, tensor: str, start: int = 0, stop: int | None = None) -> Array:
        return _values(self._tensors[expert][self._entries[expert][tensor].stored], start, stop)


def _values(stored: Tensor, start: int = 0, stop: int | None = None) -> Array:
    dtype = np.dtype(np.float64 if stored.dtype == "F64" else np.float32)
    count = (stored.size if stop is None else stop) - start
    return np.fromfile(stored.file, dtype, count, offset=stored.begin + start * dtype.itemsize)


def finish(folder: Path, content: Mapping[str, Any]) -> None:
    write_json(folder / DONE, content)


def is_finished(folder: Path) -> bool:
    return (folder / DONE).exists()


def _finished(folder: Path) -> dict[str, Any]:
    if not is_finished(folder):
        raise PoolError(f"{folder}: a capture that is not finished; run `sigmerge capture` again.")
    return dict(json.loads((folder / DONE).read_text(encoding="utf-8")))
