"""`sigmerge demo`: the embedded pool, every anchor with and without repair, one page; and tuned."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.errors import OutputError, SigmergeError, require
from sigmerge.jobs.options import Options
from sigmerge.jobs.report import RUN, RUN_FOLDER, write_joint_report
from sigmerge.jobs.run import RunJob
from sigmerge.jobs.steps import Description
from sigmerge.jobs.tune import TUNING_RESULT, TuneJob, pool_recipe
from sigmerge.nano.files import POOL, RECIPES
from sigmerge.pages.paired import paired_row
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.scored import TuneSection
from sigmerge.records import PAGE, RECIPE, RunRecord, TuneRecord, read_sealed
from sigmerge.results import DemoResult, PairedLine, TunedLine

DEMO_ANCHORS = (
    "linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "fisher", "regmean",
)  # fmt: skip
"""The paper's seven."""
DEMO_CALLS = 8
TUNED = "tuned"
"""The folder of the tuning."""


@dataclass(frozen=True)
class DemoJob:
    """The shipped recipes, one run each, and a page about all of them; then the pool is tuned.

    `calls` is the number of evaluation calls of the tuning; 0 leaves it out.
    """

    out: Path
    options: Options
    calls: int = DEMO_CALLS

    def check(self) -> None:
        """Raise for foreign files, a finished demo without overwrite, or wrong tuning settings."""
        require("The demo", demo=["torch", "transformers", "jinja2"])
        folder, overwrite = self.out, self.options.overwrite
        names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
        foreign = names - {PAGE, TUNED, *DEMO_ANCHORS}
        if shown := sorted(name for name in foreign if not name.startswith(".")):
            raise OutputError(
                f"{folder}: holds {shown[0]}, which no demo wrote; choose a new folder."
            )
        if (folder / PAGE).exists():
            if not overwrite:
                raise OutputError(
                    f"{folder}: holds a finished demo; pass --overwrite to run it again."
                )
            for name in DEMO_ANCHORS:  # every run's folder is checked before the first is cleared
                RUN_FOLDER.check(folder / name, overwrite, ())
        if self.calls and self._tuned() is None:
            self._tuning.check()

    def describe(self) -> Description:
        """The steps of every run that an interrupted demo has not finished."""
        self.check()
        found = [self._job(name).describe() for name in DEMO_ANCHORS if self._kept(name) is None]
        if self.calls and self._tuned() is None:
            found.append(self._tuning.describe())
        steps = tuple(step for each in found for step in each.steps)
        return Description(steps, self.options.threads)

    def run(self) -> DemoResult:
        self.check()
        (self.out / PAGE).unlink(missing_ok=True)
        records = [self._record(name) for name in DEMO_ANCHORS]
        tuned = self._tuned() or self._tuning.run() if self.calls else None
        folders = [self.out / name for name in DEMO_ANCHORS]
        title = "The embedded pool, anchor by anchor"
        page = write_joint_report(folders, self.out / PAGE, title)
        return DemoResult(
            rows=tuple(map(_line, records)),
            tuned=None if tuned is None else _tuned_line(tuned),
            page=str(page.absolute()),
            out=str(self.out.absolute()),
        )

    def _record(self, name: str) -> RunRecord:
        """Run a shipped recipe, unless an interrupted demo finished it."""
        return self._kept(name) or self._job(name).run()

    def _kept(self, name: str) -> RunRecord | None:
        return None if self.options.overwrite else _finished(self.out / name, _shipped(name))

    @cached_property
    def _tuning(self) -> TuneJob:
        settings = TuneSection(calls=self.calls)
        return TuneJob(pool_recipe(POOL), self.out / TUNED, self.options, settings)

    def _tuned(self) -> TuneRecord | None:
        """The tuning that an interrupted demo finished with as many calls."""
        file = self.out / TUNED / TUNING_RESULT
        if self.options.overwrite or not file.exists():
            return None
        record = read_sealed(TuneRecord, file, OutputError)
        return record if record.settings == self._tuning.section.model_dump() else None

    def _job(self, name: str) -> RunJob:
        return RunJob(_shipped(name), self.out / name, self.options)


def _shipped(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml")


def _finished(folder: Path, recipe: Recipe) -> RunRecord | None:
    """The record of a finished run of this recipe in the folder, or None."""
    try:
        record = read_sealed(RunRecord, folder / RUN, OutputError)
        text = (folder / "repaired" / RECORDS_FOLDER / RECIPE).read_text(encoding="utf-8")
    except (OSError, SigmergeError):
        return None
    return record if text == recipe.text else None


def _line(record: RunRecord) -> PairedLine:
    assert record.evaluation is not None
    row = paired_row(record.title, record.evaluation)
    return PairedLine(
        name=row.name,
        domains=row.domains,
        anchor=row.anchor,
        repaired=row.repaired,
        gain=row.gain,
        gap_before=row.gap_before,
        gap_after=row.gap_after,
    )


def _tuned_line(record: TuneRecord) -> TunedLine:
    assert record.evaluation is not None
    return TunedLine(
        calls=len(record.calls),
        tuned=fmean(record.evaluation.tuned.values()),
        plain=fmean(record.evaluation.plain.values()),
        page=str(Path(record.out) / PAGE),
    )
