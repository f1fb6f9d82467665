"""`sigmerge evaluate`: score a checkpoint on a suite, item by item, resumably."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sigmerge.errors import OutputError
from sigmerge.evaluation.run import How
from sigmerge.evaluation.run import evaluate as run
from sigmerge.evaluation.sources import Data
from sigmerge.files.documents import write_json


def evaluate(
    checkpoint: Path | str,
    suite: str = "mergebench",
    split: str = "calibration",
    *,
    data: Path | None = None,
    hub: bool = False,
    out: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    announce: Callable[[Mapping[str, Any]], None] = lambda estimate: None,
    **how: Any,
) -> dict[str, Any]:
    """Scores of a checkpoint; the keywords are those of `sigmerge.evaluation.run.How`."""
    options = How(data=Data.default(data, hub), progress=progress, announce=announce, **how)
    if out is not None:
        _require_writable(out)
    result = run(Path(checkpoint), suite, split, options).as_json()
    if out is not None:
        write_json(out, result)
    return result


def _require_writable(file: Path) -> None:
    """Before hours of work, whether its result can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--out: {file} cannot be written ({error}).") from None
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        why = "it is a folder" if file.is_dir() else "its folder cannot be written to"
        raise OutputError(f"--out: {file} cannot be written; {why}.")
