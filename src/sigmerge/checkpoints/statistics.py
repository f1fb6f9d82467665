"""What capture passes measured, on disk: one folder an expert, one safetensors file a block.

    features-<key>/layer-00000.safetensors    Grams and energies of block 0
    features-<key>/outside.safetensors        energies of norms outside the blocks
    features-<key>/capture.json               what this is, and every file's digest; written last

A Gram is symmetric and kept as its upper triangle in float64, row after row: exact, and no larger
than the whole in float32. Every file says for each tensor which statistic is its own, so tensors
that read the same input share one. Matrices that are stacked in one tensor have one each.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from sigmerge.checkpoints.header import Tensor, read_header, read_metadata
from sigmerge.errors import PoolError, SigmergeError
from sigmerge.files.checksums import CHECKSUM, is_intact, sealed
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import parse_json, read_json_object, whole, write_json
from sigmerge.files.regular import is_regular, remove
from sigmerge.kernels import Array
from sigmerge.words import matrix_name

_Made = TypeVar("_Made")
DONE = "capture.json"
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
    table: dict[str, Any] = {tensor: asdict(entry) for tensor, entry in entries.items()}
    stored = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    table[CHECKSUM] = _checksum(file, table, stored)
    with whole(file) as partial:  # of several notes safetensors would not keep the order
        save_file(stored, partial, {"statistics": json.dumps(table)})


def _checksum(file: Path, table: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    """By which a capture that is taken up again knows a file as whole."""
    made = hashlib.sha256(json.dumps([file.name, table]).encode())
    for name in sorted(arrays):
        made.update(repr((name, str(arrays[name].dtype), arrays[name].shape)).encode())
        made.update(arrays[name].data)
    return made.hexdigest()


def _is_as_written(file: Path) -> bool:
    try:
        arrays = {n: _values(t).reshape(t.shape) for n, t in read_header(file).items()}
        table = parse_json(read_metadata(file)["statistics"], str(file), PoolError)
        return bool(table.pop(CHECKSUM) == _checksum(file, table, arrays))
    except (PoolError, KeyError, AttributeError, TypeError):
        return False


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
    """Something that the first thread to need it makes, once."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    made: list[Any] = field(default_factory=list)


class StatisticsFolders:
    """The statistics of all experts of a pool, each from its own folder; experts go by name."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.names = {expert: folder.name for expert, folder in folders.items()}
        self._entries: dict[str, dict[str, Entry]] = {}
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._norms: dict[str, float] = {}
        for expert, folder in folders.items():
            if why := damage(folder):
                raise PoolError(f"{folder}: {why}; run `sigmerge capture` again.")
            done = _read_done(folder)
            assert done is not None
            self._norms[expert] = done.norm
            self._entries[expert], self._tensors[expert] = {}, {}
            for file in (folder / name for name in sorted(done.files)):
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
        values = _values(stored, start, stop)
        _check_finite(stored.file, stored.name, values)
        return values


def _read_entries(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Which statistic of a file belongs to which tensor."""
    try:
        table = parse_json(read_metadata(file)["statistics"], str(file), PoolError)
        entries = {name: Entry(**entry) for name, entry in table.items() if name != CHECKSUM}
        if all(entry.stored in tensors for entry in entries.values()):
            return entries
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise PoolError(f"{file}: lists no statistics; run `sigmerge capture` again.")


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


_ABANDONED = 3600
"""Seconds after which an unfinished file that did not change is nobody's."""
_Name = Annotated[str, Field(pattern=rf"^(layer-[0-9]{{5}}|{OUTSIDE_FILE})\.safetensors$")]


class _File(BaseModel):
    size: int
    sha256: str


class _Done(BaseModel):
    """What a capture.json must say. It lists files of its own folder and no others."""

    norm: float = Field(default=0.0, allow_inf_nan=False)
    files: Annotated[dict[_Name, _File], Field(min_length=1)]


def _read_done(folder: Path) -> _Done | None:
    """A folder's list of files; None if it is missing or cannot be read."""
    try:
        content = read_json_object(folder / DONE, "what a capture wrote")
        done = _Done.model_validate(content)
    except (SigmergeError, ValidationError):
        return None
    return done if is_intact(content, DONE) else None


def finish(folder: Path, content: Mapping[str, Any]) -> None:
    """A capture is complete: what it was, and what its files are."""
    files = block_files(folder)
    digests = file_digests(files)
    listed = {f.name: {"size": f.stat().st_size, "sha256": digests[f]} for f in files}
    listing = {**content, "files": listed}
    write_json(folder / DONE, sealed(listing, DONE))


def is_finished(folder: Path) -> bool:
    return damage(folder) is None


def damage(folder: Path) -> str | None:
    """What keeps a folder from being used: it is not finished, or not what was captured."""
    if not (folder / DONE).exists():
        return "a capture that is not finished"
    done = _read_done(folder)
    if done is None:
        return f"{DONE} cannot be read"
    changed = _changed(folder, done)
    return f"{changed[0]} is missing or has changed" if changed else None


def _changed(folder: Path, done: _Done) -> list[str]:
    """Listed files that are not what they were; sizes are compared before digests."""
    there = {n: folder / n for n, f in done.files.items()
             if is_regular(folder / n) and not (folder / n).is_symlink()
             and (folder / n).stat().st_size == f.size}  # fmt: skip
    digests = file_digests(there.values())
    same = {name for name, file in there.items() if digests[file] == done.files[name].sha256}
    return [name for name in done.files if name not in same]


def discard_damaged(folder: Path) -> None:
    """Before a capture goes on here: only files that are known to be whole stay.

    An unfinished capture's files are, if their own checksums say so; those of a finished one, if
    they are what it listed. If its list cannot be read, none is. What a killed process was writing
    goes when nobody has written it for an hour: another may be capturing the same expert.
    """
    for partial in folder.glob(".*.partial"):
        if partial.lstat().st_mtime < time.time() - _ABANDONED:
            remove(partial)
    every = list(folder.glob(block_file(folder, 0).name.replace("00000", "*")))
    if not (folder / DONE).exists():
        for file in every:
            if not _is_as_written(file):
                remove(file)
        return
    done = _read_done(folder)
    wrong = every if done is None else [folder / name for name in _changed(folder, done)]
    for file in (*wrong, folder / DONE):
        remove(file)
