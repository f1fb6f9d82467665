"""The page of what a verb made, from its records."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.checkpoints.publishing import real_target
from sigmerge.errors import OutputError
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import whole
from sigmerge.files.yaml_documents import decoded
from sigmerge.jobs.tune import TUNING_FOLDER, TUNING_RESULT
from sigmerge.jobs.work_folder import WorkFolder, are_recorded
from sigmerge.pages.page import PageRun, write_page
from sigmerge.records import (
    PAGE,
    PLAN,
    PROVENANCE,
    RECIPE,
    Provenance,
    RunRecord,
    TuneRecord,
    read,
    read_plan,
    read_sealed,
)

RUN, CALIBRATION_SCORES, EVALUATION_SCORES = "run.json", "calibration.json", "evaluation.json"
RUN_FOLDER = WorkFolder(
    "run", (CALIBRATION_SCORES, EVALUATION_SCORES, PAGE, RUN), ("anchor", "repaired"), last=RUN
)
OUTPUTS = (
    CALIBRATION_SCORES,
    EVALUATION_SCORES,
    PAGE,
    *(f"{part}/{RECORDS_FOLDER}/{PROVENANCE}" for part in ("anchor", "repaired")),
)
"""Files whose digests the record of a run holds."""
_Run = TypeVar("_Run", bound=RunRecord)


def page_of(folder: Path, record: RunRecord | None = None) -> PageRun:
    """A run as the page shows it; its record is read from the folder unless it is given."""
    if record is None:
        record = read_sealed(RunRecord, folder / RUN, OutputError)
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
        f"sigmerge run {_recorded(record.repaired)} again/",
    )


def _recorded(folder: str) -> str:
    """The recipe of a result, for a shell. Its paths hold where the result was made."""
    return shlex.quote(f"{folder}/{RECORDS_FOLDER}/{RECIPE}")


def write_report(folder: Path) -> Path:
    """Write the page of what a verb made again, from its records: of a run, a tuning, a merge or a
    repair, or of all the runs in a folder, as the demo's."""
    for record, written in PAGES.items():
        if (folder / record).exists():
            return written(folder)
    if runs := sorted(file.parent for file in folder.glob(f"*/{RUN}")):
        return write_joint_report(runs, folder / PAGE, folder.resolve().name)
    raise OutputError(
        f"{folder}: has no records of a run, a tuning, a merge or a repair. `sigmerge analyze` "
        "writes the page of a suite's results."
    )


def _run_page(folder: Path) -> Path:
    """The anchor of the run may be gone."""
    read_sealed(RunRecord, folder / RUN, OutputError)  # there is a run, before it is locked
    with RUN_FOLDER.writing(real_target(folder)):
        record = read_sealed(RunRecord, folder / RUN, OutputError)
        wrong = (name for name in changed_files(folder, record) if name != PAGE)
        if changed := [name for name in wrong if (folder / name).exists()]:
            raise OutputError(
                f"{folder}: {changed[0]} is not what the run wrote, so its page would be wrong; "
                "`sigmerge verify` lists what differs."
            )
        with _fitting(folder):
            finish_run(folder, record)
    return folder / PAGE


def _tuning_page(folder: Path) -> Path:
    from sigmerge.pages.tuning import write_tuning_page

    with TUNING_FOLDER.writing(real_target(folder)), _fitting(folder):
        record = read_sealed(TuneRecord, folder / TUNING_RESULT, OutputError)
        write_tuning_page(folder / PAGE, record)
    return folder / PAGE


def _merge_page(folder: Path) -> Path:
    """The page of a checkpoint lies among its records."""
    records = folder / RECORDS_FOLDER
    provenance = read(Provenance, records / PROVENANCE)
    recipe = decoded(records / RECIPE, "a recipe", OutputError)
    with _fitting(folder):
        plan = read_plan(records / PLAN)
        shown = PageRun(
            folder.resolve().name, recipe, plan, provenance, warnings=plan.warnings,
            again=f"sigmerge merge {_recorded(str(folder))} again/",
        )  # fmt: skip
        write_page(records / PAGE, [shown])
    return records / PAGE


def finish_run(folder: Path, record: _Run) -> _Run:
    """Write the page of a run, then its record with the digests of all other files.

    The page lies beside the repaired checkpoint's records, too. The checkpoint is published by
    then: a kill leaves an unfinished page beside it, never in it.
    """
    write_page(folder / PAGE, [page_of(folder, record)])
    with whole(folder / "repaired" / RECORDS_FOLDER / PAGE, place=folder) as partial:
        shutil.copyfile(folder / PAGE, partial)
    files = [folder / name for name in OUTPUTS if (folder / name).exists()]
    digests = {str(file.relative_to(folder)): each for file, each in file_digests(files).items()}
    outputs = {**record.outputs, **digests}  # of a file that is gone, what it was
    record = record.model_copy(update={"outputs": dict(sorted(outputs.items()))})
    record.write(folder / RUN)
    return record


def changed_files(folder: Path, record: RunRecord) -> list[str]:
    """Files of a run that were changed after it wrote them."""
    return [
        name
        for name, digest in record.outputs.items()
        if not are_recorded(folder, {name: digest}, threads=1)
    ]


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


PAGES = {
    RUN: _run_page,
    TUNING_RESULT: _tuning_page,
    f"{RECORDS_FOLDER}/{PLAN}": _merge_page,
}
"""The writer of a page, by the record that identifies the folder."""
