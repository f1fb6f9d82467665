"""Commands that merge, repair and search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sigmerge.cli import show
from sigmerge.cli.app import (
    Address,
    AnchorFolder,
    CaptureDevice,
    CMax,
    CMin,
    Device,
    DryRun,
    EngineFlag,
    EngineKind,
    Json,
    NoFsync,
    Nonfinite,
    OutFolder,
    Overwrite,
    Pickle,
    RecipeFile,
    Rehash,
    Reuse,
    Scale,
    Seed,
    Shard,
    StrictData,
    Threads,
    Trust,
    VariantName,
    app,
    examples,
    load,
    options,
    recipe_file,
    repair_changes,
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


@app.command(
    epilog=examples(
        "sigmerge merge recipe.yaml merged/ --dry-run", "sigmerge merge recipe.yaml merged/"
    )
    + RECIPE_EXAMPLE
)
def merge(
    recipe: RecipeFile,
    out: OutFolder,
    overwrite: Overwrite = False,
    max_shard_size: Shard = None,
    threads: Threads = 0,
    dry_run: DryRun = False,
    seed: Seed = None,
    variant: VariantName = None,
    c_min: CMin = None,
    c_max: CMax = None,
    scale: Scale = None,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    device: CaptureDevice = None,
    trust_remote_code: Trust = False,
    no_fsync: NoFsync = False,
    rehash: Rehash = False,
    strict: StrictData = False,
    engine: EngineFlag = EngineKind.local,
    address: Address = None,
    reuse: Reuse = False,
    as_json: Json = False,
) -> None:
    """Merge the checkpoints a recipe names into one new folder.

    A recipe with a repair: section is repaired too. Of a file with several recipes, each goes into
    a folder of its own in the new folder, under its name. Interrupted, the same command continues
    where it stopped and ends in the same bytes.
    """
    changes = repair_changes(variant, c_min, c_max, scale)
    job_of = _merging(recipe, out, seed, device, changes, strict)
    with show.progress(as_json) as bar:
        how = options(
            threads, bar, overwrite=overwrite, max_shard_size=max_shard_size,
            allow_pickle=allow_pickle, allow_nonfinite=allow_nonfinite,
            trust_remote_code=trust_remote_code, strict=strict,
            durable=not no_fsync, rehash=rehash, device=device, engine=engine, address=address,
        )  # fmt: skip
        done = show.do(job_of(how), dry_run, goes_on=True)
    if isinstance(done, tuple) and not as_json:
        for one in done:
            show.emit(one, as_json, show.merged_lines)
    else:
        show.emit(done, as_json, show.merged_lines)


def _merging(
    recipe: Path,
    out: Path,
    seed: int | None,
    device: Device | None,
    changes: Mapping[str, Any],
    strict: bool,
) -> Callable[[Options], Any]:
    """The job of a file with one recipe or several, when it is known how it is done."""
    from sigmerge.engine.machine import load_numpy

    load_numpy()
    from sigmerge.checkpoints.remote import target
    from sigmerge.errors import RecipeError
    from sigmerge.jobs.merge import MergeJob
    from sigmerge.recipe.documents import several

    if not several(recipe):
        loaded = load(recipe, seed, device, changes, strict)
        return lambda how: MergeJob(loaded, target(out), how)
    if changes or device:
        raise RecipeError(f"{recipe}: holds several recipes; a flag cannot change all of them.")
    from sigmerge.jobs.several import SeveralJob

    return lambda how: SeveralJob(recipe, out, how, seed, strict)


@app.command(
    epilog=examples(
        "sigmerge capture recipe.yaml",
        "sigmerge capture recipe.yaml --expert math --out statistics/",
    )
)
def capture(
    recipe: RecipeFile,
    expert: Annotated[
        list[str] | None, typer.Option("--expert", help="Only this expert; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the statistics; else beside the pool.")
    ] = None,
    threads: Threads = 0,
    dry_run: DryRun = False,
    allow_pickle: Pickle = False,
    device: CaptureDevice = None,
    trust_remote_code: Trust = False,
    engine: EngineFlag = EngineKind.local,
    address: Address = None,
    reuse: Reuse = False,
    as_json: Json = False,
) -> None:
    """Measure the statistics that the recipe's operator needs.

    Each expert reads its own exemplars.
    `merge` does this by itself; alone it can be split over machines. What is there already is not
    measured again. Statistics made elsewhere are used when they lie beside the pool, or in the
    folder that the recipe's capture: section names.
    """
    from sigmerge.jobs.capture import CaptureJob

    loaded = load(recipe, None, device)
    with show.progress(as_json) as bar:
        how = options(
            threads, bar, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code,
            engine=engine, address=address,
        )  # fmt: skip
        done = show.do(CaptureJob(loaded, how, expert or (), out), dry_run, goes_on=True)
    show.emit(done, as_json, show.capture_lines)


@app.command(epilog=examples("sigmerge profile recipe.yaml"))
def profile(
    recipe: RecipeFile,
    threads: Threads = 0,
    dry_run: DryRun = False,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    device: CaptureDevice = None,
    trust_remote_code: Trust = False,
    engine: EngineFlag = EngineKind.local,
    address: Address = None,
    reuse: Reuse = False,
    as_json: Json = False,
) -> None:
    """Measure how contested each layer is, and its capacity.

    Needs no anchor; computed once per pool and kept beside it.
    """
    from sigmerge.jobs.profile import ProfileJob

    with show.progress(as_json) as bar:
        how = options(
            threads, bar, allow_pickle=allow_pickle, allow_nonfinite=allow_nonfinite,
            trust_remote_code=trust_remote_code, device=device, engine=engine, address=address,
        )  # fmt: skip
        done = show.do(ProfileJob(load(recipe), how), dry_run)
    show.emit(done, as_json, show.profile_lines)


@app.command(epilog=examples("sigmerge deficits recipe.yaml --anchor merged/"))
def deficits(
    recipe: RecipeFile,
    anchor: AnchorFolder = None,
    threads: Threads = 0,
    dry_run: DryRun = False,
    allow_pickle: Pickle = False,
    trust_remote_code: Trust = False,
    strict: StrictData = False,
    reuse: Reuse = False,
    as_json: Json = False,
) -> None:
    """Measure what an anchor lost per domain, and the shares."""
    from sigmerge.checkpoints.remote import place_of
    from sigmerge.jobs.repair import DeficitsJob

    with show.progress(as_json) as bar:
        how = options(
            threads, bar, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code,
            strict=strict,
        )  # fmt: skip
        done = show.do(DeficitsJob(load(recipe), how, anchor and place_of(anchor)), dry_run)
    show.emit(done, as_json, show.deficit_lines)


@app.command(
    epilog=examples(
        "sigmerge repair recipe.yaml repaired/ --anchor merged/",
        "sigmerge repair --plan repaired/sigmerge/plan.json again/",
    )
)
def repair(
    paths: Annotated[list[Path], typer.Argument(help="RECIPE OUT, or OUT alone with --plan.")],
    anchor: AnchorFolder = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Make the repair of this plan.json again.")
    ] = None,
    overwrite: Overwrite = False,
    threads: Threads = 0,
    dry_run: DryRun = False,
    seed: Seed = None,
    variant: VariantName = None,
    c_min: CMin = None,
    c_max: CMax = None,
    scale: Scale = None,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    device: CaptureDevice = None,
    trust_remote_code: Trust = False,
    no_fsync: NoFsync = False,
    rehash: Rehash = False,
    strict: StrictData = False,
    engine: EngineFlag = EngineKind.local,
    address: Address = None,
    reuse: Reuse = False,
    as_json: Json = False,
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
        raise typer.BadParameter("give OUT alone with --plan, otherwise RECIPE and OUT")
    changes = repair_changes(variant, c_min, c_max, scale)
    if plan and (changes or seed is not None):
        raise typer.BadParameter("a plan is made again as it is; leave the other options out")
    with show.progress(as_json) as bar:
        how = options(
            threads, bar, overwrite=overwrite, allow_pickle=allow_pickle,
            allow_nonfinite=allow_nonfinite, trust_remote_code=trust_remote_code, strict=strict,
            durable=not no_fsync, rehash=rehash, device=device, engine=engine, address=address,
        )  # fmt: skip
        stored, out = anchor and place_of(anchor), target(paths[-1])
        job = (
            ReplayJob(plan, out, how, stored)
            if plan
            else RepairJob(load(recipe_file(paths[0]), seed, None, changes), out, how, stored)
        )
        done = show.do(job, dry_run, goes_on=True)
    show.emit(done, as_json, show.merged_lines)


@app.command(epilog=examples("sigmerge run recipe.yaml run/"))
def run(
    recipe: RecipeFile,
    out: OutFolder,
    overwrite: Overwrite = False,
    threads: Threads = 0,
    dry_run: DryRun = False,
    seed: Seed = None,
    variant: VariantName = None,
    c_min: CMin = None,
    c_max: CMax = None,
    scale: Scale = None,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    device: CaptureDevice = None,
    trust_remote_code: Trust = False,
    no_fsync: NoFsync = False,
    rehash: Rehash = False,
    strict: StrictData = False,
    engine: EngineFlag = EngineKind.local,
    address: Address = None,
    reuse: Reuse = False,
    as_json: Json = False,
) -> None:
    """Merge, score, repair, score again, and write a report.

    The last scores are of items that no step before has seen, where the recipe can have them.
    """
    from sigmerge.jobs.run import RunJob

    loaded = load(recipe, seed, device, repair_changes(variant, c_min, c_max, scale), strict)
    with show.progress(as_json) as bar:
        how = options(
            threads, bar, overwrite=overwrite, allow_pickle=allow_pickle,
            allow_nonfinite=allow_nonfinite, trust_remote_code=trust_remote_code, strict=strict,
            durable=not no_fsync, rehash=rehash, device=device, engine=engine, address=address,
        )  # fmt: skip
        done = show.do(RunJob(loaded, out, how), dry_run, goes_on=True)
    show.emit(done, as_json, show.run_lines)


@app.command(
    epilog=examples(
        "sigmerge search recipe.yaml found/",
        "sigmerge search recipe.yaml found/ --population 25 --generations 7",
    )
)
def search(
    recipe: RecipeFile,
    out: OutFolder,
    population: Annotated[
        int | None, typer.Option(help="Candidates per generation; default 24.")
    ] = None,
    generations: Annotated[
        int | None, typer.Option(help="Generations, the first included; default: calls/population.")
    ] = None,
    calls: Annotated[int | None, typer.Option(help="Evaluation calls in all; default 240.")] = None,
    items: Annotated[
        int | None, typer.Option(help="Items a candidate answers per benchmark; default 20.")
    ] = None,
    estimator: Annotated[
        str | None, typer.Option(help="mean, p-irt, gp-irt, mp-irt or gmp-irt; default gmp-irt.")
    ] = None,
    extraction: Annotated[
        str | None, typer.Option(help="How the items are drawn: uniform (default) or clusters.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="nano, a suite's YAML file, or a pool of nano train.")
    ] = None,
    seed: Seed = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over.")] = False,
    threads: Threads = 0,
    dry_run: DryRun = False,
    engine: EngineFlag = EngineKind.local,
    address: Address = None,
    reuse: Reuse = False,
    as_json: Json = False,
) -> None:
    """Search a merge's coefficients by evolution (MERGE³).

    Searches linear, task_arithmetic, ties or dare_ties, as the recipe says; options go before its
    search: section. Interrupted, the same command replays what was evaluated and goes on.
    """
    from sigmerge.jobs.search import SearchRun
    from sigmerge.recipe.scored import SearchSection

    loaded = load(recipe, seed)
    settings = (loaded.search or SearchSection()).changed(
        population=population, generations=generations, calls=calls, items=items,
        estimator=estimator, extraction=extraction,
    )  # fmt: skip
    with show.progress(as_json) as bar:
        how = options(threads, bar, overwrite=overwrite, engine=engine, address=address)
        done = show.do(SearchRun(loaded, out, how, settings, suite), dry_run, goes_on=True)
    show.emit(done, as_json, show.search_lines)


@app.command(epilog=examples("sigmerge demo"))
def demo(
    out: Annotated[Path, typer.Argument(help="Folder for the results.")] = Path("demo-out"),
    calls: Annotated[
        int, typer.Option("--calls", help="Evaluation calls of the tuning; 0: no tuning.", min=0)
    ] = 8,
    overwrite: Overwrite = False,
    threads: Threads = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Merge, repair and tune the embedded pool.

    The pool is a bench with synthetic domains, small enough for a laptop; it claims nothing about
    large models.
    """
    from sigmerge.jobs.demo import DemoJob

    with show.progress(as_json) as bar:
        job = DemoJob(out, options(threads, bar, overwrite=overwrite), calls)
        done = show.do(job, dry_run, goes_on=True)
    if as_json or dry_run:
        show.emit(done, as_json, show.no_lines)
        return
    show.print_table(done.rows)
    if done.tuned is not None:
        typer.echo(f"tuned with {done.tuned.calls} evaluation calls: {100 * done.tuned.tuned:.2f}"
                   f" ({done.tuned.page})")  # fmt: skip
    typer.echo(f"page: {done.page}")


@app.command(epilog=examples("sigmerge report run/"))
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished `sigmerge run`.")],
    as_json: Json = False,
) -> None:
    """Write the page of a finished run again."""
    from sigmerge.jobs.report import write_report

    page = str(write_report(folder))
    show.emit({"page": page}, as_json, lambda _: iter([f"page: {page}"]))


@app.command(
    epilog=examples(
        "sigmerge verify merged/ --deep",
        "sigmerge verify --pool pool/reference pool/math pool/code",
    )
)
def verify(
    folders: Annotated[list[Path], typer.Argument(help="A result, or checkpoints with --pool.")],
    pool: Annotated[
        bool, typer.Option("--pool", help="Check that experts fit the reference, named first.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compute some blocks again from the inputs.")
    ] = False,
    blocks: Annotated[
        str, typer.Option("--blocks", help="With --deep: how many blocks, or all.")
    ] = "4",
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Draws the blocks; else another at every run."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="With --pool: configurations that compute something else "
            "are a problem, not a warning.",
        ),
    ] = False,
    threads: Threads = 0,
    allow_pickle: Pickle = False,
    as_json: Json = False,
) -> None:
    """Check a result against its records, or a pool.

    Digests, index, sizes, finite numbers, configuration, architecture, inputs unchanged. Exit code
    3 if something is wrong.
    """
    from sigmerge.jobs.verify import VerifyJob, VerifyPoolJob

    if not pool and len(folders) != 1:
        raise typer.BadParameter("give one result, or --pool with the reference and the experts")
    if blocks != "all" and not (blocks.isdecimal() and int(blocks[:9])):
        raise typer.BadParameter(f"--blocks is a number from 1 on or all, not {blocks!r}")
    count = None if blocks == "all" else int(blocks[:9])
    with show.progress(as_json) as bar:
        how = options(threads, bar, allow_pickle=allow_pickle, strict=strict, rehash=True)
        experts = {folder.name: folder for folder in folders[1:]}
        job = (
            VerifyPoolJob(folders[0], experts, how)
            if pool
            else VerifyJob(folders[0], how, deep, count, seed)
        )
        reports = job.run()
    show.emit(reports, as_json, show.report_lines)
    if not all(report.ok for report in reports):
        raise typer.Exit(3)
