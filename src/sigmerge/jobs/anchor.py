"""The anchor of a repair: given, merged or searched. How it is made, and whether it is current."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.errors import SigmergeError
from sigmerge.jobs.dense import DenseJob, plan_dense, run_dense
from sigmerge.jobs.options import Options
from sigmerge.jobs.steps import Step
from sigmerge.jobs.work_folder import are_recorded
from sigmerge.recipe import Recipe
from sigmerge.records import PROVENANCE, Provenance, read
from sigmerge.results import Merged

if TYPE_CHECKING:
    from sigmerge.jobs.scores import ScoreFunction

# Searches and guided merges are imported where one is made: most merges need none.


def make_anchor(
    recipe: Recipe, out: Path, options: Options, score: ScoreFunction | None = None
) -> Merged:
    """The dense merge of a recipe; with search: or guide: its coefficients are found first."""
    if recipe.guide is not None:
        from sigmerge.jobs.guide import GuideJob

        return GuideJob(recipe, options, score).run(out)
    if recipe.search is not None:
        from sigmerge.jobs.search import search_merge

        return search_merge(recipe, out, options)
    return run_dense(plan_dense(recipe, options), out, options)


def describe_anchor(recipe: Recipe, options: Options) -> Step:
    """Making the anchor as a step of a dry run."""
    if recipe.guide is not None:
        from sigmerge.jobs.guide import GuideJob

        return GuideJob(recipe, options).describe()
    if recipe.search is not None:
        from sigmerge.jobs.search import plan_search

        return plan_search(recipe, options).describe(options)
    return plan_dense(recipe, options).describe(options.threads)


def is_current(recipe: Recipe, anchor: Path, options: Options) -> bool:
    """True if a stored anchor is what this recipe would make now, from the same files.

    False for an anchor whose coefficients are searched: the search runs again on cached scores.
    """
    if recipe.search is not None or recipe.guide is not None:
        return False
    try:
        provenance = read(Provenance, anchor / RECORDS_FOLDER / PROVENANCE)
    except SigmergeError:
        return False
    job = plan_dense(recipe, options)
    return provenance.job == job.fingerprint() and _as_written(job, anchor, provenance, options)


def _as_written(job: DenseJob, anchor: Path, provenance: Provenance, options: Options) -> bool:
    """True if weights, configuration and tokenizer exist and have their recorded digests."""
    written = {
        name: digest
        for name, digest in provenance.outputs.items()
        if not name.startswith(f"{RECORDS_FOLDER}/")
    }
    whole = written.keys() >= set(job.layout.files)
    return whole and are_recorded(anchor, written, options.threads)
