"""Commands of the embedded pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sigmerge.cli import show
from sigmerge.cli.app import OutFolder, Threads, app, examples, options

nano = typer.Typer(
    help="The embedded five-domain pool: train, check, compare, study.",
    no_args_is_help=True,
)
app.add_typer(nano, name="nano")


@nano.command(epilog=examples("sigmerge nano train my-pool/ --seed 3"))
def train(
    out: OutFolder,
    seed: Annotated[int, typer.Option("--seed", help="Decides the facts and the training.")] = 0,
    size: Annotated[
        Literal["mini", "nano", "6.7M", "26M"], typer.Option("--size", help="Of each model.")
    ] = "nano",
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="Where it is trained.")
    ] = "cpu",
    rate: Annotated[
        float | None, typer.Option("--rate", help="Peak learning rate of the experts.")
    ] = None,
    replay: Annotated[
        float | None, typer.Option("--replay", help="Part of their batches from the mixture.")
    ] = None,
) -> None:
    """Train a reference and five experts from a seed."""
    from sigmerge.evaluation.run import nano_scores
    from sigmerge.nano.train import train as verb

    with show.progress(False) as progress:
        pool = verb(
            out,
            seed=seed,
            size=size,
            device=device,
            progress=progress,
            rate=rate,
            replay=replay,
            measure=nano_scores,
        )
    typer.echo(f"pool: {pool}")


@nano.command(epilog=examples("sigmerge nano verify"))
def verify(
    pool: Annotated[Path | None, typer.Argument(help="A pool; the shipped one by default.")] = None,
) -> None:
    """Check the SHA-256 sums of a pool's files."""
    from sigmerge.nano.files import POOL
    from sigmerge.nano.files import verify as verb

    typer.echo(f"{verb(pool or POOL)} files as they should be")


@nano.command(epilog=examples("sigmerge nano compare pool-0 pool-1 --out methods/"))
def compare(
    pools: Annotated[
        list[Path] | None, typer.Argument(help="Pools; the shipped one by default.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("methods"),
    threads: Threads = 0,
) -> None:
    """Make all twelve methods on pools: scores and costs.

    Interrupted, the same command goes on with the methods that are missing.
    """
    from sigmerge.experiments.studies import compare as verb
    from sigmerge.nano.files import POOL

    with show.progress(False) as progress:
        result = verb(pools or [POOL], out, options(threads, progress))
    typer.echo(result["table"])


@nano.command(epilog=examples("sigmerge nano study pool-0 pool-1 pool-2 --out study/"))
def study(
    pools: Annotated[list[Path], typer.Argument(help="Folders made by `sigmerge nano train`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for cells and tables.")] = Path(
        "study"
    ),
    anchors: Annotated[
        str | None, typer.Option("--anchors", help="Comma-separated; all shipped by default.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds per random control.")] = 1,
    threads: Threads = 0,
) -> None:
    """Repair every anchor with every variant on every pool.

    Interrupted, the same command goes on with the cells that are missing.
    """
    from sigmerge.experiments.studies import study as verb
    from sigmerge.jobs.demo import ANCHORS

    chosen = anchors.split(",") if anchors else ANCHORS
    if unknown := [name for name in chosen if name not in ANCHORS]:
        raise typer.BadParameter(f"--anchors {unknown[0]}: there are {', '.join(ANCHORS)}")
    with show.progress(False) as progress:
        result = verb(pools, chosen, out, seeds, options(threads, progress))
    typer.echo(result["table"])
