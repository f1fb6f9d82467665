"""`sigmerge merge`: the merge of a recipe, repaired where the recipe says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.checkpoints.publishing import check_space, check_target, real_target
from sigmerge.checkpoints.remote import target_url
from sigmerge.errors import RecipeError, SigmergeError
from sigmerge.files.safe_open import remove
from sigmerge.jobs.anchor import describe_anchor, is_current, make_anchor
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_anchor, open_repair_pool
from sigmerge.jobs.steps import Description, Step
from sigmerge.jobs.work_folder import alone, hidden, remove_anchor
from sigmerge.recipe import Recipe
from sigmerge.records import RECIPE
from sigmerge.results import Merged

if TYPE_CHECKING:
    from sigmerge.jobs.scores import ScoreFunction


@dataclass(frozen=True)
class MergeJob:
    """A merge into a new folder. An anchor that is repaired lies beside it while it is needed."""

    recipe: Recipe
    out: Path
    options: Options
    score: ScoreFunction | None = None

    def check(self) -> None:
        kept = [place for place in self.recipe.kept if place != self._own_recipe]
        check_target(self.out, self.options.overwrite, kept)
        found_first = self.recipe.guide is not None or self.recipe.search is not None
        if found_first and self.recipe.repair is None and (url := target_url(self.out)):
            raise RecipeError(f"{url}: a merge whose weights are found first goes into a local "
                              "folder.")  # fmt: skip
        check_scores(self.recipe, self.options, self.score)

    @property
    def _own_recipe(self) -> Path | None:
        """Where the result has the recipe, as it was given: an older result may be made again by
        its own, since no text is lost."""
        recipe = self.recipe
        chosen = recipe.guide or recipe.search or (recipe.repair and recipe.repair.calibration)
        return None if chosen else real_target(self.out) / RECORDS_FOLDER / RECIPE

    def describe(self) -> Description:
        self.check()
        if self.recipe.adapter is not None:
            from sigmerge.jobs.adapter import plan_adapter

            planned = plan_adapter(self.recipe, self.options).describe(self.options.threads)
            check_space(self.out, planned.bytes_to_write)
            return Description((planned,), self.options.threads)
        steps = anchor_and_repair(self.recipe, self.options, self.score)
        check_space(self.out, sum(step.bytes_to_write for step in steps))
        return Description(steps, self.options.threads)

    def run(self) -> Merged:
        self.check()
        recipe, options = self.recipe, self.options
        if recipe.adapter is not None:
            from sigmerge.jobs.adapter import plan_adapter, run_adapter

            return run_adapter(plan_adapter(recipe, options), self.out, options)
        if recipe.repair is None:
            made = make_anchor(recipe, self.out, options, self.score)
            remove_anchor(self.out)
            return made
        with alone(self.out, options.overwrite):
            return self._repaired(hidden(self.out, "anchor"))

    def _repaired(self, anchor: Path) -> Merged:
        """The repair of the recipe's own merge, which is removed then, or of a stored one."""
        from sigmerge.jobs.repair import RepairJob

        recipe, options = self.recipe, self.options
        if recipe.operator is None:
            return RepairJob(recipe, self.out, options, score=self.score).repair()
        if not is_current(recipe, anchor, options):
            remove(anchor)
            make_anchor(recipe, anchor, options, self.score)
        try:
            job = RepairJob(recipe, self.out, options, anchor, self.score, kept=False, made=True)
            result = job.repair()
        except SigmergeError as error:
            error.args = (
                f"{error}\nThe merge itself is done; the same command continues from it "
                f"({anchor}).",
            )
            raise
        remove(anchor, if_possible=True)
        return result


def check_scores(recipe: Recipe, options: Options, score: ScoreFunction | None = None) -> None:
    """Find problems of the scores and the data that a merge needs before it is made."""
    if recipe.guide is not None:
        from sigmerge.jobs.guide import GuideJob

        GuideJob(recipe, options, score).check()
    if recipe.repair is not None:
        from sigmerge.jobs.repair import check_data, check_repair

        check_repair(recipe, options, score)
        check_data(recipe, options, score)


def anchor_and_repair(
    recipe: Recipe, options: Options, score: ScoreFunction | None = None
) -> tuple[Step, ...]:
    """The steps from a recipe to its merge, and to its repair where it has one."""
    steps: tuple[Step, ...] = ()
    if recipe.operator is not None or recipe.repair is None:
        steps = (describe_anchor(recipe, options),)
    if recipe.repair is not None:
        from sigmerge.jobs.repair import repair_steps

        pool = open_repair_pool(recipe, options)
        if recipe.operator is None and recipe.anchor is not None:
            open_anchor(recipe.anchor, pool, options, any_architecture=recipe.any_architecture)
        steps += repair_steps(recipe, pool, options, score)
    return steps
