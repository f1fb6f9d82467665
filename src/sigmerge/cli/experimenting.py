"""Commands that run the whole experiment and analyse it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sigmerge.cli import show
from sigmerge.cli.app import (
    Address,
    Device,
    DryRun,
    EngineFlag,
    EngineKind,
    Json,
    OutFolder,
    Pickle,
    Reuse,
    StrictData,
    Threads,
    Trust,
    app,
    examples,
    options,
    recipe_file,
)


def _source(given: str) -> str:
    """A name or a file, which a pipe stands for too."""
    return str(recipe_file(Path(given)))


SuiteSource = Annotated[
    str,
    typer.Argument(
        callback=_source, help="nano-study, nano-compare, nano-paper, paper, real, or a YAML file."
    ),
]
PoolFolders = Annotated[
    list[Path] | None,
    typer.Option("--pool", help="Pool folder, in place of the suite's pools; repeatable."),
]
MergeDevice = Annotated[
    Device,
    typer.Option("--device", help="Where weights are merged; `device:` of a suite: the models."),
]


@app.command(
    epilog=examples(
        "sigmerge suite nano-paper results/ --pool pool-0 --pool pool-1",
        "sigmerge suite paper results/ --dry-run",
    )
)
def suite(
    source: SuiteSource,
    out: OutFolder,
    pool: PoolFolders = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Processes that make runs side by side.")
    ] = 1,
    device: MergeDevice = Device.cpu,
    threads: Threads = 0,
    allow_pickle: Pickle = False,
    trust_remote_code: Trust = False,
    strict: StrictData = False,
    dry_run: DryRun = False,
    engine: EngineFlag = EngineKind.local,
    address: Address = None,
    reuse: Reuse = False,
    as_json: Json = False,
) -> None:
    """Run pools × anchors × settings into one store.

    Interrupted, the same command goes on with the runs that are missing. OUT/overview.json says
    what runs now.
    """
    from sigmerge.experiments.runner import SuiteJob
    from sigmerge.experiments.suite import load_suite

    with show.progress(as_json or dry_run) as progress:
        how = options(
            threads,
            progress,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            strict=strict,
            device=device,
            engine=engine,
            address=address,
        )
        job = SuiteJob(load_suite(source, pool or ()), out, how, jobs)
        result = show.do(job, dry_run, goes_on=True)
    show.emit(result, as_json, _suite_lines)


def _suite_lines(result: Any) -> Iterator[str]:
    yield f"{result.store}: {result.runs} runs, {result.made} of them made now"
    yield f"sigmerge analyze {result.out}  writes tables and figures"


@app.command(
    epilog=examples("sigmerge analyze results/ --out analysis/", "sigmerge analyze --published")
)
def analyze(
    store: Annotated[
        Path | None, typer.Argument(help="Folder of a suite, or its results.sqlite.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write; default: beside the store.")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Compute the paper's statements from its tables.")
    ] = False,
    split: Annotated[str, typer.Option("--split", help="Of the scores.")] = "evaluation",
    title: Annotated[str, typer.Option("--title", help="Of the page.")] = "The experiment",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write statistics, tables and figures of a store."""
    from sigmerge.experiments.analyze import AnalyzeJob
    from sigmerge.experiments.analyze import published as recomputed

    if published == (store is not None):
        raise typer.BadParameter("give a STORE, or --published without one")
    if published and dry_run:
        raise typer.BadParameter("--published has no dry run: it takes seconds")
    if published:
        show.emit(recomputed(out), as_json, _published_lines)
    else:
        assert store is not None
        done = show.do(AnalyzeJob(store, out, split, title), dry_run)
        show.emit(done, as_json, _analysis_lines)


def _published_lines(result: Any) -> Iterator[str]:
    yield result.page


def _analysis_lines(result: Any) -> Iterator[str]:
    yield from (f"{what}: {number}" for what, number in result.headline.items())
    for claim in result.statements:
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        yield f"{verdict}: {claim.text}: here {claim.here}, in the paper {claim.paper}"
    yield f"{len(result.tables)} tables, {len(result.figures)} figures: {result.out}/index.html"
    yield from (f"not in this experiment: {n}: {why}" for n, why in result.skipped.items())


@app.command(
    epilog=examples("sigmerge anchors recipe.yaml", "sigmerge anchors nano-compare --pool my-pool/")
)
def anchors(
    source: Annotated[
        str,
        typer.Argument(callback=_source, help="A recipe with a repair: section, or a suite."),
    ],
    pool: PoolFolders = None,
    threads: Threads = 0,
    dry_run: DryRun = False,
    reuse: Reuse = False,
    as_json: Json = False,
) -> None:
    """Rank anchors by their calibration scores, before any repair."""
    from sigmerge.experiments.anchors import AnchorsJob, suite_of

    with show.progress(as_json) as progress:
        how = options(threads, progress)
        result = show.do(AnchorsJob(suite_of(source, tuple(pool or ())), how), dry_run)
    show.emit(result, as_json, _anchor_lines)


def _anchor_lines(result: Any) -> Iterator[str]:
    for pool in result.pools:
        names = list(pool.anchors[0].statistics)
        yield f"{pool.pool}: repair the first"
        width = max(len(row.anchor) for row in pool.anchors)
        yield "  ".join([f"{'anchor':{width}}", *(f"{name:>6}" for name in names)])
        for row in pool.anchors:
            values = (f"{row.statistics[name]:{max(6, len(name))}.4f}" for name in names)
            yield "  ".join([f"{row.anchor:{width}}", *values])
        if pool.left_out:
            yield f"not ranked: {', '.join(pool.left_out)}; give every model exemplars:"
    yield "How repairing the strongest anchor did on measured pools, in points of the mean score:"
    for name, found in result.evidence["pools"].items():
        lost = {rule: 100 * value for rule, value in found["regret"].items()}
        yield (
            f"  {name}: gives up {lost['strongest']:.2f} against the best choice (at random "
            f"{lost['random']:.2f}, the weakest {lost['weakest']:.2f}); "
            f"{found['pairs_in_order']} of {found['pairs']} pairs keep their order"
        )
    yield f"  (from {result.evidence['made_by']})"


probe = typer.Typer(no_args_is_help=True, help="Make probe prompts for the representation view.")
app.add_typer(probe, name="probe")


@probe.command(
    "build",
    epilog=examples(
        "sigmerge probe build probe.jsonl --data math.jsonl --data coding.jsonl",
        "sigmerge probe build probe.jsonl --suite my-suite.yaml",
    ),
)
def probe_build(
    out: Annotated[Path, typer.Argument(help="New JSONL file of prompts.")],
    suite: Annotated[
        str | None, typer.Option("--suite", help="Draw from a suite's calibration items.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="JSONL of a domain, named after it; repeatable."),
    ] = None,
    benchmarks: Annotated[
        Path | None, typer.Option("--benchmarks", help="Folder with the suite's files.")
    ] = None,
    per_domain: Annotated[
        int, typer.Option("--per-domain", min=1, help="Prompts of each domain.")
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Decides which are drawn.")] = 0,
    template: Annotated[
        Path | None, typer.Option("--template", help="File with {prompt} where it goes.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Draw as many prompts from each domain, up to the response."""
    from sigmerge.errors import RecipeError
    from sigmerge.files.documents import read_bytes
    from sigmerge.jobs.probe import TEMPLATE, ProbeJob

    form = TEMPLATE
    if template:
        text = read_bytes(template, "a template", RecipeError, limit=1 << 20)
        form = text.decode("utf-8", errors="replace")
    job = ProbeJob(out, suite, tuple(data or ()), benchmarks, per_domain, seed, form)
    show.emit(show.do(job, dry_run), as_json, _probe_lines)


def _probe_lines(result: Any) -> Iterator[str]:
    yield f"{result.file}: {result.prompts} prompts of {', '.join(result.domains)}"
