"""Statistics of capture passes on disk: a folder per expert, a safetensors file per block.

    layer-00000.safetensors    Grams and energies of block 0
    outside.safetensors        energies of norms outside the blocks

A Gram is symmetric and kept as its upper triangle in float64, row after row: exact, and no larger
than the whole in float32. Every file says for each tensor which statistic is its own, so tensors
that read the same input share one. Matrices that are stacked in one tensor have one each.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sigmerge.checkpoints.header import Tensor, read_header, read_metadata
from sigmerge.core import Array
from sigmerge.errors import PoolError
from sigmerge.files.documents import parse_json, whole
from sigmerge.messages import matrix_name

_Made = TypeVar("_Made")
OUTSIDE_FILE = "outside"
DERIVED_KEPT = 3
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
    return folder / f"{OUTSIDE_FILE if block is None else f'layer-{block:05d}'}.safetensors"


def block_files(folder: Path) -> list[Path]:
    """The files of blocks 0, 1, … as far as they are there, and of what lies outside.

    Whatever else lies in the folder is not ours.
    """
    files: list[Path] = []
    while (file := block_file(folder, len(files))).is_file():
        files.append(file)
    return [*files, block_file(folder, None)]


def write_block(file: Path, entries: Mapping[str, Entry], arrays: Mapping[str, Array]) -> None:
    """The statistics of one block, published by rename; they must be finite."""
    from safetensors.numpy import save_file  # a capture needs it, a merge does not

    for name, array in arrays.items():
        _check_finite(file, name, array)
    table = {tensor: asdict(entry) for tensor, entry in entries.items()}
    stored = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with whole(file) as partial:  # of several notes safetensors would not keep the order
        save_file(stored, partial, {"statistics": json.dumps(table)})


def norm_of(folder: Path) -> float:
    """The Euclidean norm of all that a folder's files hold, one tensor in memory at a time."""
    total = 0.0
    for file in block_files(folder):
        for stored in read_header(file).values():
            values = _values(stored).astype(np.float64)
            total += float(values @ values)
    return float(np.sqrt(total))


def packed(gram: Array) -> Array:
    """The upper triangle, row after row."""
    return np.concatenate([row[i:] for i, row in enumerate(gram)])


@dataclass(frozen=True)
class _Cell:
    """A value that the first thread to need it makes, once."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    made: list[Any] = field(default_factory=list)


class StatisticsFolders:
    """The statistics of all experts of a pool, each from its own folder; experts go by name."""

    def __init__(self, folders: Mapping[str, Path], norms: Mapping[str, float]) -> None:
        """`norms` are those of Fisher information."""
        self.names = {expert: folder.name for expert, folder in folders.items()}
        self._norms = norms
        self._entries: dict[str, dict[str, Entry]] = {}
        self._tensors: dict[str, dict[str, Tensor]] = {}
        for expert, folder in folders.items():
            self._entries[expert], self._tensors[expert] = {}, {}
            for file in block_files(folder):
                tensors = read_header(file)
                self._tensors[expert] |= tensors
                self._entries[expert] |= _read_entries(file, tensors)
        self._made: OrderedDict[Hashable, _Cell] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Another process reads the same folders, and derives what it needs by itself."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_made", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._made, self._lock = OrderedDict(), threading.Lock()

    def measured(self, tensor: str) -> str:
        """What is known about a tensor of every expert; nothing where no token reached it.

        Of a stack of matrices every one is known, or none.
        """
        own = self._found(tensor)
        found = own or self._found(matrix_name(tensor, 0))
        kinds = {entry.kind for entry in found}
        if len(found) < len(self._entries) or len(kinds) > 1:
            return ""
        return kinds.pop() if not own or any(entry.rows for entry in own) else ""

    def transposed(self, tensor: str) -> bool:
        found = self._found(tensor) or self._found(matrix_name(tensor, 0))
        return any(entry.transposed for entry in found)

    def _found(self, tensor: str) -> list[Entry]:
        return [entries[tensor] for entries in self._entries.values() if tensor in entries]

    def triangle(self, expert: str, tensor: str) -> Array:
        return self._read(expert, tensor)

    def energy(self, expert: str, tensor: str) -> Array:
        return self._read(expert, tensor)

    def rows(self, expert: str, tensor: str) -> int:
        return self._entries[expert][tensor].rows

    def fisher(self, expert: str, tensor: str, start: int, stop: int) -> Array:
        return self._read(expert, tensor, start, stop)

    def fisher_norm(self, expert: str) -> float:
        return self._norms[expert]

    def once(self, tensor: str, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """The latest few are kept; a worker that needs what another is making waits for it."""
        inputs = tuple(entries[tensor].stored for entries in self._entries.values())
        with self._lock:
            cell = self._made.setdefault((inputs, key), _Cell())
            while len(self._made) > DERIVED_KEPT:
                self._made.popitem(last=False)  # who is at it keeps the cell
        with cell.lock:
            if not cell.made:
                cell.made.append(make())
            made: _Made = cell.made[0]
            return made

    def _read(self, expert: str, tensor: str, start: int = 0, stop: int | None = None) -> Array:
        stored = self._tensors[expert][self._entries[expert][tensor].stored]
        return _values(stored, start, stop)


def _read_entries(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Which statistic of a file belongs to which tensor."""
    try:
        table = parse_json(read_metadata(file)["statistics"], str(file), PoolError)
        entries = {name: Entry(**entry) for name, entry in table.items()}
        if all(entry.stored in tensors for entry in entries.values()):
            return entries
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise PoolError(f"{file}: lists no statistics. Remove its folder, and run the command again.")


def _values(stored: Tensor, start: int = 0, stop: int | None = None) -> Array:
    dtype = np.dtype(np.float64 if stored.dtype == "F64" else np.float32)
    count = (stored.size if stop is None else stop) - start
    return np.fromfile(stored.file, dtype, count, offset=stored.begin + start * dtype.itemsize)


def _check_finite(file: Path, tensor: str, values: Array) -> None:
    if not np.isfinite(values).all():
        raise PoolError(
            f"{file}: what was captured for {tensor} is not finite. Its expert's activations or "
            "gradients overflow on its exemplars; look at both, or capture again."
        )
