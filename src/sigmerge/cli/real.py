"""Commands that make a pool of real language models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sigmerge.cli import show
from sigmerge.cli.app import Json, OutFolder, Overwrite, app, examples


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
    from sigmerge.real.gguf import convert

    made = convert(file, out, dtype, overwrite=overwrite)
    show.emit({"checkpoint": str(made)}, as_json, lambda done: iter([f"checkpoint: {made}"]))
