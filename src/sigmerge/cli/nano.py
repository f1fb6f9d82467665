"""Commands of the embedded pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sigmerge.cli import show
from sigmerge.cli.app import OutFolder, app, examples

nano = typer.Typer(
    help="The embedded five-domain pool: train, check.",
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
