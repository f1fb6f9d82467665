"""Commands that make pools: the embedded one, and one of real language models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from sigmerge.cli import show
from sigmerge.cli.app import examples, group
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import Flags, OutFolder, command

pool = group("pool", "Make a pool: train an embedded or a real one, import GGUF.")

TrainedOn = Annotated[Literal["cpu", "cuda"], Option("--device", help="Where it is trained.")]


@command(
    "dry_run",
    name="nano",
    of=pool,
    epilog=examples(
        "sigmerge pool nano my-pool/ --seed 3", "sigmerge pool nano my-pool/ --dry-run"
    ),
)
def nano(
    out: OutFolder,
    flags: Flags,
    seed: Annotated[int, Option("--seed", help="Decides the facts and the training.")] = 0,
    size: Annotated[
        Literal["mini", "nano", "6.7M", "26M"], Option("--size", help="Of each model.")
    ] = "nano",
    device: TrainedOn = "cpu",
    rate: Annotated[
        float | None, Option("--rate", help="Peak learning rate of the experts.")
    ] = None,
    replay: Annotated[
        float | None, Option("--replay", help="Part of their batches from the mixture.")
    ] = None,
) -> None:
    """Train a reference and five experts from a seed."""
    from sigmerge.evaluation.run import nano_scores
    from sigmerge.lab.pools.nano import describe, train

    if flags.dry_run:
        flags.emit(describe(out, size, device, rate=rate, replay=replay), iter)
        return
    with show.progress(flags.as_json or flags.quiet) as progress:
        made = train(
            out, seed=seed, size=size, device=device, progress=progress, rate=rate, replay=replay,
            measure=nano_scores,
        )  # fmt: skip
    flags.emit({"pool": str(made)}, lambda _: iter([f"pool: {made}"]))


@command(name="verify", of=pool, epilog=examples("sigmerge pool verify"))
def verify(
    flags: Flags,
    folder: Annotated[
        Path | None,
        Argument(metavar="POOL", help="An embedded pool; the shipped one by default."),
    ] = None,
) -> None:
    """Check the SHA-256 sums of an embedded pool's files."""
    from sigmerge.nano.files import POOL
    from sigmerge.nano.files import verify as checked

    count = checked(folder or POOL)
    flags.emit({"files": count}, lambda _: iter([f"{count} files as they should be"]))


@command(
    "overwrite",
    name="gguf",
    of=pool,
    epilog=examples("sigmerge pool gguf SmolLM2-135M-Instruct.Q4_1.gguf reference/"),
)
def gguf(
    file: Annotated[Path, Argument(help="GGUF file of the Llama architecture.")],
    out: OutFolder,
    flags: Flags,
    dtype: Annotated[
        Literal["bfloat16", "float32"], Option("--dtype", help="Type of the weights.")
    ] = "bfloat16",
) -> None:
    """Turn a GGUF file into a checkpoint folder."""
    from sigmerge.lab.pools.gguf import convert

    made = convert(file, out, dtype, overwrite=flags.overwrite)
    flags.emit({"checkpoint": str(made)}, lambda done: iter([f"checkpoint: {made}"]))


@command(
    name="data",
    of=pool,
    epilog=examples("sigmerge pool data public/ real/data --chat reference/"),
)
def data(
    folder: Annotated[Path, Argument(metavar="DATA", help="Folder of public data.")],
    out: OutFolder,
    flags: Flags,
    seed: Annotated[int, Option("--seed", help="Decides what is drawn.")] = 0,
    chat: Annotated[
        Path | None,
        Option("--chat", help="Checkpoint whose chat template exemplars and probes get."),
    ] = None,
) -> None:
    """Make training pairs, held-out items, exemplars and probe prompts.

    Training pairs that repeat a benchmark's item, exactly or nearly, are left out and counted.
    """
    from sigmerge.lab.pools.data import build

    def lines(done: dict[str, Any]) -> Iterator[str]:
        for name, file in done["files"].items():
            yield f"{file['records']:6d}  {out / name}"
        left = sum(source.get("left out: repeats a benchmark item", 0)
                   for source in done["sources"].values())  # fmt: skip
        yield f"{left} training pairs repeat a benchmark's item and are left out: {out}/data.json"

    flags.emit(build(folder, out, seed, chat=chat), lines)


@command(
    "max_shard_size",
    "dry_run",
    name="train",
    of=pool,
    epilog=examples(
        "sigmerge pool train reference/ real/data pool/ --device cuda --jobs 5",
        "sigmerge pool train reference/ real/data mild/ --steps 150 --rate 5e-5 --seed 1",
    ),
)
def train(
    reference: Annotated[Path, Argument(help="Checkpoint that every expert starts from.")],
    data: Annotated[Path, Argument(help="What `sigmerge pool data` made.")],
    out: OutFolder,
    flags: Flags,
    steps: Annotated[int, Option("--steps", help="Batches of each expert.")] = 300,
    rate: Annotated[float, Option("--rate", help="Peak learning rate.")] = 2e-4,
    batch: Annotated[int, Option("--batch", help="Pairs of a batch.")] = 32,
    seed: Annotated[int, Option("--seed", help="Decides the order of the pairs.")] = 0,
    device: TrainedOn = "cpu",
    expert: Annotated[
        list[str] | None, Option("--expert", help="Only this domain; repeatable.")
    ] = None,
    jobs: Annotated[
        int, Option("--jobs", min=1, help="Experts that are trained side by side.")
    ] = 1,
) -> None:
    """Fine-tune one expert a domain into a pool.

    An expert that is there already is not trained again, so a run that was cut off goes on.
    """
    from sigmerge.lab.pools.train import FineTuning, RealTraining

    settings = FineTuning(steps=steps, rate=rate, batch=batch, seed=seed)
    job = RealTraining(
        reference, data, out, settings, device, tuple(expert or ()), jobs, flags.max_shard_size
    )
    if flags.dry_run:
        flags.emit(job.describe(), iter)
        return
    with show.progress(flags.as_json or flags.quiet) as progress:
        made = job.run(progress)
    flags.emit({"pool": str(made)}, lambda done: iter([f"pool: {made}"]))
