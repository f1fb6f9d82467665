"""Commands that merge, repair and search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from sigmerge.cli import show
from sigmerge.cli.app import examples
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import (
    MERGED,
    PLACED,
    PUSHED,
    READ,
    WORKING,
    WRITTEN,
    AnchorFolder,
    Flags,
    OutFolder,
    RecipeFile,
    command,
    recipe_file,
)

if TYPE_CHECKING:
    from sigmerge.jobs.options import Options

RECIPE_EXAMPLE = """
\b
A recipe:
  merge_method: ties
  base_model: ./reference
  models:
    - {model: ./math,   name: math,   parameters: {weight: 1.0, density: 0.2}}
    - {model: ./coding, name: coding, parameters: {weight: 1.0, density: 0.2}}
  dtype: bfloat16
"""


@command(
    *MERGED, *PUSHED,
    epilog=examples(
        "sigmerge merge recipe.yaml merged/ --dry-run", "sigmerge merge recipe.yaml merged/",
        "sigmerge merge recipe.yaml merged/ --push user/merged --private",
    )
    + RECIPE_EXAMPLE,
)  # fmt: skip
def merge(recipe: RecipeFile, out: OutFolder, flags: Flags) -> None:
    """Merge the checkpoints a recipe names into one new folder.

    A recipe with a repair: section is repaired too. Of a file with several recipes, each goes into
    a folder of its own in the new folder, under its name. Interrupted, the same command continues
    where it stopped and ends in the same bytes. Of models of the hub the headers are read first,
    then the weights that are needed are downloaded.
    """
    done = flags.run(_merging(recipe, out, flags), goes_on=True)
    if isinstance(done, tuple) and not flags.as_json:
        for one in done:
            flags.emit(one, show.merged_lines)
    else:
        flags.emit_made(done, show.merged_lines)


def _merging(recipe: Path, out: Path, flags: Flags) -> Callable[[Options], Any]:
    """The job of a file with one recipe or several, when it is known how it is done."""
    from sigmerge.engine.machine import load_numpy

    load_numpy()
    from sigmerge.checkpoints.remote import target
    from sigmerge.errors import RecipeError
    from sigmerge.jobs.merge import MergeJob
    from sigmerge.recipe.documents import several

    if not several(recipe):
        loaded, place = flags.load(recipe, weights=False), target(out)
        return flags.over_hub(loaded, lambda one, how: MergeJob(one, place, how), place)
    if flags.push:
        raise RecipeError(f"{recipe}: holds several recipes; --push uploads one result.")
    if flags.changes or flags.device:
        raise RecipeError(f"{recipe}: holds several recipes; a flag cannot change all of them.")
    from sigmerge.jobs.multi_recipe import SeveralJob

    return lambda how: SeveralJob(recipe, out, how, flags.seed, flags.strict)


@command(
    *READ, *PLACED, *WORKING,
    epilog=examples(
        "sigmerge capture recipe.yaml",
        "sigmerge capture recipe.yaml --expert math --out statistics/",
    ),
)  # fmt: skip
def capture(
    recipe: RecipeFile,
    flags: Flags,
    expert: Annotated[
        list[str] | None, Option("--expert", help="Only this expert; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, Option("--out", help="Folder for the statistics; else beside the pool.")
    ] = None,
) -> None:
    """Measure the statistics that the recipe's operator needs.

    Each expert reads its own exemplars.
    `merge` does this by itself; alone it can be split over machines. What is there already is not
    measured again. Statistics made elsewhere are used when they lie beside the pool, or in the
    folder that the recipe's capture: section names.
    """
    from sigmerge.jobs.capture import CaptureJob

    loaded = flags.load(recipe)
    done = flags.run(lambda how: CaptureJob(loaded, how, expert or (), out), goes_on=True)
    flags.emit(done, show.capture_lines)


@command(
    *READ, "allow_nonfinite", *PLACED, *WORKING, epilog=examples("sigmerge profile recipe.yaml")
)  # fmt: skip
def profile(recipe: RecipeFile, flags: Flags) -> None:
    """Measure how contested each layer is, and its capacity.

    Needs no anchor; computed once per pool and kept beside it.
    """
    from sigmerge.jobs.profile import ProfileJob
    from sigmerge.recipe import load_recipe

    done = flags.run(lambda how: ProfileJob(load_recipe(recipe), how))
    flags.emit(done, show.profile_lines)


@command(
    *READ, "strict", *WORKING, epilog=examples("sigmerge deficits recipe.yaml --anchor merged/")
)  # fmt: skip
def deficits(recipe: RecipeFile, flags: Flags, anchor: AnchorFolder = None) -> None:
    """Measure what an anchor lost per domain, and the shares."""
    from sigmerge.checkpoints.remote import place_of
    from sigmerge.jobs.repair import DeficitsJob

    stored = anchor and place_of(anchor)
    done = flags.run(lambda how: DeficitsJob(flags.load(recipe), how, stored))
    flags.emit(done, show.deficit_lines)


@command(
    *MERGED, *PUSHED,
    epilog=examples(
        "sigmerge repair recipe.yaml repaired/ --anchor merged/",
        "sigmerge repair --plan repaired/sigmerge/plan.json again/",
    ),
)  # fmt: skip
def repair(
    paths: Annotated[list[Path], Argument(help="RECIPE OUT, or OUT alone with --plan.")],
    flags: Flags,
    anchor: AnchorFolder = None,
    plan: Annotated[
        Path | None, Option("--plan", help="Make the repair of this plan.json again.")
    ] = None,
) -> None:
    """Give a stored merge back what it took from each domain.

    The anchor is a checkpoint that any tool made from the recipe's pool.
    """
    from sigmerge.engine.machine import load_numpy

    load_numpy()
    from sigmerge.checkpoints.remote import place_of, target
    from sigmerge.jobs.repair import RepairJob
    from sigmerge.jobs.replay import ReplayJob

    if len(paths) != (1 if plan else 2):
        raise click.BadParameter("give OUT alone with --plan, otherwise RECIPE and OUT")
    if plan and (flags.changes or flags.seed is not None):
        raise click.BadParameter("a plan is made again as it is; leave the other options out")
    stored, out = anchor and place_of(anchor), target(paths[-1])

    if plan:
        if flags.push:
            raise click.BadParameter("--push is for a repair of a recipe; leave it out")
        replayed = flags.run(lambda how: ReplayJob(plan, out, how, stored), goes_on=True)
        flags.emit(replayed, show.merged_lines)
        return
    loaded = flags.load(recipe_file(paths[0]), weights=False)
    job_of = flags.over_hub(loaded, lambda one, how: RepairJob(one, out, how, stored), out)
    flags.emit_made(flags.run(job_of, goes_on=True), show.merged_lines)


@command(
    *MERGED, *PUSHED,
    epilog=examples(
        "sigmerge run recipe.yaml run/", "sigmerge run recipe.yaml run/ --push user/repaired"
    ),
)  # fmt: skip
def run(recipe: RecipeFile, out: OutFolder, flags: Flags) -> None:
    """Merge, score, repair, score again, and write a report.

    The last scores are of items that no step before has seen, where the recipe can have them.
    """
    from sigmerge.jobs.run import RunJob

    loaded = flags.load(recipe, weights=False)
    made = out / "repaired"
    job_of = flags.over_hub(loaded, lambda one, how: RunJob(one, out, how), made)
    flags.emit_made(flags.run(job_of, goes_on=True), show.run_lines)


@command(
    *WRITTEN, "seed", "engine", "address", *WORKING,
    epilog=examples(
        "sigmerge search recipe.yaml found/",
        "sigmerge search recipe.yaml found/ --population 25 --generations 7",
    ),
)  # fmt: skip
def search(
    recipe: RecipeFile,
    out: OutFolder,
    flags: Flags,
    population: Annotated[int | None, Option(help="Candidates per generation; default 24.")] = None,
    generations: Annotated[
        int | None, Option(help="Generations, the first included; default: calls/population.")
    ] = None,
    calls: Annotated[int | None, Option(help="Evaluation calls in all; default 240.")] = None,
    items: Annotated[
        int | None, Option(help="Items a candidate answers per benchmark; default 20.")
    ] = None,
    estimator: Annotated[
        Literal["mean", "p-irt", "gp-irt", "mp-irt", "gmp-irt"] | None,
        Option(help="What scores are estimated by; default gmp-irt."),
    ] = None,
    extraction: Annotated[
        Literal["uniform", "clusters"] | None,
        Option(help="How the items are drawn; default uniform."),
    ] = None,
    suite: Annotated[
        str | None, Option(help="nano, a suite's YAML file, or a pool's folder.")
    ] = None,
) -> None:
    """Search a merge's coefficients by evolution (MERGE³).

    Searches linear, task_arithmetic, ties or dare_ties, as the recipe says; options go before its
    search: section. Interrupted, the same command replays what was evaluated and goes on.
    """
    from sigmerge.jobs.search import SearchRun
    from sigmerge.recipe.scored import SearchSection

    loaded = flags.load(recipe)
    settings = (loaded.search or SearchSection()).changed(
        population=population, generations=generations, calls=calls, items=items,
        estimator=estimator, extraction=extraction,
    )  # fmt: skip
    done = flags.run(lambda how: SearchRun(loaded, out, how, settings, suite), goes_on=True)
    flags.emit(done, show.search_lines)


@command("overwrite", "threads", "dry_run", epilog=examples("sigmerge demo"))
def demo(
    flags: Flags,
    out: Annotated[Path, Argument(help="Folder for the results.")] = Path("demo-out"),
    calls: Annotated[
        int, Option("--calls", help="Evaluation calls of the tuning; 0: no tuning.", min=0)
    ] = 8,
) -> None:
    """Merge, repair and tune the embedded pool.

    The pool is a bench with synthetic domains, small enough for a laptop; it claims nothing about
    large models.
    """
    from sigmerge.jobs.demo import DemoJob

    flags.emit(flags.run(lambda how: DemoJob(out, how, calls), goes_on=True), show.demo_lines)


@command(epilog=examples("sigmerge report run/", "sigmerge report merged/"))
def report(
    folder: Annotated[Path, Argument(help="What run, tune, merge, repair or demo wrote.")],
    flags: Flags,
) -> None:
    """Write the page of a result, from its records."""
    from sigmerge.jobs.report import write_report

    page = str(write_report(folder))
    flags.emit({"page": page}, lambda _: iter([f"page: {page}"]))


@command(
    "strict", "threads", "allow_pickle",
    epilog=examples(
        "sigmerge verify merged/ --deep",
        "sigmerge verify --pool pool/reference pool/math pool/code",
    ),
)  # fmt: skip
def verify(
    folders: Annotated[list[Path], Argument(help="A result, or checkpoints with --pool.")],
    flags: Flags,
    pool: Annotated[
        bool, Option("--pool", help="Check that experts fit the reference, named first.")
    ] = False,
    deep: Annotated[
        bool, Option("--deep", help="Compute some blocks again from the inputs.")
    ] = False,
    blocks: Annotated[str, Option("--blocks", help="With --deep: how many blocks, or all.")] = "4",
    seed: Annotated[
        int | None,
        Option("--seed", min=0, help="Draws the blocks; else another at every run."),
    ] = None,
) -> None:
    """Check a result against its records, or a pool.

    Digests, index, sizes, finite numbers, configuration, architecture, inputs unchanged. Every file
    is read. Exit code 3 if something is wrong.
    """
    from sigmerge.files.digests import rehashing
    from sigmerge.jobs.verify import VerifyJob, VerifyPoolJob

    if not pool and len(folders) != 1:
        raise click.BadParameter("give one result, or --pool with the reference and the experts")
    if blocks != "all" and not (blocks.isdecimal() and int(blocks[:9])):
        raise click.BadParameter(f"--blocks is a number from 1 on or all, not {blocks!r}")
    count = None if blocks == "all" else int(blocks[:9])
    experts = {folder.name: folder for folder in folders[1:]}

    def job_of(how: Options) -> VerifyJob | VerifyPoolJob:
        if pool:
            return VerifyPoolJob(folders[0], experts, how)
        return VerifyJob(folders[0], how, deep, count, seed)

    with rehashing():  # what is not as it was noted is reported, and stops nothing
        reports = flags.run(job_of)
    flags.emit(reports, show.report_lines)
    if not all(report.ok for report in reports):
        raise click.exceptions.Exit(3)
