"""Output folders of jobs: which files belong to the job, and the hidden names beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.checkpoints.publishing import (
    check_apart,
    check_target,
    partial_of,
    real_target,
    writing,
)
from sigmerge.checkpoints.writer import Layout, Output
from sigmerge.errors import OutputError, SigmergeError
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import read_json_object
from sigmerge.files.locks import only_writer
from sigmerge.files.objects import address, url_of
from sigmerge.files.safe_open import remove
from sigmerge.jobs.options import Options
from sigmerge.messages import reason
from sigmerge.records import PROVENANCE, Provenance, read

WINNER = "winner"
"""Name of the final merge of a tuning or a search."""
_UNFINISHED = (
    r"\.+{name}(\.\d+-\d+)?"
    r"(\.(search|guide|calibrate|candidate|anchor|level|old|partial|lock|cleared))+"
)
"""Names that an interrupted command may leave beside its output."""


def hidden(out: Path, purpose: str) -> Path:
    """A hidden name beside `out` for a folder that exists only while `out` is made."""
    return out.absolute().with_name(f".{out.name}.{purpose}")


def open_output(out: Path, layout: Layout, fingerprint: str, options: Options) -> Output:
    """The hidden folder that becomes `out`; blocks of an interrupted run of the job are kept."""
    return Output(
        out,
        layout,
        fingerprint,
        overwrite=options.overwrite,
        durable=options.durable,
        threads=options.threads,
        progress=options.progress,
    )


def are_recorded(folder: Path, outputs: Mapping[str, str], threads: int) -> bool:
    """Whether files of a result are there with the digests that its record has of them."""
    written = {folder / name: digest for name, digest in outputs.items()}
    try:
        return file_digests(written, threads) == written
    except SigmergeError:
        return False


def is_whole(folder: Path, threads: int, added: Iterable[str] = ()) -> bool:
    """True if a result is unchanged, and contains no other file.

    But for records that were `added`, or written again.
    """
    own = {f"{RECORDS_FOLDER}/{name}" for name in added}
    record = f"{RECORDS_FOLDER}/{PROVENANCE}"
    try:
        recorded = read(Provenance, folder / record).outputs
    except SigmergeError:
        return False
    found = [each for each in folder.rglob("*") if each.is_symlink() or not each.is_dir()]
    files = {each.relative_to(folder).as_posix() for each in found}
    written = {name: digest for name, digest in recorded.items() if name not in own}
    return files - own == {*written, record} and are_recorded(folder, written, threads)


def list_records(folder: Path, added: Iterable[str], threads: int) -> Provenance:
    """The provenance of a result with the records `added` to it, right before it is published.

    A merge whose coefficients were found first gets records that its own run did not write. What a
    killed process was writing there is removed. Anything else must be as that run wrote it.
    """
    file, names = folder / RECORDS_FOLDER / PROVENANCE, tuple(added)
    for unfinished in file.parent.glob(".*"):
        remove(unfinished)
    if not is_whole(folder, threads, names):
        raise OutputError(
            f"{folder}: is not what was written; another program wrote it, or the disk is failing. "
            "Nothing is published. Run the same command again: what is damaged is made again."
        )
    provenance = read(Provenance, file)
    digests = file_digests([file.with_name(name) for name in names])
    listed = {f"{RECORDS_FOLDER}/{each.name}": digest for each, digest in digests.items()}
    outputs = dict(sorted({**provenance.outputs, **listed}.items()))
    provenance = provenance.model_copy(update={"outputs": outputs})
    provenance.write(file)
    return provenance


@contextmanager
def alone(out: Path, overwrite: bool) -> Iterator[None]:
    """Lock a result and the hidden folders beside it against other commands."""
    with writing(out):
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with only_writer(hidden(out, "lock"), f"{address(out)}: another run is writing it."):
        check_target(out, overwrite)
        yield


def remove_anchor(out: Path) -> None:
    """Remove the anchor of a killed repair, where the result was made in another way since.

    Unless another command is at work there. What was scored for a search or a guide stays: it may
    have taken hours, and the same command goes on from it.
    """
    anchor = hidden(out, "anchor")
    begun = partial_of(anchor)
    with suppress(OutputError, OSError), only_writer(hidden(out, "lock"), ""):
        for place in (anchor, begun, begun.with_name(f"{begun.name}.lock")):
            remove(place, if_possible=True)


def _nameless(folder: Path) -> Path:
    """Rename a folder that is to be removed to a hidden name."""
    if folder.name.startswith("."):
        return folder
    aside = hidden(folder, "cleared")
    remove(aside)
    return folder.rename(aside)


def _is_begun(name: str, known: Iterable[str]) -> bool:
    """Whether an interrupted command leaves this name beside one of these."""
    named = "|".join(map(re.escape, known))
    return re.fullmatch(_UNFINISHED.format(name=f"({named})"), name) is not None


@dataclass(frozen=True)
class WorkFolder:
    """What a command writes into its folder: files, checkpoints, and the file written last.

    `work` is a folder that exists while the command runs, and how all that lies in it is named.
    `beside` are folders that other commands write there; they are left alone.
    """

    what: str
    files: tuple[str, ...]
    checkpoints: tuple[str, ...]
    last: str
    work: tuple[str, str] | None = None
    beside: tuple[str, ...] = ()

    def check(self, out: Path, overwrite: bool, inputs: Iterable[Path]) -> None:
        """Refuse a folder with an input or foreign file in it; a finished one without overwrite."""
        if url := url_of(out):
            raise OutputError(f"{url}: a {self.what} goes into a local folder; only the results of "
                              "merge and repair are uploaded.")  # fmt: skip
        if out.is_symlink():
            raise OutputError(f"{out}: is a link; name the folder itself, or choose a new one.")
        if out.exists() and not out.is_dir():
            raise OutputError(f"{out}: is a file; choose a new folder for the {self.what}.")
        target = real_target(out)
        check_apart(out, target, inputs)
        names = sorted(file.name for file in out.iterdir()) if out.exists() else []
        for name in names:
            beside = name in self.beside or _is_begun(name, self.beside)
            if not beside and not self._ours(out / name):
                raise OutputError(
                    f"{out}: holds {name}, which no {self.what} wrote; choose a new folder."
                )
        if self.last in names and not overwrite:
            raise OutputError(
                f"{out}: holds a finished {self.what}; pass --overwrite to replace it."
            )

    def check_extends(self, out: Path, of: Mapping[str, str], calls: int) -> None:
        """Refuse a finished run, unless it is of the same and has fewer evaluation calls.

        `of` names each part of what the calls are made of. What was called before is kept, so a
        longer run costs only what it adds.
        """
        try:
            found = read_json_object(out / self.last, f"the record of a {self.what}")
            theirs = dict(found["of"])
            spent = found.get("evaluation_calls") or found["settings"]["calls"]
        except (SigmergeError, KeyError, TypeError, ValueError):
            theirs, spent = {}, calls
        others = [part for part in of if theirs.get(part) != of[part]]
        if theirs and others:
            raise OutputError(
                f"{out}: holds a finished {self.what} that differs in {', '.join(others)}; choose "
                "a new folder, or pass --overwrite to replace it."
            )
        if not theirs or calls <= spent:
            raise OutputError(
                f"{out}: holds a finished {self.what}; pass --overwrite to replace it, or more "
                "evaluation calls to extend it."
            )

    def clear(self, out: Path) -> None:
        """Remove what the command wrote and nothing else; the file written last goes first.

        A folder loses its name before its files: a kill in between leaves no half of a checkpoint.
        """
        (out / self.last).unlink(missing_ok=True)
        for path in list(out.iterdir()) if out.exists() else []:
            if self._ours(path):
                remove(_nameless(path) if path.is_dir() else path)

    def _ours(self, path: Path) -> bool:
        if path.is_symlink():
            return False
        if path.name in self.files:
            return path.is_file()
        if path.name in self.checkpoints:
            made = (path / "config.json").is_file() and (path / RECORDS_FOLDER).is_dir()
            return path.is_dir() and (made or not any(path.iterdir()))
        if self.work is not None and path.name == self.work[0]:
            inside = [file.name for file in path.iterdir()] if path.is_dir() else [""]
            return all(re.fullmatch(self.work[1], name) for name in inside)
        return _is_begun(path.name, (*self.files, *self.checkpoints))

    @contextmanager
    def writing(self, out: Path) -> Iterator[None]:
        """Make the folder, and keep every other process from writing it meanwhile."""
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{out}: cannot be written ({reason(error)}).") from None
        message = f"{out}: another process is writing this {self.what}."
        with only_writer(hidden(out, "lock"), message):
            for path in list(out.iterdir()):  # what a killed process was writing
                unfinished = path.name.startswith(".") and self._ours(path)
                if unfinished and (path.is_file() or path.suffix == ".cleared"):
                    remove(path)
            yield
