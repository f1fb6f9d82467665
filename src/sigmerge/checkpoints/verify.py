"""Verifies published folders against their records, and checks that checkpoints form a pool.

All bytes are hashed again: cached digests are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from sigmerge.checkpoints.adapter_folders import ADAPTER_WEIGHTS, is_adapter
from sigmerge.checkpoints.companions import TORCH_NAMES, vocabulary
from sigmerge.checkpoints.folder import (
    INDEX,
    RECORDS_FOLDER,
    Checkpoint,
    read_json,
)
from sigmerge.checkpoints.links import check_file
from sigmerge.checkpoints.plain import open_tensors
from sigmerge.checkpoints.pool import open_pool
from sigmerge.checkpoints.remote import place_of
from sigmerge.checkpoints.source import PoolSource
from sigmerge.errors import PoolError
from sigmerge.files.digests import file_digests, rehashing
from sigmerge.files.objects import url_of
from sigmerge.files.safe_open import is_regular
from sigmerge.progress import Progress

_PAGES = (".md", ".html", ".svg", ".png", ".jpg", ".jpeg", ".gif", ".pdf")
_PAGE_NAMES = (
    "LICENSE", "LICENSE.txt", "NOTICE", "NOTICE.txt", ".gitattributes", ".gitignore",
    "mergekit_config.yml",
)  # fmt: skip
"""What may be added to a published folder: no library loads it. Weights, vocabularies, code and
whatever else may be picked up, under any ending, may not."""
_RECORD_ENDINGS = (*_PAGES, ".json", ".yaml")
"""What may be added to its records, such as a report."""


@dataclass(frozen=True)
class Finding:
    """A problem: the check that found it, the file or tensor, and the description."""

    check: str
    about: str
    problem: str

    def __str__(self) -> str:
        return f"{self.check}: {self.about}: {self.problem}"


@dataclass(frozen=True)
class Report:
    """The checks that were made, those that could not be made and why, and what they found.

    `extent` says of checks that look at a part how much they looked at.
    """

    folder: Path
    checked: tuple[str, ...]
    skipped: Mapping[str, str]
    findings: tuple[Finding, ...]
    extent: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Notes for the user that are no problems."""

    @property
    def ok(self) -> bool:
        return not self.findings


def open_result(folder: Path) -> Checkpoint:
    """What a command wrote: a model, or an adapter as tensors of their own."""
    return open_tensors(folder / ADAPTER_WEIGHTS if is_adapter(folder) else folder)


def verify_result(
    folder: Path,
    files: Mapping[str, str],
    inputs: Mapping[Path, str] | None,
    *,
    architecture: Iterable[tuple[str, str]] | str = "transformers is not installed",
    threads: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Check a published folder against its record.

    `files` are the digests of its files by name, `inputs` those of the files it was made from, and
    `architecture` what transformers misses or does not know, tensor by tensor; a text there says
    why that is not known.
    """
    checks = _Checks(folder)
    try:
        checkpoint = open_result(folder)
    except PoolError as error:
        checks.add("headers", [Finding("headers", folder.name, str(error))])
        checkpoint = None
    else:
        checks.add("headers", ())
    checks.add("digests", _digests(folder, files, threads, progress))
    if checkpoint is not None:
        checks.add("index", _index(checkpoint))
        checks.add("numbers", _nonfinite({"result": checkpoint}, threads, progress))
        checks.add("config", _config(checkpoint))
        if isinstance(architecture, str):
            checks.skip("architecture", architecture)
        else:
            checks.add("architecture", [Finding("architecture", *each) for each in architecture])
    if inputs is None:
        checks.skip("inputs", "the record lists none")
    else:
        checks.add("inputs", _inputs(inputs, threads, progress))
    return checks.report()


def verify_pool(
    reference: Path | None,
    experts: Mapping[str, Path],
    *,
    allow_pickle: bool = False,
    strict: bool = False,
    threads: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Check experts against the reference: same tensors, same vocabulary, finite numbers.

    Configurations that compute something else are a warning, and with `strict` a problem.
    """
    checks = _Checks(reference or next(iter(experts.values())))
    try:
        pool = open_pool(reference, experts, allow_pickle=allow_pickle)
    except PoolError as error:
        problems = error.problems or (str(error),)
        checks.add("pool", [Finding("pool", "members", problem) for problem in problems])
        return checks.report()
    checks.add("pool", ())
    members = pool.members
    checks.add("vocabulary", _vocabularies({name: m.path for name, m in members.items()}))
    for name, member in members.items():
        checks.add("config", [Finding("config", name, f.problem) for f in _config(member)])
    found = [Finding("computation", "members", told) for told in pool.disagreements]
    checks.add("computation", found if strict else ())
    checks.add("numbers", _nonfinite(members, threads, progress))
    return replace(checks.report(), warnings=() if strict else pool.disagreements)


class _Checks:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checked: list[str] = []
        self.skipped: dict[str, str] = {}
        self.findings: list[Finding] = []

    def add(self, check: str, findings: Iterable[Finding]) -> None:
        if check not in self.checked:
            self.checked.append(check)
        self.findings += findings

    def skip(self, check: str, why: str) -> None:
        self.skipped[check] = why

    def report(self) -> Report:
        return Report(self.folder, tuple(self.checked), self.skipped, tuple(self.findings))


def _digests(
    folder: Path, files: Mapping[str, str], threads: int, progress: Progress
) -> Iterator[Finding]:
    """Every listed file is there and has its digest; nothing that could be loaded is unlisted."""
    there = {name: folder / name for name in files if is_regular(folder / name)}
    digests = _fresh(there.values(), threads, progress, "checking digests")
    for name, wanted in files.items():
        if name not in there:
            yield Finding("digests", name, "is missing")
        elif digests[there[name]] != wanted:
            yield Finding("digests", name, "is not what was written")
        else:
            yield from _elsewhere(folder, name)
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name not in files and not _may_be_added(file, folder):
            yield Finding("digests", name, "is not in the record; it was added later")


def _elsewhere(folder: Path, name: str) -> Iterator[Finding]:
    """A link to an equal file outside: what it leads to may change, or be gone elsewhere."""
    try:
        check_file(folder, folder / name)
    except PoolError as error:
        yield Finding("digests", name, str(error))


def _may_be_added(file: Path, folder: Path) -> bool:
    if file.is_dir() and not file.is_symlink():
        return True  # what is in it is looked at
    if not is_regular(file) or file.is_symlink():
        return False
    recorded = file.relative_to(folder).parts[0] == RECORDS_FOLDER
    endings = _RECORD_ENDINGS if recorded else _PAGES
    return file.suffix in endings or file.name in _PAGE_NAMES


def _fresh(
    files: Iterable[Path], threads: int, progress: Progress, what: str
) -> Mapping[Path, str]:
    listed = list(files)
    total, done = sum(file.stat().st_size for file in listed), 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        progress(what, done, total)

    with rehashing():
        return file_digests(listed, threads, count)


def _index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The index's total, where there is an index; its names were checked against the shards."""
    for part, index in (checkpoint.parts or {"": INDEX}).items():
        metadata = read_json(checkpoint.path / index).get("metadata")
        promised = metadata.get("total_size") if isinstance(metadata, dict) else None
        held = sum(t.nbytes for name, t in checkpoint.tensors.items() if name.startswith(part))
        if promised is not None and promised != held:
            yield Finding("index", index, f"says {promised} bytes, the shards hold {held}")


def _nonfinite(
    members: Mapping[str, Checkpoint], threads: int, progress: Progress
) -> Iterator[Finding]:
    for name, member in members.items():
        source = PoolSource({name: member})
        tensors = [tensor for tensor in member.tensors.values() if tensor.floating]
        total, done = sum(tensor.nbytes for tensor in tensors), 0

        with ThreadPoolExecutor(threads) as workers:
            check = partial(_nonfinite_in, source, name)
            found = workers.map(check, [tensor.name for tensor in tensors])
            for tensor, problem in zip(tensors, found, strict=True):
                done += tensor.nbytes
                progress("checking numbers", done, total)
                if problem:
                    yield Finding("numbers", tensor.name, problem)


def _nonfinite_in(source: PoolSource, member: str, tensor: str) -> str | None:
    try:
        source.check(member, tensor)
    except PoolError as error:
        return str(error).partition(" Repair the checkpoint")[0]
    return None


def _config(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What the configuration says about tensors that are in the shards."""
    config = checkpoint.config
    stored = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.floating}
    said = config.get("dtype") or config.get("torch_dtype")
    if said and len(stored) == 1 and said not in (TORCH_NAMES[dtype] for dtype in stored):
        yield Finding("config", "dtype", f"{said}, the weights are {TORCH_NAMES[stored.pop()]}")
    depth, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    depth = config.get("num_hidden_groups", depth)  # ALBERT's layers share their weights
    known = (depth, depth + more) if isinstance(depth, int) and isinstance(more, int) else (depth,)
    if depth is not None and checkpoint.stack.depth and checkpoint.stack.depth not in known:
        yield Finding("config", "num_hidden_layers",
                      f"{depth}, the weights have {checkpoint.stack.depth}")  # fmt: skip
    embedding, head = checkpoint.embedding, checkpoint.head
    if embedding is None:
        return
    rows = checkpoint.tensors[embedding].shape[0]
    if isinstance(size := config.get("vocab_size"), int) and size > rows:
        yield Finding("config", "vocab_size", f"{size}, {embedding} has {rows} rows")
    if config.get("tie_word_embeddings") is False and head is None and not checkpoint.headless:
        yield Finding("config", "tie_word_embeddings", "false, but no output head is stored")
    if config.get("tie_word_embeddings") and not checkpoint.tied:
        yield Finding("config", "tie_word_embeddings", f"true, but {head} differs from {embedding}")


def _inputs(inputs: Mapping[Path, str], threads: int, progress: Progress) -> Iterator[Finding]:
    standing = cache(place_of)
    places = {file: _place(file, standing) for file in inputs}
    there = [place for place in places.values() if is_regular(place)]
    digests = _fresh(there, threads, progress, "checking inputs")
    for file, wanted in inputs.items():
        found = digests.get(places[file])
        if found is None:
            yield Finding("inputs", url_of(file) or str(file), "is not there any more")
        elif found != wanted:
            yield Finding("inputs", url_of(file) or str(file), "has changed since the run")


def _place(file: Path, standing: Callable[[str], Path]) -> Path:
    """Where an input is read: itself, or in what stands in for the remote folder that it lay in."""
    url = url_of(file)
    if url is None:
        return file
    folder, _, name = url.rpartition("/")
    with suppress(PoolError):
        return standing(folder) / name
    return file


def _vocabularies(folders: Mapping[str, Path]) -> Iterator[Finding]:
    first: tuple[str, dict[str, int] | bytes] | None = None
    for name, folder in folders.items():
        try:
            own = vocabulary(folder)
        except PoolError as error:
            yield Finding("vocabulary", name, str(error))
            continue
        if own is not None and first is None:
            first = name, own
        elif own is not None and first is not None and own != first[1]:
            yield Finding("vocabulary", name, f"differs from that of {first[0]}")
