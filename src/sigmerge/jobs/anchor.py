"""The anchor of a repair: given, merged or searched. How it is made, and whether it is current."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sigmerge.checkpoints.companions import chat_template_of
from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.errors import SigmergeError
from sigmerge.files.digests import file_digests
from sigmerge.files.journal import continues
from sigmerge.files.objects import address
from sigmerge.jobs.dense import DenseJob, plan_dense, run_dense
from sigmerge.jobs.options import Options, Step
from sigmerge.jobs.pools import PoolInputs, other_inputs
from sigmerge.jobs.work_folder import are_recorded
from sigmerge.recipe import Recipe
from sigmerge.records import (
    PLAN,
    PROVENANCE,
    RECIPE,
    Plan,
    Provenance,
    read,
    read_plan,
)
from sigmerge.results import Merged

if TYPE_CHECKING:
    from sigmerge.jobs.scores import ScoreFunction

# Searches, guided merges and captures are imported where one is made: most merges need none.


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


def is_current(
    recipe: Recipe, anchor: Path, options: Options, score: ScoreFunction | None = None
) -> bool:
    """Whether a stored anchor is what this recipe would make now, from the same files."""
    records = anchor / RECORDS_FOLDER
    try:
        plan = read_plan(records / PLAN)
        provenance = read(Provenance, records / PROVENANCE)
        same_text = (records / _given(recipe)).read_text(encoding="utf-8") == recipe.text
    except (OSError, SigmergeError):
        return False
    job = plan_dense(replace(recipe, search=None), options)
    return (
        same_text
        and (recipe.search is not None or plan.seed == recipe.seed)
        and plan.revision == job.operator.revision
        and _same_files(job, anchor, provenance, options)
        and recipe.chat_template in (None, chat_template_of(anchor))
        and _same_search(recipe, anchor, options)
        and _same_guide(recipe, anchor, options, score)
        and _same_statistics(job, plan, options)
        and _same_inputs(job, provenance)
    )


def _given(recipe: Recipe) -> str:
    """The file of the recipe as it was given; a search or guide also keeps the one it ended in."""
    if recipe.search is not None:
        from sigmerge.jobs.search import ORIGIN

        return ORIGIN
    if recipe.guide is not None:
        from sigmerge.jobs.guide import GUIDE_ORIGIN

        return GUIDE_ORIGIN
    return RECIPE


def _same_files(job: DenseJob, anchor: Path, provenance: Provenance, options: Options) -> bool:
    """Whether weights, configuration and tokenizer are there, as they were written."""
    written = {
        name: digest
        for name, digest in provenance.outputs.items()
        if not name.startswith(f"{RECORDS_FOLDER}/")
    }
    whole = written.keys() >= set(job.layout.files)
    return whole and are_recorded(anchor, written, options.threads)


def _same_search(recipe: Recipe, anchor: Path, options: Options) -> bool:
    """Whether the anchor's own journal was begun as this recipe's would be."""
    if recipe.search is None:
        return True
    from sigmerge.jobs.search import SEARCH_JOURNAL, plan_search

    return continues(
        anchor / RECORDS_FOLDER / SEARCH_JOURNAL, plan_search(recipe, options).header()
    )


def _same_guide(
    recipe: Recipe, anchor: Path, options: Options, score: ScoreFunction | None
) -> bool:
    """The same of a guided merge; two callables cannot be compared."""
    if recipe.guide is None:
        return True
    from sigmerge.jobs.guide import GUIDE_JOURNAL, GuideJob

    job = GuideJob(recipe, options, score)
    header = job.header(job.measure(anchor.parent))
    return continues(anchor / RECORDS_FOLDER / GUIDE_JOURNAL, header)


def _same_statistics(job: DenseJob, plan: Plan, options: Options) -> bool:
    if not job.operator.needs:
        return True
    from sigmerge.jobs import capture

    captures = capture.plan_captures(job.recipe, job.pool, options)
    places = capture.folders(captures, job.recipe, job.pool, options)
    names = {expert: place.name for expert, place in places.items()}
    return (plan.capture or {}).get("statistics") == names


def _same_inputs(job: DenseJob, provenance: Provenance) -> bool:
    """Whether the inputs are the files that were read, byte for byte."""
    before = {entry.file: entry.sha256 for entry in provenance.inputs}
    others = other_inputs(job.recipe, bool(job.operator.needs))
    now = PoolInputs.of(job.pool.members, others).members
    if before.keys() != {address(file) for file in now}:
        return False
    digests = file_digests(now)
    return before == {address(file): digest for file, digest in digests.items()}
