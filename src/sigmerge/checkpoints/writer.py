"""An output folder: written under a hidden name, resumable block by block, published by rename.

Before publishing the shards are read back: every tensor exists and is what was written.

Every tensor's place is known before the first is computed, so tiles are written where they belong,
in any order and from any thread, and the bytes do not depend on either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sigmerge._native import checksum
from sigmerge.checkpoints.folder import INDEX, RECORDS_FOLDER, SINGLE, Checkpoint
from sigmerge.checkpoints.header import ITEM_SIZE, encode_header
from sigmerge.checkpoints.publishing import (
    SYNCED_TOGETHER,
    check_space,
    check_target,
    only_target,
    partial_of,
    put_in_place,
    real_target,
    sync_tree,
)
from sigmerge.checkpoints.remote import target_url, upload
from sigmerge.checkpoints.write_log import Slot, Written
from sigmerge.core.dtypes import FilePlace
from sigmerge.errors import ChangedInput, OutputError, PoolError, RecipeError, SigmergeError
from sigmerge.files.digests import digest_now
from sigmerge.files.journal import Journal, continues
from sigmerge.files.objects import stored_size
from sigmerge.files.safe_open import is_regular, open_regular, remove, sync_folder
from sigmerge.files.system import BYTES, NO_LINK, read_at, stored_bytes, write_at
from sigmerge.messages import reason
from sigmerge.progress import Progress

Spec = tuple[str, str, tuple[int, ...]]
"""A tensor to be written: name, safetensors dtype, shape."""

SIDE_BY_SIDE = 8
"""Shards that are written at a time, at least: the system lets one thread write into a file, and
the others wait."""

SMALL_SHARD, LARGE_SHARD = 500 * 10**6, 5 * 10**9
"""Bytes of the largest shard, where nobody says it: the least and the most."""

_Block = TypeVar("_Block")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """ "5GB", "200MiB", "1000000" in bytes."""
    found = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise RecipeError(f"{text!r} is not a size; write 5GB, 200MiB or a number of bytes.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True)
class Layout:
    """The shards of an output: names, headers, sizes, and a slot for every tensor."""

    files: tuple[str, ...]
    headers: tuple[bytes, ...]
    sizes: tuple[int, ...]
    slots: dict[str, Slot]
    parts: Mapping[str, str] = field(default_factory=lambda: {"": INDEX})
    """What the names of a part's tensors begin with, as its shards' do, and the index of these."""

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The type and the shape of every tensor."""
        tables = [
            {self.part_of(file) + name: entry for name, entry in json.loads(header[8:]).items()}
            for file, header in zip(self.files, self.headers, strict=True)
        ]
        return {
            name: (entry["dtype"], tuple(entry["shape"]))
            for table in tables
            for name, entry in table.items()
            if name in self.slots  # the other entry is metadata
        }

    def part_of(self, file: str) -> str:
        """What the names of a shard's tensors begin with, and are stored without."""
        own = f"{file.partition('/')[0]}/"
        return own if own in self.parts else ""

    def place(self, tensors: Iterable[str]) -> tuple[int, int]:
        """Where the first of these tensors goes; of none, the beginning."""
        places = ((self.slots[name].shard, self.slots[name].begin) for name in tensors)
        return min(places, default=(0, 0))

    def in_turn(
        self,
        blocks: Iterable[_Block],
        tensors: Callable[[_Block], Iterable[str]],
        *,
        in_order: bool = False,
    ) -> list[_Block]:
        """Blocks in the order in which they are best made: by turns of several shards.

        Threads then write into different files. A block belongs to the shard that it begins in, and
        those of a shard stay in order, so that the disk gets what is complete of it meanwhile. No
        shard is left over to be made alone: groups have SIDE_BY_SIDE or a few more. With
        `in_order`, a shard is made before the next.
        """
        count = len(self.files)
        groups = count if in_order else max(1, count // SIDE_BY_SIDE)
        placed = [(self.place(tensors(block)), block) for block in blocks]
        made, turns = Counter[int](), []
        for (shard, _), block in sorted(placed, key=lambda pair: pair[0]):
            turns.append(((shard * groups // count, made[shard], shard), block))
            made[shard] += 1
        return [block for _, block in sorted(turns, key=lambda pair: pair[0])]

    def indexes(self) -> dict[str, dict[str, Any]]:
        """The content of the index files by their names; a single shard has none."""
        found = {}
        for part, index in self.parts.items():
            files = [file for file in self.files if self.part_of(file) == part]
            own = {n: s for n, s in sorted(self.slots.items()) if self.files[s.shard] in files}
            if files == [index.removesuffix(".index.json")] or not files:
                continue
            found[index] = {
                "metadata": {"total_size": sum(slot.nbytes for slot in own.values())},
                "weight_map": {
                    name.removeprefix(part): self.files[slot.shard].removeprefix(part)
                    for name, slot in own.items()
                },
            }
        return found


def plan_layout(tensors: Sequence[Spec], max_shard: int | None = None) -> Layout:
    """Fill shards in the order given; a tensor larger than a shard gets one of its own.

    Where no size is given, the tensors' bytes decide: a large output has SIDE_BY_SIDE shards, or
    one or two more, since tensors are not split.
    """
    sizes_of = [int(np.prod(shape, dtype=np.int64)) * ITEM_SIZE[kind] for _, kind, shape in tensors]
    if max_shard is None:
        share = -(-sum(sizes_of) // SIDE_BY_SIDE)
        max_shard = min(max(share, SMALL_SHARD), LARGE_SHARD)
    shards: list[list[Spec]] = [[]]
    filled = 0
    for (name, dtype, shape), nbytes in zip(tensors, sizes_of, strict=True):
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


def plan_parts(
    tensors: Sequence[Spec], parts: Mapping[str, str], max_shard: int | None = None
) -> Layout:
    """The files of several parts, which are stored under names without what stands before them."""
    files, headers, sizes, slots = list[str](), list[bytes](), list[int](), dict[str, Slot]()
    for part, index in parts.items():
        own = [(n.removeprefix(part), d, s) for n, d, s in tensors if n.startswith(part)]
        if not own:
            continue
        planned, stem = plan_layout(own, max_shard), index.removesuffix(".safetensors.index.json")
        for name, slot in planned.slots.items():
            slots[part + name] = replace(slot, shard=slot.shard + len(files))
        files += [stem + file.removeprefix("model") for file in planned.files]
        headers += planned.headers
        sizes += planned.sizes
    return Layout(tuple(files), tuple(headers), tuple(sizes), slots, dict(parts))


def mirror_layout(checkpoint: Checkpoint) -> Layout:
    """The files of a checkpoint as they are: same names, same headers, same places."""
    headers = []
    for file in checkpoint.files:
        begins = [t.begin for t in checkpoint.tensors.values() if t.file == file]
        with file.open("rb") as stream:
            headers.append(stream.read(min(begins, default=stored_size(file))))
    slots = {
        name: Slot(checkpoint.files.index(t.file), t.begin, t.dtype, t.size)
        for name, t in checkpoint.tensors.items()
    }
    sizes = tuple(stored_size(file) for file in checkpoint.files)
    names = tuple(_within(file, checkpoint.path) for file in checkpoint.files)
    return Layout(names, tuple(headers), sizes, slots, dict(checkpoint.parts) or {"": INDEX})


def _within(file: Path, folder: Path) -> str:
    """A shard's name as an index writes it; shards may lie in folders of their own."""
    if file == folder or not file.is_relative_to(folder):
        return SINGLE if file == folder else file.name
    return file.relative_to(folder).as_posix()


class Output:
    """An output folder that is being written. A context manager; `publish` renames it.

    A result that is published is complete, holds the bytes that were written, and, if it is
    `durable`, survives a power cut from then on.
    """

    def __init__(
        self,
        final: Path,
        layout: Layout,
        fingerprint: str,
        *,
        overwrite: bool,
        durable: bool = True,
        threads: int = 1,
        progress: Progress = lambda stage, done, total: None,
    ) -> None:
        self.final = real_target(final)
        self.layout, self.overwrite, self.durable = layout, overwrite, durable
        self._threads, self._progress = max(1, threads), progress
        self._url = target_url(self.final)
        self.name = self._url or str(self.final)
        self.partial = partial_of(self.final)
        self._sealed: tuple[dict[str, str], list[os.stat_result]] | None = None
        self._beside: dict[str, str] = {}
        self._continued = False
        self._stack, self._finishing = contextlib.ExitStack(), threading.Lock()
        try:
            self._stack.enter_context(only_target(self.final, overwrite))
            self._open(fingerprint)
        except OSError as error:
            if not self._continued:
                remove(self.partial, if_possible=True)
            self._stack.close()
            place = error.filename or self.partial
            raise OutputError(f"{place}: cannot be written ({reason(error)}).") from None
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """After an error finished blocks stay, and the message names them; else nothing stays.

        If an input changed, finished blocks are removed: they were made of its old content.
        """
        if isinstance(error, SigmergeError) and self.partial.exists():
            if self.done and not isinstance(error, ChangedInput):
                error.args = (
                    f"{error}\nWhat is finished is kept in {self.partial.name} beside it; the same "
                    "command continues from there.",
                )
            else:
                remove(self.partial)
        self._stack.close()

    def write(self, tensor: str, start: int, raw: np.ndarray[Any, Any]) -> None:
        """Store elements of a tensor from `start` on; pieces of a tensor must not overlap."""
        slot = self.layout.slots[tensor]
        self._write_at(tensor, slot, start * ITEM_SIZE[slot.dtype], raw.view(np.uint8).data)

    def target(self, tensor: str) -> FilePlace:
        """Where a tensor begins in its shard, for a loop that writes it by itself."""
        slot = self.layout.slots[tensor]
        return FilePlace(self._files[slot.shard], slot.begin, ITEM_SIZE[slot.dtype])

    def written(self, tensor: str, start: int, nbytes: int, found: int) -> None:
        """Elements of a tensor from `start` on were written to its target."""
        self._sealed = None
        position = start * ITEM_SIZE[self.layout.slots[tensor].dtype]
        self._written.note(tensor, position, nbytes, found)

    def write_bytes(self, tensor: str, data: memoryview) -> None:
        """Store a whole tensor."""
        self._write_at(tensor, self.layout.slots[tensor], 0, data)

    def _write_at(self, tensor: str, slot: Slot, position: int, data: memoryview) -> None:
        self._sealed = None
        found, nbytes, place = checksum(data.cast("B")), data.nbytes, slot.begin + position
        with self._writing():
            while data:
                count = write_at(self._files[slot.shard], data, place)
                data, place = data[count:], place + count
        self._written.note(tensor, position, nbytes, found)

    def finish(self, block: str, record: Any = None, tensors: Iterable[str] | None = None) -> None:
        """Mark a block as complete: a later run of the same command skips it.

        `tensors` are the block's own, where tensors of other blocks are written meanwhile.
        `record` is what the run wants to know about the block then. The journal also has checksums
        of the block's bytes, by which the later run sees whether they are still there.
        """
        with self._finishing:
            pieces = self._written.fresh(tensors)
            self._journal.append({"done": block, "record": record, "pieces": pieces})
            self.done[block] = record

    def seal(self) -> dict[str, str]:
        """Read the shards back; if they do not hold what was written, this stops the run.

        Meanwhile the disk gets them. Returns their digests by name. Shards that were not written
        since are not read again.
        """
        if self._sealed is None:
            with self._writing():
                self._sealed = self._read_back()
        return self._sealed[0]

    @property
    def digests(self) -> dict[str, str]:
        """The digest of every file in the folder, by its name there, after `seal`."""
        shards = self.seal()
        self._write_index()
        named = {file.relative_to(self.partial).as_posix(): file for file in self._companions()}
        with self._writing():
            self._check_beside()
            beside = {name: digest_now(file) for name, file in named.items()}
        return dict(sorted({**shards, **beside}.items()))

    def publish(self) -> None:
        """Put the finished folder in its place, in one step.

        Files, folders and the new name are on the disk before this returns. An older result stays
        until then: the two folders exchange their names. A result with an address is uploaded; an
        older one there goes when that begins.
        """
        self.seal()
        self._write_index()
        check_target(self.final, self.overwrite)
        with self._writing():
            self._check_beside()
            if self.durable:
                sync_tree(self.partial)
            if self._url is not None:
                self._upload(self._url)
                return
            self._journal_stack.close()
            with self._without_journal():
                self._check_untouched()
                put_in_place(
                    self.partial, self.final, overwrite=self.overwrite, durable=self.durable
                )
        self._stack.close()

    @contextlib.contextmanager
    def _without_journal(self) -> Iterator[None]:
        """The journal is no part of the result; it is there again if that is not published."""
        journal = self.partial / _JOURNAL
        content = journal.read_bytes()
        journal.unlink()
        try:
            if self.durable:
                sync_folder(journal.parent)
            yield
        except BaseException:  # an interruption too
            if journal.parent.exists():
                journal.write_bytes(content)
            raise

    def _upload(self, url: str) -> None:
        """The journal stays until all is there: a run that is killed meanwhile goes on."""
        self._check_untouched()
        upload(self.partial, self.digests, url, self._progress)
        self._journal_stack.close()
        remove(self.partial, if_possible=True)
        self._stack.close()

    def text(self, name: str, content: str) -> None:
        self._write_companion(name, [content.encode()])

    def json(self, name: str, content: Any) -> None:
        self.text(name, json.dumps(content, indent=2) + "\n")

    def copy(self, file: Path, name: str) -> None:
        with open_regular(file, "a file to copy", PoolError) as source:
            self._write_companion(name, iter(lambda: source.read(1 << 20), b""))

    def _write_companion(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file beside the shards, and remember the digest of what it must hold."""
        digest = hashlib.sha256()
        with self._writing(), self._companion(name).open("wb") as target:
            for piece in pieces:
                target.write(piece)
                digest.update(piece)
        self._beside[name] = digest.hexdigest()

    def _companion(self, name: str) -> Path:
        """A file beside the weights; never one of the shards, and never through a link."""
        if name in self.layout.files:
            raise OutputError(f"{self.final}: {name} is a shard and cannot be replaced.")
        file = self.partial / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        return file

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"{self.partial}: cannot be written ({reason(error)}). The finished blocks "
                "are kept; run the same command again to continue."
            ) from None

    def _open(self, fingerprint: str) -> None:
        """Open shards and journal; what an interrupted run of another job left is cleared away."""
        header, file = {"job": fingerprint, "journal": 3}, self.partial / _JOURNAL
        self._continued = self._regular() and continues(file, header)
        if not self._continued:
            self._clear()
        for stale in self._companions():  # written anew in any case; nothing else is published
            stale.unlink()
        try:
            self._check_space()
        except OutputError:
            if not file.exists():  # nothing is finished
                remove(self.partial)
            raise
        self._journal_stack = self._stack.enter_context(contextlib.ExitStack())
        try:
            self._journal = Journal(file, header, [_RECORD], durable=False)
        except OutputError:  # a damaged journal says nothing about the shards
            self._clear()
            self._journal = Journal(file, header, [_RECORD], durable=False)
        self._journal_stack.enter_context(self._journal)
        self._files = [self._open_shard(number) for number in range(len(self.layout.headers))]
        self._written = Written(
            self.layout.slots, self._files, self.layout.sizes, durable=self.durable
        )
        self._stack.callback(self._written.close)
        self.done: dict[str, Any] = self._resumed()

    def _regular(self) -> bool:
        """Whether the partial folder holds files and folders only, each in its place.

        A file with a second name elsewhere would be written there too.
        """
        for root, folders, files in os.walk(self.partial):
            for found in ((Path(root) / name).lstat() for name in (*folders, *files)):
                own = stat.S_ISREG(found.st_mode) and found.st_nlink < 2
                if not own and not stat.S_ISDIR(found.st_mode):
                    return False
        expected = [self.partial / name for name in (*self.layout.files, _JOURNAL)]
        return not self.partial.is_symlink() and not any(file.is_dir() for file in expected)

    def _clear(self) -> None:
        remove(self.partial)
        (self.partial / _JOURNAL).parent.mkdir(parents=True)

    def _resumed(self) -> dict[str, Any]:
        """Finished blocks, with their records, whose bytes are still in the shards."""
        found = {}
        for line in self._journal.records:
            with contextlib.suppress(TypeError, ValueError, AttributeError):  # not our line
                if self._written.restore(line["pieces"]):
                    found[str(line["done"])] = line["record"]
        return found

    def _check_space(self) -> None:
        needed = 0
        for name, size in zip(self.layout.files, self.layout.sizes, strict=True):
            file = self.partial / name
            needed += size - (stored_bytes(file.stat()) if file.exists() else 0)
        check_space(self.final, needed)

    def _open_shard(self, number: int) -> int:
        file = self.partial / self.layout.files[number]
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_CREAT | os.O_RDWR | NO_LINK | BYTES, 0o644)
        self._stack.callback(os.close, handle)
        os.ftruncate(handle, self.layout.sizes[number])
        write_at(handle, self.layout.headers[number], 0)
        return handle

    def _write_index(self) -> None:
        for name, index in self.layout.indexes().items():
            self.json(name, index)

    def _read_back(self) -> tuple[dict[str, str], list[os.stat_result]]:
        """The digests of the shards, and what the system knows of each."""
        if missing := self._written.missing():
            self.done.clear()  # the journal called a block finished that was not: nothing is kept
            raise OutputError(f"{self.final}: {len(missing)} tensors were not written, the first "
                              f"is {missing[0]}; nothing is published.")  # fmt: skip
        status = [os.fstat(handle) for handle in self._files]
        # Syncing waits for the disk in threads of its own, and leaves its core to the others.
        with (
            ThreadPoolExecutor(SYNCED_TOGETHER) as syncing,
            ThreadPoolExecutor(self._threads) as pool,
        ):
            synced = [syncing.submit(os.fsync, handle) for handle in self._files if self.durable]
            damaged, found = self._written.read_back(pool, self._progress)
            for done in synced:
                done.result()
        wrong = [n for n, h in zip(self.layout.files, self._files, strict=True)
                 if not self._is_whole(n, h)]  # fmt: skip
        if damaged or wrong:
            raise self._changed(wrong[0] if wrong else damaged[0])
        return dict(zip(self.layout.files, found, strict=True)), status

    def _is_whole(self, name: str, handle: int) -> bool:
        """Whether a shard has its name, its size and its header still."""
        number = self.layout.files.index(name)
        header, file = self.layout.headers[number], self.partial / name
        there = file.is_file() and os.path.samestat(os.fstat(handle), file.stat())
        return (
            there
            and os.fstat(handle).st_size == self.layout.sizes[number]
            and read_at(handle, len(header), 0) == header
        )

    def _companions(self) -> list[Path]:
        """The files beside the shards, which go into the result with them."""
        ours = {*self.layout.files, _JOURNAL, _JOURNAL_LOCK}
        found = sorted(self.partial.rglob("*"))
        files = [file for file in found if file.is_symlink() or not file.is_dir()]
        return [file for file in files if file.relative_to(self.partial).as_posix() not in ours]

    def _check_beside(self) -> None:
        """The files beside the shards are those that this run wrote, as it wrote them."""
        found = {file.relative_to(self.partial).as_posix(): file for file in self._companions()}
        for name in sorted(found.keys() | self._beside.keys()):
            if name not in found or _digest(found[name]) != self._beside.get(name, ""):
                raise self._changed(name)

    def _check_untouched(self) -> None:
        """Raise if a process wrote the shards after they were read back."""
        assert self._sealed is not None
        for name, handle, before in zip(
            self.layout.files, self._files, self._sealed[1], strict=True
        ):
            same = os.fstat(handle).st_ctime_ns == before.st_ctime_ns
            if not same or not self._is_whole(name, handle):
                raise self._changed(name)

    def _changed(self, what: str) -> OutputError:
        return OutputError(
            f"{self.partial}: {what} is not what was written; another program wrote it, or the "
            "disk is failing. Nothing is published. Run the same command again: what is damaged "
            "is made again."
        )


@contextlib.contextmanager
def saved(place: Path) -> Iterator[None]:
    """Convert errors of the safetensors library, such as a full disk, to OutputError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as problem:
        raise OutputError(f"{place}: cannot be written ({problem}).") from None


def _digest(file: Path) -> str | None:
    """The digest of a regular file; a link is none, and what is no file is not opened."""
    if file.is_symlink() or not is_regular(file):
        return None
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_JOURNAL = f"{RECORDS_FOLDER}/journal.jsonl"
_JOURNAL_LOCK = f"{RECORDS_FOLDER}/.journal.jsonl.lock"
_RECORD = {"done", "record", "pieces"}
