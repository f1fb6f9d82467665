"""`sigmerge aggregate`: results of several checkpoints side by side, with their residual gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sigmerge.errors import ScoreError
from sigmerge.files.checksums import is_intact
from sigmerge.files.documents import read_json_object
from sigmerge.method.deficit import DomainScores, residual_gaps
from sigmerge.results import Aggregated, AggregatedRow


def aggregate(files: Sequence[Path], experts: Mapping[str, Path] | None = None) -> Aggregated:
    """Domain scores, macro score and submetrics of every result file of `sigmerge evaluate`.

    With `experts`, {domain: file}, also what each checkpoint lacks to the strongest of them. All
    of them must have been measured on the same items, by the same judges.
    """
    results = {file: _read(file) for file in [*files, *(experts or {}).values()]}
    _comparable(results)
    rows = {name: results[file]["domains"] for name, file in (experts or {}).items()}
    return Aggregated(rows=tuple(_row(file, results[file], rows) for file in files), experts=rows)


def _row(
    file: Path, result: Mapping[str, Any], experts: Mapping[str, DomainScores]
) -> AggregatedRow:
    kept = ("checkpoint", "suite", "split", "limit", "judges", "domains", "macro")
    return AggregatedRow(
        file=str(file),
        **{key: result[key] for key in kept},
        submetrics={
            f"{name}.{metric}": value
            for name, metrics in result["benchmarks"].items()
            for metric, value in metrics.items()
        },
        residual_gaps=residual_gaps(experts, result["domains"]),
    )


COMPARED_KEYS = (
    "suite", "split", "limit", "judges", "items", "items_sha256", "settings_sha256",
)  # fmt: skip
"""What results must share to be compared; the last says how items are scored."""
SCORE_KEYS = {"checkpoint": str, "macro": float, "domains": dict, "benchmarks": dict}
"""What is read of a result besides."""


def _comparable(results: Mapping[Path, Mapping[str, Any]]) -> None:
    first, *others = results
    problems = [
        f"{file}: its {key} {results[file].get(key)!r}, of {first} {results[first].get(key)!r}"
        for file in others
        for key in COMPARED_KEYS
        if results[file].get(key) != results[first].get(key)
    ]
    if problems:
        raise ScoreError("The results were measured on different items or differently:", problems)


def _read(file: Path) -> dict[str, Any]:
    content = read_json_object(
        file, "a result of `sigmerge evaluate --out`", ScoreError, unique=True
    )
    if not is_intact(content):
        raise ScoreError(
            f"{file}: is damaged; it is not what `sigmerge evaluate` wrote. Evaluate again; what "
            "was scored is not scored twice."
        )
    lacking = [key for key in COMPARED_KEYS if key not in content]
    lacking += [key for key, kind in SCORE_KEYS.items() if not isinstance(content.get(key), kind)]
    if lacking:
        raise ScoreError(
            f"{file}: is no whole result of `sigmerge evaluate --out`; it lacks "
            f"{', '.join(lacking)}. Evaluate again; what was scored is not scored twice."
        )
    return content
