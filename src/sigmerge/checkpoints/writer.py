"""An output folder: written under a hidden name, resumable block by block, published by rename.

Every tensor's place is known before the first is computed, so tiles are written where they belong,
in any order and from any thread, and the bytes do not depend on either.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import INDEX, SINGLE, Checkpoint
from sigmerge.checkpoints.header import ITEM_SIZE, encode_header
from sigmerge.errors import OutputError

Spec = tuple[str, str, tuple[int, ...]]
"""A tensor to be written: name, safetensors dtype, shape."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """ "5GB", "200MiB", "1000000" in bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise OutputError(f"{text!r} is not a size; write 5GB, 200MiB or a number of bytes.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes: shard number and absolute position of its first byte."""

    shard: int
    begin: int
    dtype: str
    size: int

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class Layout:
    """The shards of an output: names, headers, sizes, and a slot for every tensor."""

    files: tuple[str, ...]
    headers: tuple[bytes, ...]
    sizes: tuple[int, ...]
    slots: dict[str, Slot]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def index(self) -> dict[str, Any] | None:
        """The content of the index file; a single shard has none."""
        if self.files == (SINGLE,):
            return None
        stored = sum(slot.nbytes for slot in self.slots.values())
        weight_map = {name: self.files[slot.shard] for name, slot in sorted(self.slots.items())}
        return {"metadata": {"total_size": stored}, "weight_map": weight_map}


def plan_layout(tensors: Sequence[Spec], max_shard: int) -> Layout:
    """Fill shards in the order given; a tensor larger than a shard gets one of its own."""
    shards: list[list[Spec]] = [[]]
    filled = 0
    for name, dtype, shape in tensors:
        nbytes = int(np.prod(shape, dtype=np.int64)) * ITEM_SIZE[dtype]
        if shards[-1] and filled + nbytes > max_shard:
            shards.append([])
            filled = 0
        shards[-1].append((name, dtype, shape))
        filled += nbytes
    headers, sizes, slots = [], [], {}
    for number, shard in enumerate(shards):
        header, begins = encode_header(shard)
        end = len(header)
        for (name, dtype, shape), begin in zip(shard, begins, strict=True):
            size = int(np.prod(shape, dtype=np.int64))
            slots[name] = Slot(number, begin, dtype, size)
            end = begin + size * ITEM_SIZE[dtype]
        headers.append(header)
        sizes.append(end)
    count = len(shards)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    names = (SINGLE,) if count == 1 else tuple(files)
    return Layout(names, tuple(headers), tuple(sizes), slots)


def mirror_layout(checkpoint: Checkpoint) -> Layout:
    """The files of a checkpoint as they are: same names, same headers, same places."""
    headers = []
    for file in checkpoint.files:
        begins = [t.begin for t in checkpoint.tensors.values() if t.file == file]
        with file.open("rb") as stream:
            headers.append(stream.read(min(begins, default=file.stat().st_size)))
    slots = {
        name: Slot(checkpoint.files.index(t.file), t.begin, t.dtype, t.size)
        for name, t in checkpoint.tensors.items()
    }
    sizes = tuple(file.stat().st_size for file in checkpoint.files)
    names = tuple(_within(file, checkpoint.path) for file in checkpoint.files)
    return Layout(names, tuple(headers), sizes, slots)


def _within(file: Path, folder: Path) -> str:
    """A shard's name as an index writes it; shards may lie in folders of their own."""
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name


def check_target(final: Path, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse early what could not be published later, or would replace an input."""
    target = Path(os.path.realpath(final.expanduser()))
    if not final.name or target in (Path.cwd(), Path.home(), Path("/")):
        raise OutputError(f"{final}: choose a new folder for the result.")
    for folder in inputs:
        if Path(os.path.realpath(folder)).is_relative_to(target):
            raise OutputError(f"{final}: holds an input, {folder}; choose a new folder.")
    if final.exists() and not final.is_dir():
        raise OutputError(f"{final}: is a file; choose a new folder for the result.")
    if final.exists() and any(final.iterdir()):
        if not overwrite:
            raise OutputError(f"{final}: exists already; pass --overwrite to replace it.")
        if not (final / "config.json").exists():
            raise OutputError(
                f"{final}: is not a checkpoint folder, and --overwrite only replaces those."
            )


class Output:
    """The folder while it is written. Use as a context manager; `publish` makes it real."""

    def __init__(self, final: Path, layout: Layout, fingerprint: str, *, overwrite: bool) -> None:
        self.final = Path(os.path.realpath(final.expanduser()))
        self.layout = layout
        self.overwrite = overwrite
        check_target(self.final, overwrite)
        self.partial = self.final.with_name(f".{self.final.name}.partial")
        self._stack = contextlib.ExitStack()
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{final}: cannot be written ({error.strerror}).") from None
        try:
            self._claim()
            self.done = self._resume(fingerprint)
            self._check_space()
            self._files = [self._open_shard(number) for number in range(len(layout.headers))]
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, tensor: str, start: int, raw: np.ndarray[Any, Any]) -> None:
        """Store elements of a tensor from `start` on."""
        slot = self.layout.slots[tensor]
        position = slot.begin + start * ITEM_SIZE[slot.dtype]
        self._write_at(slot, position, raw.view(np.uint8).data)

    def write_bytes(self, tensor: str, data: memoryview) -> None:
        slot = self.layout.slots[tensor]
        self._write_at(slot, slot.begin, data)

    def _write_at(self, slot: Slot, position: int, data: memoryview) -> None:
        try:
            while data:
                count = os.pwrite(self._files[slot.shard], data, position)
                data, position = data[count:], position + count
        except OSError as error:
            raise OutputError(
                f"{self.partial}: cannot be written ({error}). The finished blocks "
                "are kept; run the same command again to continue."
            ) from None

    def finish(self, block: str, record: Any = None) -> None:
        """This block is complete: a later run of the same command will not do it again.

        `record` is what the run wants to know about the block then.
        """
        line = {"done": block, "record": record}
        os.write(self._journal, (json.dumps(line) + "\n").encode())
        self.done[block] = record

    def publish(self) -> None:
        """Rename the finished folder into place; an old one is moved away as a whole first."""
        index = self.layout.index()
        if index is not None:
            self.text(INDEX, json.dumps(index, indent=2) + "\n")
        old = self.final.with_name(f".{self.final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.final.exists():
            self.final.rename(old)
        self.partial.rename(self.final)
        (self.final / _JOURNAL).unlink()
        shutil.rmtree(old, ignore_errors=True)
        self._stack.close()

    def text(self, name: str, content: str) -> None:
        file = self.partial / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")

    def copy(self, file: Path, name: str) -> None:
        target = self.partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)

    def _claim(self) -> None:
        """Only one run at a time may write this folder."""
        lock = self.partial.with_name(f"{self.partial.name}.lock")
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
        self._stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run before may have removed the file between our opening and locking it.
            held = os.path.samestat(os.fstat(handle), lock.stat())
        except OSError:
            held = False
        if not held:
            raise OutputError(f"{self.final}: another run is writing it.")
        self._stack.callback(lock.unlink, missing_ok=True)

    def _resume(self, fingerprint: str) -> dict[str, Any]:
        """Finished blocks, with their records, of an interrupted run of the same job.

        Anything else is cleared away.

        What a killed process wrote is safe in the system's page cache, but not across a restart of
        the machine: then the journal is not believed.
        """
        first = {"job": fingerprint, "boot": _boot()}
        file = self.partial / _JOURNAL
        lines = _journal_lines(file)
        done: dict[str, Any] = {}
        if lines and lines[0] == first and first["boot"]:
            done = {line["done"]: line["record"] for line in lines[1:]}
        else:
            shutil.rmtree(self.partial)
            file.parent.mkdir(parents=True)
        self._journal = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self._stack.callback(os.close, self._journal)
        content = [first, *({"done": block, "record": record} for block, record in done.items())]
        os.write(self._journal, "".join(json.dumps(line) + "\n" for line in content).encode())
        return done

    def _check_space(self) -> None:
        needed = 0
        for name, size in zip(self.layout.files, self.layout.sizes, strict=True):
            file = self.partial / name
            needed += size - (file.stat().st_blocks * 512 if file.exists() else 0)
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise OutputError(
                f"{self.final}: needs {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free."
            )

    def _open_shard(self, number: int) -> int:
        file = self.partial / self.layout.files[number]
        file.parent.mkdir(exist_ok=True)
        handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
        self._stack.callback(os.close, handle)
        os.ftruncate(handle, self.layout.sizes[number])
        os.pwrite(handle, self.layout.headers[number], 0)
        return handle


_JOURNAL = "sigmerge/journal.jsonl"


def _boot() -> str:
    """Names this start of the machine; empty where it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _journal_lines(file: Path) -> list[dict[str, Any]]:
    lines = []
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines
