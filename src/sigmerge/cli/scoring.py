"""Commands that score checkpoints and divide benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click

from sigmerge.cli import evaluation_lines as lines
from sigmerge.cli import show
from sigmerge.cli.app import examples, group
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import DataFolder, Flags, SuiteName, UseHub, command

SplitName = Annotated[
    Literal["calibration", "evaluation", "all"],
    Option("--split", help="calibration: the drawn items."),
]
SplitsFile = Annotated[
    Path | None, Option("--splits", help="Split file; default: what build would write.")
]
Backend = Annotated[Literal["hf", "vllm"], Option("--backend", help="What generates.")]
LoadedAs = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Option("--dtype", help="Of weights; auto: as saved on a GPU, else float32."),
]


@command(
    "trust_remote_code", "strict", "dry_run", "reuse",
    epilog=examples("sigmerge evaluate merged/ --suite mergebench --split evaluation --data data/"),
)  # fmt: skip
def evaluate(
    checkpoint: Annotated[Path, Argument(help="Checkpoint folder to score.")],
    flags: Flags,
    suite: SuiteName = "mergebench",
    split: SplitName = "calibration",
    data: DataFolder = None,
    hub: UseHub = False,
    splits_file: SplitsFile = None,
    limit: Annotated[
        int | None, Option("--limit", min=1, help="First items of each benchmark only.")
    ] = None,
    only: Annotated[
        list[str] | None, Option("--benchmark", help="Only this benchmark; repeatable.")
    ] = None,
    backend: Backend = "hf",
    dtype: LoadedAs = "auto",
    batch_size: Annotated[int, Option("--batch-size", min=0, help="0: found automatically.")] = 0,
    judge: Annotated[
        str | None,
        Option("--judge", help="A WildGuard checkpoint's folder, or keyword; default: none."),
    ] = None,
    allow_code: Annotated[
        bool,
        Option("--allow-code-execution", help="Run generated programs, in a sandbox."),
    ] = False,
    out: Annotated[Path | None, Option("--out", help="Also write the result here.")] = None,
    answers: Annotated[
        Path | None, Option("--answers", help="Write what the model answered, as JSON lines.")
    ] = None,
) -> None:
    """Score a checkpoint on a suite. Items that were scored before are not scored again.

    Interrupted, the same command goes on with the items that are missing.
    """
    from sigmerge.evaluation.how import How
    from sigmerge.evaluation.sources import Data
    from sigmerge.jobs.evaluate import EvaluateJob

    def announce(cost: Any) -> None:
        if not flags.as_json and not flags.quiet:
            click.echo(lines.estimate_line(cost), err=True)

    with show.progress(flags.as_json or flags.quiet) as bar:
        how = How(
            data=Data.default(data, hub), splits=splits_file, limit=limit,
            only=tuple(only or ()), backend=backend, dtype=dtype, batch_size=batch_size or None,
            judge=judge, allow_code=allow_code, trust_remote_code=flags.trust_remote_code,
            progress=bar, strict=flags.strict, announce=announce, answers=answers,
        )  # fmt: skip
        job = EvaluateJob(checkpoint, suite, split, how, out)
        result = show.do(job, flags.dry_run, goes_on=True)
    flags.emit(result, lambda done: lines.evaluation_lines(done.as_json(), answers))


@command(epilog=examples("sigmerge aggregate merged.json repaired.json --expert math=math.json"))
def aggregate(
    files: Annotated[list[Path], Argument(help="Result files of sigmerge evaluate.")],
    flags: Flags,
    expert: Annotated[
        list[str] | None, Option("--expert", help="NAME=FILE of an expert; repeatable.")
    ] = None,
) -> None:
    """Put results side by side, with gaps to the experts."""
    from sigmerge.jobs.aggregate import aggregate as verb

    if wrong := [text for text in expert or [] if "=" not in text]:
        raise click.BadParameter(f"--expert {wrong[0]}: expected NAME=FILE")
    experts = {name: Path(file) for name, file in (text.split("=", 1) for text in expert or [])}
    flags.emit(verb(files, experts), lines.aggregate_lines)


splits = group("splits", "Fix and check which records calibrate.")


@command(
    name="build", of=splits, epilog=examples("sigmerge splits build splits.json --data benchmarks/")
)
def splits_build(
    file: Annotated[Path, Argument(help="Split file to write.")],
    flags: Flags,
    suite: SuiteName = "mergebench",
    data: DataFolder = None,
    hub: UseHub = False,
    seed: Annotated[
        int | None,
        Option("--seed", help="Divide anew by this seed; default: the suite's own."),
    ] = None,
    only: Annotated[
        list[str] | None, Option("--benchmark", help="Only this benchmark; repeatable.")
    ] = None,
) -> None:
    """Divide every benchmark 20/80, and draw calibration items."""
    from sigmerge.jobs.splits import build

    found = build(suite, file, data=data, hub=hub, seed=seed, only=only or ())
    flags.emit(found, lines.split_lines)


@command(
    name="verify",
    of=splits,
    epilog=examples("sigmerge splits verify splits.json --data benchmarks/"),
)
def splits_verify(
    file: Annotated[Path, Argument(help="Split file to check.")],
    flags: Flags,
    suite: SuiteName = "mergebench",
    data: DataFolder = None,
    hub: UseHub = False,
) -> None:
    """Check a split file against itself and the source data."""
    from sigmerge.jobs.splits import verify

    flags.emit(verify(suite, file, data=data, hub=hub), lines.split_lines)
