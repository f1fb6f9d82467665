"""The page of finished runs, from their records."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from sigmerge.analysis.page import PageRun, write_page
from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.errors import OutputError
from sigmerge.files.documents import whole
from sigmerge.files.yaml_documents import decoded
from sigmerge.records import (
    PAGE,
    PLAN,
    PROVENANCE,
    RECIPE,
    Provenance,
    RunRecord,
    read,
    read_plan,
)

RUN = "run.json"


def page_of(folder: Path, record: RunRecord | None = None) -> PageRun:
    """A run as the page shows it; its record is read from the folder unless it is given."""
    if record is None:
        record = read(RunRecord, folder / RUN, OutputError)
    records = folder / "repaired" / RECORDS_FOLDER
    return PageRun(
        record.title,
        decoded(records / RECIPE, "a recipe", OutputError),
        read_plan(records / PLAN),
        read(Provenance, records / PROVENANCE),
        record.evaluation,
        record.calibration,
        record.warnings,
        record.wall_seconds,
    )


def write_report(folder: Path, record: RunRecord | None = None) -> Path:
    """Write the page of one run into its folder, and beside the repaired checkpoint's records.

    The checkpoint is published by then: a kill leaves an unfinished page beside it, never in it.
    """
    page = folder / PAGE
    with nullcontext() if record else _fitting(folder):
        write_page(page, [page_of(folder, record)])
    with whole(folder / "repaired" / RECORDS_FOLDER / PAGE, place=folder) as partial:
        shutil.copyfile(page, partial)
    return page


@contextmanager
def _fitting(folder: Path) -> Iterator[None]:
    """In this context records that were read, each right by itself, may not fit together."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as problem:
        told = f"{type(problem).__name__}: {problem}"
        raise OutputError(f"{folder}: its records do not fit together ({told}).") from problem


def write_joint_report(folders: Sequence[Path], page: Path, title: str) -> Path:
    """Write one page about several runs."""
    write_page(page, [page_of(folder) for folder in folders], title=title)
    return page
