"""The page of finished runs, from their records."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from sigmerge.analysis.page import PageRun, write_page
from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.errors import OutputError
from sigmerge.files.documents import whole
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
        (records / RECIPE).read_text(encoding="utf-8"),
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
    write_page(page, [page_of(folder, record)])
    with whole(folder / "repaired" / RECORDS_FOLDER / PAGE, place=folder) as partial:
        shutil.copyfile(page, partial)
    return page


def write_joint_report(folders: Sequence[Path], page: Path, title: str) -> Path:
    """Write one page about several runs."""
    write_page(page, [page_of(folder) for folder in folders], title=title)
    return page
