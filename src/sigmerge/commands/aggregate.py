"""`sigmerge aggregate`: results of several checkpoints side by side, with their residual gaps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sigmerge.errors import ScoreError
from sigmerge.evaluation.aggregate import residual_gaps


def aggregate(files: Sequence[Path], experts: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """Domain scores, macro score and submetrics of every result file of `sigmerge evaluate`.

    With `experts`, {domain: file}, also what each checkpoint lacks to the strongest of them.
    """
    expert_rows = {name: _read(file)["domains"] for name, file in (experts or {}).items()}
    rows = []
    for file in files:
        result = _read(file)
        row = {key: result[key] for key in ("checkpoint", "suite", "split", "limit", "judges")}
        row |= {"file": str(file), "domains": result["domains"], "macro": result["macro"]}
        row["submetrics"] = {
            f"{name}.{metric}": value
            for name, metrics in result["benchmarks"].items()
            for metric, value in metrics.items()
        }
        if expert_rows:
            row["residual_gaps"] = residual_gaps(expert_rows, result["domains"])
        rows.append(row)
    measured = {(row["suite"], row["split"], row["limit"]) for row in rows}
    if len(measured) > 1:
        listed = [f"{row['file']}: {row['suite']}, {row['split']}, {row['limit']}" for row in rows]
        raise ScoreError("The results were measured on different items:", listed)
    return {"rows": rows, "experts": expert_rows}


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScoreError(f"{file}: no such result file.") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not {"domains", "benchmarks", "macro", "suite"} <= set(
        content
    ):
        raise ScoreError(f"{file}: is no result of `sigmerge evaluate --out`.")
    return content
