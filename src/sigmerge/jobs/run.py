"""`sigmerge run`: merge, score, profile, repair, score again, report. Each step leaves a file.

    OUT/anchor/           the dense merge
    OUT/repaired/         the repaired merge, with its plan
    OUT/calibration.json  scores the repair was allowed to see
    OUT/evaluation.json   scores on the disjoint items
    OUT/report.html       the page
    OUT/run.json          the record of the run, with the digests of the others; written last

Interrupted, the same command goes on from the last finished step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sigmerge.engine.machine import Meter
from sigmerge.errors import RecipeError
from sigmerge.files.documents import write_json
from sigmerge.jobs.anchor import is_current, make_anchor
from sigmerge.jobs.merge import anchor_and_repair
from sigmerge.jobs.options import Options
from sigmerge.jobs.repair import RepairJob, check_data, check_repair
from sigmerge.jobs.report import CALIBRATION_SCORES, EVALUATION_SCORES, RUN_FOLDER, finish_run
from sigmerge.jobs.scores import ScoreFunction, describe_scoring, paired_scores, scorer_of
from sigmerge.jobs.steps import Description, Step
from sigmerge.pages.html import require_page
from sigmerge.recipe import Recipe
from sigmerge.records import GuardVerdict, PairedScores
from sigmerge.results import RunResult


@dataclass(frozen=True)
class RunJob:
    """The whole pipeline for one recipe, in a folder of its own."""

    recipe: Recipe
    out: Path
    options: Options
    score: ScoreFunction | None = None

    def check(self) -> None:
        if self.recipe.repair is None:
            raise RecipeError(
                "The recipe has no repair: section; `sigmerge merge` makes plain merges."
            )
        if self.recipe.repair.decided:
            raise RecipeError(
                "The recipe's repair: section gives shares and capacity, and no scores; "
                "`sigmerge merge` makes it."
            )
        check_repair(self.recipe, self.options, self.score)
        check_data(self.recipe, self.options, self.score)
        require_page()
        RUN_FOLDER.check(self.out, self.options.overwrite, self.recipe.kept)

    def describe(self) -> Description:
        self.check()
        recipe, options = self.recipe, self.options
        steps: tuple[Step, ...] = anchor_and_repair(recipe, options, self.score)
        scorer = None if self.score else scorer_of(recipe, options, "evaluation")
        if scorer is not None:
            count = len(recipe.experts) + 2
            steps += (describe_scoring(recipe, scorer, count, "evaluation", options),)
        return Description(steps, options.threads)

    def run(self) -> RunResult:
        meter = Meter()
        self.check()
        recipe, out, options = self.recipe, self.out, replace(self.options, overwrite=True)
        with RUN_FOLDER.writing(out):
            if (out / RUN_FOLDER.last).exists():
                RUN_FOLDER.clear(out)
            anchor, repaired = self._anchor(options), out / "repaired"
            own = recipe.operator is not None
            made = RepairJob(recipe, repaired, options, anchor, self.score, made=own).repair()
            plan, verdict = made.repair, made.repair.guard or GuardVerdict(verdict="off")
            assert plan.scores is not None
            calibration = PairedScores(
                experts=plan.scores.experts,
                anchor=plan.scores.anchor,
                repaired=verdict.scores,
                missing=plan.scores.missing,
                noise=plan.scores.noise,
            )
            write_json(out / CALIBRATION_SCORES, calibration.as_json())
            (out / EVALUATION_SCORES).unlink(missing_ok=True)  # of a killed run of another recipe
            evaluation = self._evaluation(anchor, repaired)
            if evaluation is not None:
                write_json(out / EVALUATION_SCORES, evaluation.as_json())
            record = RunResult(
                out=str(out.absolute()),
                operator=recipe.method,
                title=_title(recipe),
                anchor=str(anchor),
                repaired=str(repaired.absolute()),
                calibration=calibration,
                evaluation=evaluation,
                deficit=plan.deficit,
                share=plan.share,
                guard=verdict,
                warnings=plan.warnings,
                wall_seconds=meter.wall_seconds,
            )
            return finish_run(out, record)

    def _anchor(self, options: Options) -> Path:
        """The stored anchor: made now, or by an earlier, interrupted run of this recipe."""
        if self.recipe.operator is None:
            assert self.recipe.anchor is not None
            return self.recipe.anchor
        anchor = (self.out / "anchor").absolute()
        if not anchor.exists() or not is_current(self.recipe, anchor, options):
            make_anchor(self.recipe, anchor, options, self.score)
        return anchor

    def _evaluation(self, anchor: Path, repaired: Path) -> PairedScores | None:
        """Scores on the evaluation split, which no earlier step has seen."""
        scorer = None if self.score else scorer_of(self.recipe, self.options, "evaluation")
        if scorer is None:
            return None
        return paired_scores(self.recipe, anchor, repaired, scorer, self.options)


def _title(recipe: Recipe) -> str:
    title = recipe.operator.title if recipe.operator else "Checkpoint"
    return f"MERGE³ over {title}" if recipe.search is not None else title
