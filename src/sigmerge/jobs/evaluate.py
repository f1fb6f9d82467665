"""`sigmerge evaluate`: score a checkpoint on a suite, item by item, resumably."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from sigmerge.errors import OutputError
from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import Result, evaluate
from sigmerge.files.documents import write_json
from sigmerge.jobs.options import Description, Step


@dataclass(frozen=True)
class EvaluateJob:
    """One checkpoint on one split of a suite; with `out` the result is also written to a file."""

    checkpoint: Path
    suite: str
    split: str
    how: How = field(default_factory=How)
    out: Path | None = None

    def describe(self) -> Description:
        """Items, tokens and what is in the store already; the model is not loaded."""
        from sigmerge.evaluation.run import describe

        if self.out is not None:
            _require_writable(self.out)
        facts = describe(self.checkpoint, self.suite, self.split, self.how)
        return Description((Step("evaluate", facts, evaluation_calls=1),), 1)

    def run(self) -> Result:
        if self.out is not None:
            _require_writable(self.out)
        result = evaluate(self.checkpoint, self.suite, self.split, self.how)
        if self.out is not None:
            write_json(self.out, result.as_json())
        return result


def _require_writable(file: Path) -> None:
    """OutputError if the result could not be written after hours of work."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--out: {file} cannot be written ({error}).") from None
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        why = "it is a folder" if file.is_dir() else "its folder cannot be written to"
        raise OutputError(f"--out: {file} cannot be written; {why}.")
