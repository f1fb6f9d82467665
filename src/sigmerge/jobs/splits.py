"""`sigmerge splits`: fix which records calibrate and which evaluate, and check that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigmerge.errors import OutputError, ScoreError
from sigmerge.evaluation import splits
from sigmerge.evaluation.sources import Data, NoSource
from sigmerge.evaluation.suite import load_suite
from sigmerge.messages import unknown


def build(
    suite: str,
    file: Path,
    *,
    data: Path | None = None,
    hub: bool = False,
    seed: int | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the split file of a suite for the benchmarks whose records are here, or `only` some.

    A `seed` divides all records anew, to see how much depends on the division. No other file, and
    no other division, is replaced: scores may rest on it.
    """
    loaded = load_suite(suite)
    for name in only:
        if name not in loaded.benchmarks:
            raise ScoreError(f"{loaded.name}: {unknown('benchmark', name, loaded.benchmarks)}")
    items, absent = splits.load_available(loaded, Data.default(data, hub))
    if only:
        if missing := [reason for name, reason in absent.items() if name in only]:
            raise ScoreError(
                f"{file}: not all of these benchmarks have their records here:", missing
            )
        items, absent = {name: each for name, each in items.items() if name in only}, {}
    content = splits.build(loaded, items, seed, only)
    if not file.exists():
        splits.write(content, file)
    elif splits.read(file) != content:
        raise OutputError(f"{file}: holds another division; remove it, or choose a new file.")
    return {"file": str(file), "absent": absent, **summary(content)}


def verify(
    suite: str, file: Path, *, data: Path | None = None, hub: bool = False
) -> dict[str, Any]:
    """Check counts, disjointness, sums and source data; ScoreError says what does not hold."""
    content, loaded, source = splits.read(file), load_suite(suite), Data.default(data, hub)
    problems = splits.verify(content, loaded, source)
    asked = content.get("only") or list(loaded.benchmarks)
    left_out = [name for name in asked if name not in content["benchmarks"]]
    absent = {}
    for name in left_out:
        try:
            loaded.benchmarks[name].load(name, source, loaded.folder)
            problems.append(f"{name}: is missing, though its records are here; build a new file")
        except NoSource as error:
            absent[name] = str(error)
    if problems:
        raise ScoreError(f"{file}: the splits do not hold:", problems)
    return {"file": str(file), "absent": absent, **summary(content)}


def summary(content: dict[str, Any]) -> dict[str, Any]:
    """The counts of a split file, without its ids."""
    keys = ("calibration", "evaluation", "drawn")
    rows = {
        name: {"domain": mark["domain"], "records": mark["records"], "complete": mark["complete"]}
        | {key: len(mark[key]) for key in keys}
        for name, mark in content["benchmarks"].items()
    }
    totals = content["totals"]
    return {"benchmarks": rows, "totals": totals, "sha256": content["sha256"]}
