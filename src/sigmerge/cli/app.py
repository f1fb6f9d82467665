"""The application and the flags that several commands share. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sigmerge.jobs.options import Options, Progress
    from sigmerge.recipe import Recipe

EXIT_CODES = """\b
Exit codes:
  0  done
  1  anything that has no number of its own
  2  the recipe, the options or the settings
  3  a checkpoint, or checkpoints that form no pool
  4  the output folder
  5  scores, suites and their data
  6  a library that is not installed
  7  memory of the machine or of a GPU
  130  interrupted; a line says if the same command goes on where it stopped
  143  terminated; the same
"""

app = typer.Typer(
    name="sigmerge",
    help="Merge fine-tuned checkpoints of one reference model, then repair the merge.",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def examples(*commands: str) -> str:
    """An epilog that keeps its lines."""
    return "\n".join(["\b", "Examples:" if commands[1:] else "Example:", *commands]).replace(
        "\nsigmerge", "\n  sigmerge"
    )


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"sigmerge {version('sigmerge-llm')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def recipe_file(file: Path) -> Path:
    """The file of a recipe; what comes through a pipe is read here, since it comes once."""
    from sigmerge.files.piped import taken
    from sigmerge.files.yaml_documents import LARGEST_YAML

    return taken(file, LARGEST_YAML)


RecipeFile = Annotated[
    Path,
    typer.Argument(
        callback=recipe_file, help="YAML recipe, in mergekit's dialect; -: from the standard input."
    ),
]
OutFolder = Annotated[Path, typer.Argument(help="New folder for the result.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")]
Shard = Annotated[
    str | None,
    typer.Option(
        help="Largest weight file, as 5GB.",
        show_default="an eighth of the model, 500MB at least, 5GB at most",
    ),
]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Worker threads; 0: all cores.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Pickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load pickled weights (weights-only).")
]
Nonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Let NaN and infinity in inputs pass.")
]
NoFsync = Annotated[
    bool, typer.Option("--no-fsync", help="Do not wait until the result is on the disk.")
]
Rehash = Annotated[
    bool, typer.Option("--rehash", help="Trust no digest of an earlier run; read every file.")
]


def _reuse(asked: bool) -> bool:
    if asked:
        from sigmerge.kept import reuse_from_now_on

        reuse_from_now_on()
    return asked


Reuse = Annotated[
    bool,
    typer.Option(
        "--reuse",
        callback=_reuse,
        help="Take cached results that another version of sigmerge or of a library made.",
    ),
]
StrictData = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="A key that is passed over, a benchmark without data, or models whose configurations "
        "compute something else are an error, not a warning.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Override the recipe's seed.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that checkpoints bring along.")
]


VariantName = Annotated[
    str | None, typer.Option("--variant", help="An ablation or control, before the recipe's.")
]
CMin = Annotated[float | None, typer.Option("--c-min", help="Least capacity of a layer.")]
CMax = Annotated[float | None, typer.Option("--c-max", help="Largest capacity of a layer.")]
Scale = Annotated[
    str | None, typer.Option("--scale", help="Of the update: a number, or calibrated.")
]


class EngineKind(StrEnum):
    local = "local"
    ray = "ray"


EngineFlag = Annotated[
    EngineKind,
    typer.Option("--engine", help="What runs the blocks: threads here, or tasks of a Ray cluster."),
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Of the Ray cluster, HOST:PORT or auto; else one is started."),
]


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


CaptureDevice = Annotated[
    Device | None,
    typer.Option("--device", help="Where weights are merged and exemplars read: cpu or cuda."),
]


SuiteName = Annotated[
    str, typer.Option("--suite", help="mergebench, nano, a suite's YAML, or a nano pool's folder.")
]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", help="Folder with the benchmarks' files; default SIGMERGE_DATA."),
]
UseHub = Annotated[bool, typer.Option("--hub", help="Read what is not in --data from the hub.")]
AnchorFolder = Annotated[
    Path | None, typer.Option("--anchor", help="Stored merge to look at, ours or another tool's.")
]


def options(
    threads: int,
    progress: Progress,
    *,
    overwrite: bool = False,
    max_shard_size: str | None = None,
    allow_pickle: bool = False,
    allow_nonfinite: bool = False,
    trust_remote_code: bool = False,
    strict: bool = False,
    durable: bool = True,
    rehash: bool = False,
    device: Device | None = None,
    engine: EngineKind = EngineKind.local,
    address: str | None = None,
) -> Options:
    """The options of a job; 0 threads are all cores."""
    from sigmerge.checkpoints.truncation import exit_on_truncation
    from sigmerge.engine.machine import default_threads
    from sigmerge.files.digests import rehash_from_now_on
    from sigmerge.jobs.options import Options

    exit_on_truncation()
    if rehash:
        rehash_from_now_on()
    return Options(
        threads=threads or default_threads(),
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        allow_nonfinite=allow_nonfinite,
        trust_remote_code=trust_remote_code,
        strict=strict,
        durable=durable,
        device="cuda" if device is Device.cuda else "cpu",
        progress=progress,
        engine=engine.value,
        address=address,
    )


def repair_changes(
    variant: str | None, c_min: float | None, c_max: float | None, scale: str | None
) -> dict[str, Any]:
    """The flags that change the repair: section, as a recipe writes them."""
    given: dict[str, Any] = {"variant": variant, "c_min": c_min, "c_max": c_max, "scale": scale}
    if scale is not None and scale != "calibrated":
        try:
            given["scale"] = float(scale)
        except ValueError:
            raise typer.BadParameter(f"--scale is a number or calibrated, not {scale!r}") from None
    return {key: value for key, value in given.items() if value is not None}


def load(
    file: Path,
    seed: int | None = None,
    device: Device | None = None,
    repair: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Recipe:
    """A recipe with the changes that flags make."""
    from dataclasses import replace

    from sigmerge.recipe import load_recipe

    loaded = load_recipe(file, seed=seed, repair=repair, strict=strict)
    if device is None:
        return loaded
    return replace(loaded, capture=loaded.capture.model_copy(update={"device": device.value}))
