"""`sigmerge evaluate`: score a checkpoint on a suite, item by item, resumably."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.inputs import hashed_again
from sigmerge.engine.machine import LIBRARIES
from sigmerge.errors import OutputError, SigmergeError
from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import Result, evaluate
from sigmerge.files.checksums import sealed
from sigmerge.files.documents import read_json_object, write_json
from sigmerge.files.safe_open import is_regular
from sigmerge.jobs.steps import Description, EvaluateStep

FIRST_ANSWER = b'{"benchmark": '
"""The beginning of every line of a file of answers."""


@dataclass(frozen=True)
class EvaluateJob:
    """One checkpoint on one split of a suite; with `out` the result is also written to a file."""

    checkpoint: Path
    suite: str
    split: str
    how: How = field(default_factory=How)
    out: Path | None = None

    def describe(self) -> Description:
        """Items, tokens and cached answers; the model is not loaded."""
        from sigmerge.evaluation.run import describe

        self._check_files()
        described = describe(self.checkpoint, self.suite, self.split, self.how)
        opened = open_checkpoint(self.checkpoint, allow_pickle=self.how.allow_pickle)
        weights = opened.nbytes
        step = EvaluateStep(
            **described,
            bytes_to_read=weights,
            peak_memory_bytes=LIBRARIES + 2 * weights,
            evaluation_calls=1,
            notes=hashed_again([opened]),
        )
        return Description((step,), 1)

    def run(self) -> Result:
        for _, file in self._check_files():
            file.parent.mkdir(parents=True, exist_ok=True)
        result = evaluate(self.checkpoint, self.suite, self.split, self.how)
        if self.out is not None:
            write_json(self.out, sealed(result.as_json()))
        return result

    def _check_files(self) -> list[tuple[str, Path]]:
        """Check the files to write, each under the flag that names it."""
        named = (("--out", self.out), ("--answers", self.how.answers))
        files = [(flag, file) for flag, file in named if file is not None]
        for flag, file in files:
            _require_writable(flag, file)
            if file.exists() and not _is_older(flag, file):
                raise OutputError(
                    f"{flag}: {file} exists already, and no evaluation wrote it; choose a new file."
                )
        return files


def _require_writable(flag: str, file: Path) -> None:
    """Raise OutputError now if the result could not be written later. Creates no folder."""
    place = next(folder for folder in file.absolute().parents if folder.exists())
    if file.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        why = "it is a folder" if file.is_dir() else f"{place} is no folder that can be written to"
        raise OutputError(f"{flag}: {file} cannot be written; {why}.")


def _is_older(flag: str, file: Path) -> bool:
    """True if an earlier evaluation wrote the file, or it is empty."""
    if not is_regular(file) or not file.stat().st_size:
        return is_regular(file)
    if flag == "--answers":
        with file.open("rb") as lines:
            return lines.read(len(FIRST_ANSWER)) == FIRST_ANSWER
    with suppress(SigmergeError):
        return {"checkpoint", "macro"} <= read_json_object(file, "a result").keys()
    return False
