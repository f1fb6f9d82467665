"""Derivations: the only memory between two runs.

A derivation is a maker, the files that it may read, its resolved settings, and the libraries that
decide its result. Its key is a digest of all of these, so a result of any other input, setting,
code or library has another key.

    ROOT/NAME/CORE/FULL.json    one entry: what it is, its value, and its files with their digests
    ROOT/NAME/CORE/FULL/        its files, if it has any
    ROOT/NAME/CORE/FULL.jsonl   an entry that grows part by part

CORE names maker, inputs and settings; FULL also the maker's code and the libraries' versions. An
entry with the same CORE and another FULL is outdated. It is reported, and used only under
`reusing`.

A maker reads through its `Given` argument, which opens declared files only. A damaged, locked or
unwritable cache never stops a run: what cannot be stored is made again, and lives until the process
ends.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from sigmerge.errors import ChangedInput, OutputError, PoolError, SigmergeError
from sigmerge.files.cache import cache_place, is_installed, keep_json, kept_json
from sigmerge.files.checksums import is_intact, sealed
from sigmerge.files.digests import file_digests, prove, when_contradicted
from sigmerge.files.documents import content_key
from sigmerge.files.environment import library_version
from sigmerge.files.identity import changed, identify, unchanged
from sigmerge.files.locks import has_name, locked
from sigmerge.files.objects import address, open_stored, remote_file
from sigmerge.files.safe_open import remove
from sigmerge.files.scratch import scratch
from sigmerge.files.sources import code_digest
from sigmerge.files.system import lock

BESIDE = ".sigmerge"
"""The folder beside a pool's members in which entries about them are kept."""
SIZE_LIMIT = 50 * 10**9
"""Maximum size of all entries of a root in bytes; SIGMERGE_CACHE_SIZE overrides it."""
IN_USE = 3600.0
"""An entry used within this many seconds is not evicted when the cache is full."""
_HEADER = {"name", "of", "inputs", "settings", "code", "runtime", "made", "seconds"}
_THREADS = os.cpu_count() or 1
"""Threads that hash the inputs of a maker."""
_Digests = Callable[[Iterable[Path]], Mapping[Path, str]]
_log = logging.getLogger(__name__)
_reusing: ContextVar[bool] = ContextVar("reusing", default=False)
_unkept: dict[str, KeptEntry] = {}
"""Entries that no root could keep, by key, until the process ends."""
_unkept_parts: dict[str, dict[str, Any]] = {}
_until_the_end = ExitStack()
_said: set[str] = set()
_beside: set[Path] = set()
"""Folders beside pools in which this process looked for entries."""


@contextmanager
def reusing(outdated: bool = True) -> Iterator[None]:
    """In this context outdated entries are used: those of other code or library versions."""
    token = _reusing.set(outdated)
    try:
        yield
    finally:
        _reusing.reset(token)


def reuse_from_now_on() -> None:
    """As `reusing`, for the rest of a command: what `--reuse` asks for."""
    _reusing.set(True)


@dataclass(frozen=True)
class Inputs:
    """The files that a maker may read, by role. A role reads like a path: `expert/config.json`."""

    files: Mapping[str, Path]

    @classmethod
    def of(cls, **groups: Mapping[str, Path] | Path) -> Inputs:
        """Files under a role each, or groups of files under a common prefix."""
        found: dict[str, Path] = {}
        for prefix, given in groups.items():
            if isinstance(given, Path):
                found[prefix] = given
            else:
                found |= {f"{prefix}/{name}": file for name, file in given.items()}
        return cls(found)

    def __or__(self, other: Inputs) -> Inputs:
        return Inputs({**self.files, **other.files})

    def digests(self, read: _Digests = file_digests) -> dict[str, str]:
        """Digest of each file by role; for a remote file the version that its store reports."""
        remote = {r: found.identity for r, f in self.files.items() if (found := remote_file(f))}
        known = read([file for role, file in self.files.items() if role not in remote])
        return {r: remote.get(r) or known[f] for r, f in sorted(self.files.items())}


@dataclass(frozen=True)
class Derivation:
    """What is made: `make` of `inputs` with `settings`, under these libraries.

    `name` is the kind of result and `of` the model it is made of, both for messages. `near` is a
    member of a pool beside which it is kept, where that is possible. `make` gets a `Given`, and
    returns plain content; files go into the given's folder. `volatile` are the beginnings of roles
    whose files the maker itself may write: if one of them changes meanwhile, nothing is stored.
    """

    name: str
    make: Callable[..., Any]
    inputs: Inputs
    settings: Mapping[str, Any] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    of: str = ""
    near: Path | None = None
    volatile: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_resolved(self.settings, self.name)

    @cached_property
    def input_digests(self) -> dict[str, str]:
        return self.inputs.digests()

    @cached_property
    def core(self) -> str:
        """Digest of maker, inputs and settings."""
        plain = json.loads(json.dumps(self.settings, sort_keys=True))
        return content_key([self.name, self.input_digests, plain])

    @cached_property
    def code(self) -> str:
        return code_digest(self.make)

    @cached_property
    def runtime(self) -> dict[str, str]:
        return {name: _version(name) for name in sorted(self.libraries)}

    @cached_property
    def full(self) -> str:
        """Digest of `core`, code and libraries: the key."""
        return content_key([self.core, self.code, self.runtime])

    def changed_roles(self, read: _Digests) -> list[str]:
        """Roles of inputs whose content differs from the one in the key."""
        try:
            now: Mapping[str, str | None] = self.inputs.digests(read)
        except ChangedInput:
            raise
        except PoolError:  # one is gone
            now = {role: self._now(role, read) for role in self.inputs.files}
        return [role for role, then in self.input_digests.items() if now[role] != then]

    def _now(self, role: str, read: _Digests) -> str | None:
        """Digest of an input; None if the file is gone."""
        try:
            return Inputs({role: self.inputs.files[role]}).digests(read)[role]
        except ChangedInput:
            raise
        except PoolError:
            return None

    def prove(self) -> bool:
        """Whether files that were read are those of the key, before anything made of them is kept.

        Another one than a volatile one stops it.
        """
        return _is_same(self, _proven)

    def header(self, seconds: float) -> dict[str, Any]:
        return {
            "name": self.name,
            "of": self.of,
            "inputs": self.input_digests,
            "settings": dict(self.settings),
            "code": self.code,
            "runtime": self.runtime,
            "made": time.time(),
            "seconds": seconds,
        }


def _check_resolved(value: Any, name: str) -> None:
    """Raise if settings are not plain JSON content, or hold an unresolved value such as "auto"."""
    if isinstance(value, Mapping):
        for each in value.values():
            _check_resolved(each, name)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_resolved(each, name)
    elif value == "auto" or not isinstance(value, str | int | float | bool | None):
        raise AssertionError(f"{name}: {value!r} is no resolved setting")


def _version(library: str) -> str:
    return library_version(library) or "none"


@dataclass(frozen=True)
class KeptEntry:
    """What was made: plain content, the folder of its files, and the seconds that making took.

    `kept`: it was found in the cache rather than made now.
    """

    value: Any
    folder: Path
    seconds: float
    kept: bool


@dataclass(frozen=True)
class NotToKeep:
    """Wraps a value that a maker returns for this call only: it is not stored."""

    value: Any


class Undeclared(AssertionError):
    """Raised when a maker opens a file that its derivation does not declare: a bug of ours."""


class Given:
    """The argument of a maker: it opens the declared files, and has a folder for its output."""

    def __init__(self, inputs: Inputs, place: Path, stack: ExitStack) -> None:
        self._inputs, self._place, self._stack = inputs, place, stack
        self._declared = {_absolute(file) for file in inputs.files.values()}
        self._finished = _finished_parts(place)

    def path(self, role: str) -> Path:
        """A declared file."""
        try:
            return self._inputs.files[role]
        except KeyError:
            raise Undeclared(f"{role} is no declared input") from None

    def open(self, role: str) -> BinaryIO:
        return open_stored(self.path(role))

    def folder(self, prefix: str, name: str = "") -> Path:
        """A folder of links to the declared files with this prefix, and nothing else.

        For libraries and commands that take a folder. It is removed when the maker returns.
        """
        folder = self._stack.enter_context(scratch()) / (name or PurePosixPath(prefix).name)
        folder.mkdir()
        for role, file in self._inputs.files.items():
            if role.startswith(f"{prefix}/"):
                link = folder / role.removeprefix(f"{prefix}/")
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(_absolute(file))
        return folder

    def allow(self, files: Iterable[Path]) -> None:
        """Raise if one of these is no declared file: for readers that have opened them already."""
        for file in files:
            if _absolute(file) not in self._declared:
                raise Undeclared(f"{file} is no declared input")

    @property
    def out(self) -> Path:
        """The folder for files of the entry, with the parts that an interrupted maker had `put`."""
        self._place.mkdir(parents=True, exist_ok=True)
        return self._place

    def done(self, part: str) -> Any:
        """The record of a part that an interrupted maker finished, or None.

        The part's files were checked and are unchanged.
        """
        return self._finished.get(part)

    def put(self, part: str, record: Any, *names: str) -> None:
        """Record a finished part, whose files are written; `record` is returned by `done`."""
        line = {"part": part, "record": record, "files": _listed(self.out, names)}
        with (self.out / _JOURNAL).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(sealed(line, part)) + "\n")
        self._finished[part] = record


@contextmanager
def given(inputs: Inputs) -> Iterator[Given]:
    """A `Given` for code that makes the parts of a growing entry."""
    with ExitStack() as stack:
        yield Given(inputs, stack.enter_context(scratch()), stack)


_JOURNAL = "parts.jsonl"


def _finished_parts(folder: Path) -> dict[str, Any]:
    """The records of finished parts of an interrupted maker; removes files of unfinished ones."""
    found: dict[str, Any] = {}
    whole = {_JOURNAL}
    for line in _lines(folder / _JOURNAL):
        if is_intact(line, str(line.get("part"))) and _as_listed(folder, line["files"]):
            found[line["part"]] = line["record"]
            whole |= set(line["files"])
    for name in _names_in(folder) - whole:
        remove(folder / name)
    for inner in sorted(filter(Path.is_dir, folder.rglob("*")), reverse=True):
        with suppress(OSError):  # what is finished lies in it
            inner.rmdir()
    return found


def get(
    wanted: Derivation, make: Callable[[Given], Any] | None = None, *, again: bool = False
) -> KeptEntry:
    """The entry of a derivation, from the cache or made now; `again` always makes it.

    `make` replaces the derivation's own maker where that needs objects of this process. One process
    makes an entry while others wait. Inputs that change meanwhile are an error.
    """
    said = wanted.name, wanted.of or "no model"
    if not again and (found := look(wanted)):
        _log.debug("cache: %s of %s is found", *said)
        return found
    with _making(wanted) as place:
        if not again and (found := look(wanted)):
            _log.debug("cache: %s of %s was made by another process", *said)
            return found
        _log.debug("cache: %s of %s is made", *said)
        return _made_somewhere(wanted, place, make or wanted.make)


def look(wanted: Derivation) -> KeptEntry | None:
    """The cached entry of a derivation, or None; an outdated one only under `reusing`."""
    if found := _unkept.get(wanted.full):
        return replace(found, value=_plain(found.value))
    folders = [root / wanted.name / wanted.core for root in _roots(wanted.near)]
    if found := next(filter(None, (_read(folder, wanted.full) for folder in folders)), None):
        return found
    for folder in folders:
        for other in _others(folder, wanted.full, ".json"):
            if _reusing.get() and (found := _read(folder, other)):
                return found
            _say_outdated(wanted, kept_json(folder / f"{other}.json", _HEADER), 1)
    return None


def _made_somewhere(
    wanted: Derivation, place: Path | None, make: Callable[[Given], Any]
) -> KeptEntry:
    """Make an entry in its place; if that cannot be written, in a temporary folder."""
    try:
        return _made(wanted, place, make)
    except (OSError, OutputError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        told = isinstance(error, OutputError) and str(place) in str(error)
        if place is None or not (full or told):
            raise
        say(f"{place}: cannot be written ({error}); results live until the command ends")
        remove(place / f"{wanted.full}.partial", if_possible=True)
        return _made(wanted, None, make)


def _made(wanted: Derivation, place: Path | None, make: Callable[[Given], Any]) -> KeptEntry:
    lasting = {r: f for r, f in wanted.inputs.files.items() if not _is_volatile(wanted, r)}
    before = identify(file for file in lasting.values() if remote_file(file) is None)
    same = _is_same(wanted, file_digests)  # files may have been written since the key was made
    begun = time.perf_counter()
    with ExitStack() as stack:
        if place is None:
            partial = _until_the_end.enter_context(scratch()) / wanted.full
        else:
            partial = place / f"{wanted.full}.partial"
        value = _plain(make(Given(wanted.inputs, partial, stack)))
    seconds = time.perf_counter() - begun
    try:
        unchanged(before)  # it would be kept under the content of before
        same = wanted.prove() and same
    except PoolError:
        remove(partial, if_possible=True)
        raise
    if isinstance(value, NotToKeep) or not same:
        remove(partial, if_possible=True)
        plain = value.value if isinstance(value, NotToKeep) else value
        return KeptEntry(plain, partial, seconds, kept=False)
    (partial / _JOURNAL).unlink(missing_ok=True)
    folder = partial
    if place is not None:
        with suppress(OSError):
            folder = _publish(wanted, place, partial, value, seconds)
    if place is None or folder == partial:
        _unkept[wanted.full] = KeptEntry(_plain(value), folder, seconds, kept=True)
    else:
        _bound(place.parent.parent)
    return KeptEntry(value, folder, seconds, kept=False)


def _plain(value: Any) -> Any:
    """What a later run would read."""
    if isinstance(value, NotToKeep):
        return NotToKeep(_plain(value.value))
    return json.loads(json.dumps(value))


def _proven(files: Iterable[Path]) -> Mapping[Path, str]:
    return prove(files, _THREADS)


def _is_same(wanted: Derivation, read: _Digests) -> bool:
    """True if no input changed; raises if one that is not volatile did."""
    roles = wanted.changed_roles(read)
    for role in roles:
        file = address(wanted.inputs.files[role])
        if not _is_volatile(wanted, role):
            raise changed(file)
        say(f"{file}: changed while it was read, so that no {wanted.name} made with it is kept")
    return not roles


def _is_volatile(wanted: Derivation, role: str) -> bool:
    return role.startswith(wanted.volatile)


def _publish(wanted: Derivation, place: Path, partial: Path, value: Any, seconds: float) -> Path:
    """Publish an entry: its files first, then its header. Returns the folder of the files."""
    folder, header = place / wanted.full, place / f"{wanted.full}.json"
    remove(folder)  # a header whose files are not as it lists them is none
    listed = _listed(partial, sorted(_names_in(partial)))
    content = {**wanted.header(seconds), "value": value, "files": listed}
    if partial.is_dir():
        partial.rename(folder)
    if not keep_json(header, content):
        _unkept[wanted.full] = KeptEntry(_plain(value), folder, seconds, kept=True)
    return folder


def _read(folder: Path, key: str) -> KeptEntry | None:
    """An entry, or None unless its header and all files have the digests they were written with."""
    header = folder / f"{key}.json"
    content = kept_json(header, {*_HEADER, "value", "files"})
    if content is None or not _as_listed(folder / key, content["files"]):
        return None
    _use(header)
    return KeptEntry(content["value"], folder / key, float(content["seconds"]), kept=True)


def _use(header: Path) -> None:
    """Record the time of use of an entry; a read-only cache is left as it is."""
    with suppress(OSError):
        os.utime(header)


def _listed(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Files of a folder with their sizes and digests."""
    files = {name: folder / name for name in names}
    digests = file_digests(files.values())
    return {n: {"size": f.stat().st_size, "digest": digests[f]} for n, f in files.items()}


def _as_listed(folder: Path, files: Mapping[str, Any]) -> bool:
    """True if files have the listed sizes and digests; compares sizes first."""
    try:
        if any((folder / n).stat().st_size != one["size"] for n, one in files.items()):
            return False
        return all(_listed(folder, [name])[name] == one for name, one in files.items())
    except (OSError, SigmergeError):
        return False


def _names_in(folder: Path) -> set[str]:
    found = folder.rglob("*") if folder.is_dir() else ()
    return {file.relative_to(folder).as_posix() for file in found if not file.is_dir()}


@contextmanager
def parts(wanted: Derivation) -> Iterator[GrowingEntry]:
    """Open a growing entry for writing. One process writes at a time; others wait."""
    with _making(wanted) as place:
        yield GrowingEntry(wanted, place)
    if place is not None:
        _bound(place.parent.parent)


def look_at_parts(wanted: Derivation) -> GrowingEntry:
    """Open a growing entry for reading only."""
    return GrowingEntry(wanted, None)


class GrowingEntry:
    """An entry of many parts, each a line that is written completely or not at all."""

    def __init__(self, wanted: Derivation, place: Path | None) -> None:
        self._wanted, self._place = wanted, place
        self.records: dict[str, Any] = dict(_unkept_parts.get(wanted.full, {}))
        for root in reversed(_roots(wanted.near)):
            folder = root / wanted.name / wanted.core
            for other in _others(folder, wanted.full, ".jsonl"):
                older, header = _grown(folder, other)
                if _reusing.get():
                    self.records |= older
                elif fresh := older.keys() - _grown(folder, wanted.full)[0].keys():
                    _say_outdated(wanted, header, len(fresh))
            own = _grown(folder, wanted.full)[0]
            if own:
                _use(folder / f"{wanted.full}.jsonl")
            self.records |= own

    def put(self, records: Mapping[str, Any]) -> None:
        """Add parts and sync them to disk; where that fails, they live until the process ends."""
        self.records |= records
        header = self._wanted.header(0.0)
        if self._place is None or not _append(self._place, self._wanted.full, header, records):
            _unkept_parts.setdefault(self._wanted.full, {}).update(records)


def _grown(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The parts of a growing entry and its header; damaged lines are left out."""
    found: dict[str, Any] = {}
    header = None
    for line in _lines(folder / f"{key}.jsonl"):
        if not is_intact(line, key):
            continue
        if "header" in line:
            header = line["header"]
        elif isinstance(line.get("parts"), dict):
            found |= line["parts"]
    return found, header


def _append(place: Path, key: str, header: Mapping[str, Any], records: Mapping[str, Any]) -> bool:
    """Append a line, after truncating the unfinished line of a killed process."""
    try:
        with (place / f"{key}.jsonl").open("a+b") as stream:
            lock(stream.fileno(), wait=True)
            end = stream.seek(0, os.SEEK_END)
            if end:
                stream.seek(0)
                end = stream.read().rfind(b"\n") + 1
                stream.truncate(end)
            lines = [] if end else [sealed({"header": header}, key)]
            lines.append(sealed({"parts": records}, key))
            data = "".join(json.dumps(line) + "\n" for line in lines).encode()
            try:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            except OSError:
                with suppress(OSError):
                    stream.truncate(end)
                raise
        return True
    except OSError as error:
        say(f"{place}: cannot be written ({error.strerror}); results live until the command ends")
        return False


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a file, line by line; skips lines that hold none."""
    try:
        content = file.read_bytes()
    except OSError:
        return
    for line in content.split(b"\n")[:-1]:  # behind the last is what a killed process left
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                yield found


@contextmanager
def _making(wanted: Derivation) -> Iterator[Path | None]:
    """Lock the folder of an entry and yield it; None if no root can be written."""
    with ExitStack() as stack:
        place = None
        for root in _roots(wanted.near):
            folder = root / wanted.name / wanted.core
            try:
                stack.enter_context(_alone(folder, wanted))
                place = folder
                break
            except OSError:
                continue
        yield place


@contextmanager
def _alone(folder: Path, wanted: Derivation) -> Iterator[None]:
    """Hold the lock of an entry; locks again if the lock file was removed during the wait."""
    lock = folder / f".{wanted.full}.lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            handle = stack.enter_context(locked(lock))
            if handle is None:
                say(f"another process makes the {wanted.name} of {wanted.of}; waiting for it")
                handle = stack.enter_context(locked(lock, wait=True))
            if handle is not None and has_name(lock, handle):
                yield
                return


@contextmanager
def _if_free(folder: Path, key: str) -> Iterator[bool]:
    """Yield True and hold the lock if no process makes the entry; then removes the lock file."""
    lock = folder / f".{key}.lock"
    with ExitStack() as stack:
        free = False
        with suppress(OSError):
            free = stack.enter_context(locked(lock)) is not None
        yield free
        if free:
            remove(lock, if_possible=True)


def _roots(near: Path | None) -> list[Path]:
    """Roots that are searched in order; entries are written to the first writable one."""
    users = cache_place("kept")
    if near is None:
        return [users]
    beside = near.absolute().parent / BESIDE
    if is_installed(beside):
        return [users]
    _beside.add(beside)
    return [beside, users]


def _others(folder: Path, key: str, ending: str) -> list[str]:
    """Keys of outdated entries: other code or libraries, the same inputs; the latest first."""
    with suppress(OSError):
        found = [f for f in folder.glob(f"*{ending}") if f.name != f"{key}{ending}"]
        found.sort(key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.name.removesuffix(ending) for file in found]
    return []


def _say_outdated(wanted: Derivation, header: Mapping[str, Any] | None, count: int) -> None:
    """Warn once that an outdated entry exists and is not used."""
    if header is None:
        return
    theirs = header["runtime"]
    changed = [f"{n} {theirs[n]}" for n, v in wanted.runtime.items() if theirs.get(n, v) != v]
    by = f"under {', '.join(changed)}" if changed else "by another version of sigmerge"
    of = f" of {wanted.of}" if wanted.of else ""
    what = f"{count:,} {wanted.name}{'s' * (count > 1)}{of}"
    say(f"{what} {'were' if count > 1 else 'was'} made {by}; not used without --reuse")


def say(text: str) -> None:
    """Warn once in a process."""
    if text not in _said:
        _said.add(text)
        _log.warning(text)


def _absolute(file: Path) -> Path:
    """The absolute path without resolving links: a link and its target are two files."""
    return Path(os.path.abspath(file))  # noqa: PTH100


# What follows lists, checks and removes entries: the command `sigmerge cache`.


@dataclass(frozen=True)
class Listed:
    """An entry as `sigmerge cache list` shows it."""

    root: Path
    name: str
    of: str
    key: str
    bytes: int
    made: float
    used: float
    runtime: Mapping[str, str]
    inputs: Mapping[str, str]
    files: tuple[Path, ...]
    sound: bool


def roots(pools: Iterable[Path] = ()) -> list[Path]:
    """The user's root, and those beside the members of pools."""
    return [cache_place("kept"), *(pool.absolute() / BESIDE for pool in pools)]


def listing(root: Path, *, verify: bool = False) -> Iterator[Listed]:
    """Every entry under a root. `verify` reads all their bytes; otherwise headers only."""
    for header in sorted(root.glob("*/*/*.json")) + sorted(root.glob("*/*/*.jsonl")):
        key = header.stem
        files = [header]
        if header.suffix == ".jsonl":
            _, about = _grown(header.parent, key)
            sound = about is not None and (
                not verify or all(is_intact(line, key) for line in _lines(header))
            )
        else:
            about = kept_json(header, _HEADER)
            folder = header.parent / key
            files += [folder / name for name in sorted(_names_in(folder))]
            sound = about is not None and (not verify or _as_listed(folder, about.get("files", {})))
        status = header.stat()
        yield Listed(
            root=root,
            name=header.parent.parent.name,
            of=str((about or {}).get("of", "")),
            key=key,
            bytes=sum(file.stat().st_size for file in files),
            made=float((about or {}).get("made", status.st_mtime)),
            used=status.st_mtime,
            runtime=(about or {}).get("runtime", {}),
            inputs=(about or {}).get("inputs", {}),
            files=tuple(files),
            sound=sound,
        )


def drop(entry: Listed) -> None:
    """Remove an entry, its header first, so that a partly removed entry is never found.

    Leaves the files of an entry that another process is making now.
    """
    header = entry.files[0]
    remove(header, if_possible=True)
    with _if_free(header.parent, entry.key) as free:
        if free:
            remove(header.with_suffix(""), if_possible=True)
    for folder in (header.parent, header.parent.parent):
        with suppress(OSError):
            folder.rmdir()


def drop_made_of(digest: str, pools: Iterable[Path] = ()) -> None:
    """Remove every entry with this input digest: the file turned out to have other content.

    Partial entries of interrupted makers do not name their inputs, so all of them are removed.
    """
    for root in {*roots(pools), *_beside}:
        for entry in list(listing(root)):
            if digest in entry.inputs.values():
                drop(entry)
        _drop_unfinished(root)
    _unkept.clear()
    _unkept_parts.clear()


def _drop_made_of_another(file: Path, digest: str) -> None:
    drop_made_of(digest, [file.parent, file.parent.parent])


when_contradicted.append(_drop_made_of_another)


def prune(
    root: Path, *, older_than: float | None = None, larger_than: int | None = None
) -> list[Listed]:
    """Remove entries unused for `older_than` seconds or larger than `larger_than` bytes.

    With both limits, only entries that exceed both. Damaged entries, and partial ones that were not
    written for a day, are removed in any case. Returns the removed entries.
    """
    now, gone = time.time(), []
    for entry in list(listing(root)):
        old = older_than is None or now - entry.used > older_than
        large = larger_than is None or entry.bytes > larger_than
        if (old and large) or not entry.sound:
            drop(entry)
            gone.append(entry)
    _drop_unfinished(root, before=now - 86400)
    return gone


def _drop_unfinished(root: Path, before: float = math.inf) -> None:
    """Remove partial entries and locks of interrupted makers, last written before that time."""
    keys = [*root.glob("*/*/*.partial"), *root.glob("*/*/.*.lock")]
    for place in keys:
        with suppress(FileNotFoundError):
            old = place.stat().st_mtime < before
            with _if_free(place.parent, place.stem.removeprefix(".")) as free:
                if free and old:
                    remove(place, if_possible=True)


def clear(root: Path) -> None:
    """Remove all entries of a root, and nothing else."""
    for entry in list(listing(root)):
        drop(entry)
    _drop_unfinished(root)
    for folder in (*root.glob("*/*"), *root.glob("*")):
        with suppress(OSError):
            folder.rmdir()


def size_limit() -> int:
    """Maximum size of the entries of a root in bytes."""
    given = os.environ.get("SIGMERGE_CACHE_SIZE", "")
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    number, unit = (given[:-1], given[-1].upper()) if given[-1:].upper() in units else (given, "")
    with suppress(ValueError):
        return int(float(number) * (1 << units.get(unit, 0)))
    return SIZE_LIMIT


_bounded: dict[Path, float] = {}


def _bound(root: Path) -> None:
    """Evict the least recently used entries until the rest fits; checks at most once a minute."""
    now = time.monotonic()
    if now - _bounded.get(root, -1e9) < 60:
        return
    _bounded[root] = now
    with suppress(OSError):
        entries = sorted(listing(root), key=lambda entry: entry.used)
        total, limit = sum(entry.bytes for entry in entries), size_limit()
        for entry in entries:
            if total <= limit or time.time() - entry.used < IN_USE:
                break
            drop(entry)
            total -= entry.bytes
