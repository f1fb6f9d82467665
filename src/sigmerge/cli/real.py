"""Commands that make a pool of real language models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sigmerge.cli import show
from sigmerge.cli.app import Json, OutFolder, Overwrite, app, examples

real = typer.Typer(help="A pool of real language models: data, train.", no_args_is_help=True)
app.add_typer(real, name="real")


@app.command(epilog=examples("sigmerge gguf SmolLM2-135M-Instruct.Q4_1.gguf reference/"))
def gguf(
    file: Annotated[Path, typer.Argument(help="GGUF file of the Llama architecture.")],
    out: OutFolder,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option("--dtype", help="Type of the weights.")
    ] = "bfloat16",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Turn a GGUF file into a checkpoint folder."""
    from sigmerge.checkpoints.truncation import exit_on_truncation
    from sigmerge.real.gguf import convert

    exit_on_truncation()
    made = convert(file, out, dtype, overwrite=overwrite)
    show.emit({"checkpoint": str(made)}, as_json, lambda done: iter([f"checkpoint: {made}"]))


@real.command(epilog=examples("sigmerge real data public/ real/data --chat reference/"))
def data(
    folder: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of public data.")],
    out: OutFolder,
    seed: Annotated[int, typer.Option("--seed", help="Decides what is drawn.")] = 0,
    chat: Annotated[
        Path | None,
        typer.Option("--chat", help="Checkpoint whose chat template exemplars and probes get."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make training pairs, held-out items, exemplars and probe prompts.

    Training pairs that repeat a benchmark's item, exactly or nearly, are left out and counted.
    """
    from sigmerge.real.data import build

    def lines(done: dict[str, Any]) -> Iterator[str]:
        for name, file in done["files"].items():
            yield f"{file['records']:6d}  {out / name}"
        left = sum(source.get("left out: repeats a benchmark item", 0)
                   for source in done["sources"].values())  # fmt: skip
        yield f"{left} training pairs repeat a benchmark's item and are left out: {out}/data.json"

    show.emit(build(folder, out, seed, chat=chat), as_json, lines)


@real.command(
    epilog=examples(
        "sigmerge real train reference/ real/data pool/ --device cuda --jobs 5",
        "sigmerge real train reference/ real/data mild/ --steps 150 --rate 5e-5 --seed 1",
    )
)
def train(
    reference: Annotated[Path, typer.Argument(help="Checkpoint that every expert starts from.")],
    data: Annotated[Path, typer.Argument(help="What `sigmerge real data` made.")],
    out: OutFolder,
    steps: Annotated[int, typer.Option("--steps", help="Batches of each expert.")] = 300,
    rate: Annotated[float, typer.Option("--rate", help="Peak learning rate.")] = 2e-4,
    batch: Annotated[int, typer.Option("--batch", help="Pairs of a batch.")] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Decides the order of the pairs.")] = 0,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="Where it is trained.")
    ] = "cpu",
    expert: Annotated[
        list[str] | None, typer.Option("--expert", help="Only this domain; repeatable.")
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Experts that are trained side by side.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Fine-tune one expert a domain into a pool.

    An expert that is there already is not trained again, so a run that was cut off goes on.
    """
    from sigmerge.real.train import FineTuning, RealTraining

    settings = FineTuning(steps=steps, rate=rate, batch=batch, seed=seed)
    job = RealTraining(reference, data, out, settings, device, tuple(expert or ()), jobs)
    with show.progress(as_json) as progress:
        pool = job.run(progress)
    show.emit({"pool": str(pool)}, as_json, lambda done: iter([f"pool: {pool}"]))
