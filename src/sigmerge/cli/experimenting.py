"""Commands that run the whole experiment and analyse it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from sigmerge.cli.app import examples, group
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import PLACED, READ, WORKING, Flags, OutFolder, command, recipe_file


def _source(given: str) -> str:
    """A name or a file, which a pipe stands for too."""
    return str(recipe_file(Path(given)))


SuiteSource = Annotated[
    str,
    Argument(
        callback=_source, help="nano-study, nano-compare, nano-paper, paper, real, or a YAML file."
    ),
]
PoolFolders = Annotated[
    list[Path] | None,
    Option("--pool", help="Pool folder, in place of the suite's pools; repeatable."),
]


@command(
    *READ, "strict", *PLACED, *WORKING,
    epilog=examples(
        "sigmerge suite nano-paper results/ --pool pool-0 --pool pool-1",
        "sigmerge suite paper results/ --dry-run",
    ),
)  # fmt: skip
def suite(
    source: SuiteSource,
    out: OutFolder,
    flags: Flags,
    pool: PoolFolders = None,
    jobs: Annotated[
        int, Option("--jobs", min=1, help="Processes that make runs side by side.")
    ] = 1,
) -> None:
    """Run pools × anchors × settings into one store.

    Interrupted, the same command goes on with the runs that are missing. OUT/overview.json says
    what runs now.
    """
    from sigmerge.lab.experiments.runner import SuiteJob
    from sigmerge.lab.experiments.suite import load_suite

    loaded = load_suite(source, pool or ())
    flags.emit(flags.run(lambda how: SuiteJob(loaded, out, how, jobs), goes_on=True), _suite_lines)


def _suite_lines(result: Any) -> Iterator[str]:
    yield f"{result.store}: {result.runs} runs, {result.made} of them made now"
    yield f"sigmerge analyze {result.out}  writes tables and figures"


@command(
    "dry_run",
    epilog=examples("sigmerge analyze results/ --out analysis/"),
)
def analyze(
    flags: Flags,
    store: Annotated[Path, Argument(help="Folder of a suite, or its results.sqlite.")],
    out: Annotated[
        Path | None, Option("--out", help="Folder to write; default: beside the store.")
    ] = None,
    split: Annotated[str, Option("--split", help="Of the scores.")] = "evaluation",
    title: Annotated[str, Option("--title", help="Of the page.")] = "The experiment",
) -> None:
    """Write statistics, tables and figures of a store."""
    from sigmerge.lab.experiments.analyze import AnalyzeJob

    job = AnalyzeJob(store, out, split, title)
    flags.emit(flags.run(lambda how: job), _analysis_lines)


def _analysis_lines(result: Any) -> Iterator[str]:
    yield from (f"{what}: {number}" for what, number in result.headline.items())
    for claim in result.statements:
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        yield f"{verdict}: {claim.text}: here {claim.here}, in the paper {claim.paper}"
    yield f"{len(result.tables)} tables, {len(result.figures)} figures: {result.out}/index.html"
    yield from (f"not in this experiment: {n}: {why}" for n, why in result.skipped.items())


@command(
    *WORKING,
    epilog=examples(
        "sigmerge anchors recipe.yaml", "sigmerge anchors nano-compare --pool my-pool/"
    ),
)
def anchors(
    source: Annotated[
        str,
        Argument(callback=_source, help="A recipe with a repair: section, or a suite."),
    ],
    flags: Flags,
    pool: PoolFolders = None,
) -> None:
    """Rank anchors by their calibration scores, before any repair."""
    from sigmerge.lab.experiments.anchors import AnchorsJob, suite_of

    chosen = suite_of(source, tuple(pool or ()))
    flags.emit(flags.run(lambda how: AnchorsJob(chosen, how)), _anchor_lines)


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


probe = group("probe", "Make probe prompts for the representation view.")


@command(
    "dry_run",
    name="build",
    of=probe,
    epilog=examples(
        "sigmerge probe build probe.jsonl --data math.jsonl --data coding.jsonl",
        "sigmerge probe build probe.jsonl --suite my-suite.yaml",
    ),
)
def probe_build(
    out: Annotated[Path, Argument(help="New JSONL file of prompts.")],
    flags: Flags,
    suite: Annotated[
        str | None, Option("--suite", help="Draw from a suite's calibration items.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        Option("--data", help="JSONL of a domain, named after it; repeatable."),
    ] = None,
    benchmarks: Annotated[
        Path | None, Option("--benchmarks", help="Folder with the suite's files.")
    ] = None,
    per_domain: Annotated[int, Option("--per-domain", min=1, help="Prompts of each domain.")] = 20,
    seed: Annotated[int, Option("--seed", help="Decides which are drawn.")] = 0,
    template: Annotated[
        Path | None, Option("--template", help="File with {prompt} where it goes.")
    ] = None,
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
    flags.emit(flags.run(lambda how: job), _probe_lines)


def _probe_lines(result: Any) -> Iterator[str]:
    yield f"{result.file}: {result.prompts} prompts of {', '.join(result.domains)}"
