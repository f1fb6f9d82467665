"""Publishing results: which folders may be replaced, and the rename to the final name."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from sigmerge import messages
from sigmerge.checkpoints.adapter_folders import ADAPTER_CONFIG
from sigmerge.checkpoints.remote import (
    RESULT_RECORD,
    check_remote_target,
    names_a_checkpoint,
    target_url,
)
from sigmerge.errors import OutputError
from sigmerge.files.atomic_swap import exchange
from sigmerge.files.locks import only_writer
from sigmerge.files.objects import address
from sigmerge.files.safe_open import remove, sync_folder

ResultKind = Literal["a checkpoint", "an adapter", "an analysis"]
"""The kind of folder that may be replaced."""

SYNCED_TOGETHER = 16
ANALYSIS_RULES = "anchor_rules.json"
"""The file that every analysis has."""
_OF_ANALYSIS = re.compile(
    rf"(tables/[^/]+\.(md|csv|tex)|figures/[^/]+\.(svg|png)|analysis\.md|index\.html|{ANALYSIS_RULES})"
)


def real_target(out: Path) -> Path:
    """The folder that a name leads to: a link is followed, ~ is a home."""
    try:
        return Path(os.path.realpath(out.expanduser()))
    except RuntimeError as error:
        raise OutputError(f"{out}: write the path in full ({error})") from None


def check_target(
    final: Path, overwrite: bool, inputs: Iterable[Path] = (), kind: ResultKind = "a checkpoint"
) -> None:
    """Raise early if a result could not be published, or would replace an input."""
    target = real_target(final)
    if not final.name or any(place.is_relative_to(target) for place in _in_use()):
        raise OutputError(f"{final}: choose a new folder for the result.")
    if (url := target_url(target)) is not None:
        check_remote_target(url, overwrite, [address(folder) for folder in inputs])
        return
    check_apart(final, target, inputs)
    with writing(final):
        _check_replaced(final, target, overwrite, kind)


def _in_use() -> Iterator[Path]:
    """Folders that no result may replace: the current one and the home folder."""
    yield Path.cwd()
    with suppress(RuntimeError):
        yield Path.home()


def check_apart(final: Path, target: Path, inputs: Iterable[Path]) -> None:
    """Refuse a target that holds an input, or lies inside a model; beside data it may lie.

    A command removes what lies under the hidden names that it uses itself; so no input may.
    """
    for folder in inputs:
        real = real_target(folder)
        for place in (real_target(final.parent) / final.name, target):
            inside = real.relative_to(place.parent) if real.is_relative_to(place.parent) else real
            if inside.parts[:1] and inside.parts[0].startswith(f".{place.name}."):
                raise OutputError(
                    f"{final}: {folder} has a name that the command itself uses beside the result; "
                    "rename it, or choose another folder for the result."
                )
        if real.is_relative_to(target):
            raise OutputError(f"{final}: holds an input, {folder}; choose a new folder.")
        model = any((real / name).exists() for name in ("config.json", ADAPTER_CONFIG))
        if model and target.is_relative_to(real):
            raise OutputError(f"{final}: lies inside an input, {folder}; choose another folder.")


def _check_replaced(final: Path, target: Path, overwrite: bool, kind: ResultKind) -> None:
    if target.is_symlink():
        raise OutputError(f"{final}: is a link that leads back to itself; choose a new folder.")
    if target.exists() and not target.is_dir():
        raise OutputError(f"{final}: is a file; choose a new folder for the result.")
    if _is_mount(target):
        raise OutputError(f"{final}: is a mount point; choose a folder inside it.")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise OutputError(f"{final}: exists already; pass --overwrite to replace it.")
        if not _is(kind, target):
            raise OutputError(
                f"{final}: is not {kind} folder, and --overwrite only replaces those."
                if kind != "an analysis"
                else f"{final}: holds files that no analysis wrote; choose a new folder."
            )


def _is_mount(folder: Path) -> bool:
    """Whether something is mounted there; of a folder of the same disk only Linux says so."""
    if folder.is_mount():
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    return _escaped(os.fsencode(folder)) in {line.split(b" ")[4] for line in lines}


def _escaped(name: bytes) -> bytes:
    """A name as the kernel writes it into a list of mounts."""
    return re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % ord(found[0]), name)


def _is(kind: ResultKind, folder: Path) -> bool:
    """Whether a configuration is there, and weights or the records of a result.

    An analysis holds nothing but what one writes.
    """
    if kind == "an analysis":
        found = [each for each in folder.rglob("*") if each.is_symlink() or not each.is_dir()]
        written = {each.relative_to(folder).as_posix() for each in found}
        return ANALYSIS_RULES in written and all(map(_OF_ANALYSIS.fullmatch, written))
    if kind == "an adapter":
        return (folder / ADAPTER_CONFIG).exists() and any(folder.glob("adapter_model.*"))
    names = [file.name for file in folder.iterdir()]
    return names_a_checkpoint(
        [*names, RESULT_RECORD] if (folder / RESULT_RECORD).exists() else names
    )


def check_space(final: Path, needed: int) -> None:
    """Raise if the disk of a folder, which need not exist yet, has less free space."""
    place = next(folder for folder in (final, *final.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OutputError(
            f"{final}: needs {messages.size(needed)}, the disk has {messages.size(free)} free."
        )


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Convert OSError in this context to OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{error.filename or place}: cannot be written ({messages.reason(error)})."
        ) from None


@contextmanager
def only_target(final: Path, overwrite: bool, kind: ResultKind = "a checkpoint") -> Iterator[None]:
    """Lock a result's folder against other runs.

    What a killed run left of an older result is put right first.
    """
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
    lock = final.with_name(f".{final.name}.partial.lock")
    with only_writer(lock, f"{target_url(final) or final}: another run is writing it."):
        with writing(final):
            _put_right(final)
        check_target(final, overwrite, kind=kind)
        yield


def publish(
    folder: Path, final: Path, *, overwrite: bool, durable: bool, kind: ResultKind = "a checkpoint"
) -> None:
    """Put a finished folder in the place of a result, whose `only_target` the caller holds.

    Files, folders and the new name are on the disk before this returns. It leaves the folder that
    it was made in first: an older result, which gets the name of the new one, must not lie there.
    """
    check_target(final, overwrite, kind=kind)
    with writing(final):
        if durable:
            sync_tree(folder)
        finished = partial_of(final)
        if folder != finished:
            remove(finished)
            folder.rename(finished)
        put_in_place(finished, final, overwrite=overwrite, durable=durable)


def put_in_place(folder: Path, final: Path, *, overwrite: bool, durable: bool) -> None:
    """Give a folder its final name, in one step where the system can exchange two names.

    Without `overwrite` the system itself refuses to replace a folder that is not empty.
    """
    if not overwrite or not final.exists():
        folder.rename(final)
    elif not exchange(folder, final):
        final.rename(_old(final))
        folder.rename(final)
    if durable:
        sync_folder(final.parent)
    for leftover in (folder, _old(final)):
        remove(leftover, if_possible=True)


def _put_right(final: Path) -> None:
    """A run that was killed while it replaced a result left the older one under a hidden name."""
    old = _old(final)
    if old.is_dir() and not old.is_symlink() and not final.exists():
        old.rename(final)
    else:
        remove(old)


def partial_of(final: Path) -> Path:
    """The name of a result until it is published."""
    return final.with_name(f".{final.name}.partial")


def _old(final: Path) -> Path:
    """The name of an older result between the two renames that replace it."""
    return final.with_name(f".{final.name}.old")


def sync_tree(folder: Path) -> None:
    """Sync every file below a folder to disk, then every folder.

    Files are synced side by side: the file system writes its own journal once for several.
    """
    found = list(os.walk(folder, topdown=False))
    with ThreadPoolExecutor(SYNCED_TOGETHER) as pool:
        files = [Path(root) / name for root, _, names in found for name in names]
        for _ in pool.map(_sync_file, files):
            pass
    for root, _, _ in found:
        sync_folder(Path(root))


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
