"""`sigmerge evaluate`: score a checkpoint on a suite, item by item, resumably."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sigmerge.evaluation.run import How
from sigmerge.evaluation.run import evaluate as run
from sigmerge.evaluation.sources import Data


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
    result = run(Path(checkpoint), suite, split, options)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result
