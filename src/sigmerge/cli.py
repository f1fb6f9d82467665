"""The command line: verbs, printing, exit codes. No maths; nothing imported before its use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sigmerge.errors import SigmergeError

app = typer.Typer(
    name="sigmerge",
    help="Merge fine-tuned checkpoints of one reference model, then repair the merge.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeFile = Annotated[Path, typer.Argument(help="YAML recipe, in mergekit's dialect.")]
OutFolder = Annotated[Path, typer.Argument(help="New folder for the result.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")]
Shard = Annotated[str, typer.Option("--max-shard-size", help="Largest weight file, e.g. 5GB.")]
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
Seed = Annotated[int | None, typer.Option("--seed", help="Override the recipe's seed.")]


@app.command(
    epilog="Examples:  sigmerge merge recipe.yaml merged/   |   "
    "sigmerge merge recipe.yaml merged/ --dry-run"
)
def merge(
    recipe: RecipeFile,
    out: OutFolder,
    overwrite: Overwrite = False,
    max_shard_size: Shard = "5GB",
    threads: Threads = 0,
    dry_run: DryRun = False,
    seed: Seed = None,
    allow_pickle: Pickle = False,
    allow_nonfinite: Nonfinite = False,
    as_json: Json = False,
) -> None:
    """Merge the checkpoints a recipe names into one new folder.

    Interrupted, the same command continues where it stopped and ends in the same bytes.
    """
    from sigmerge.checkpoints.writer import check_target
    from sigmerge.commands import merge as verb
    from sigmerge.commands.options import Options
    from sigmerge.engine.stream import default_threads
    from sigmerge.recipe import load_recipe

    loaded = load_recipe(recipe, seed=seed)
    how: dict[str, Any] = {
        "threads": threads or default_threads(),
        "max_shard_size": max_shard_size,
        "overwrite": overwrite,
        "allow_pickle": allow_pickle,
        "allow_nonfinite": allow_nonfinite,
    }
    if dry_run:
        check_target(out, overwrite)
        plan = verb.plan_merge(loaded, Options(**how)).describe(how["threads"])
        _emit(plan, as_json, _plan_lines)
        return
    with _progress(as_json) as progress:
        result = verb.merge(loaded, out, progress=progress, **how)
    _emit(result, as_json, _result_lines)


@app.command(epilog="Examples:  sigmerge operators   |   sigmerge operators ties")
def operators(
    name: Annotated[str | None, typer.Argument(help="Show only this operator.")] = None,
    as_json: Json = False,
) -> None:
    """List the merge operators with their parameters, defaults and papers."""
    from sigmerge.operators.table import OPERATORS, operator

    rows = [_operator_row(operator(key)) for key in ([name] if name else OPERATORS)]
    _emit({"operators": rows}, as_json, _operator_lines)


def _operator_row(chosen: Any) -> dict[str, Any]:
    parameters = [
        {
            "name": p.name,
            "values": list(p.kind) if isinstance(p.kind, tuple) else p.kind.__name__,
            "per_model": p.per_model,
            "default": p.mergekit,
            "default_paper": p.paper,
            "doc": p.doc,
        }
        for p in chosen.parameters
    ]
    return {
        "name": chosen.name,
        "title": chosen.title,
        "paper": chosen.paper,
        "parameters": parameters,
    }


def _operator_lines(listing: dict[str, Any]) -> Iterator[str]:
    for row in listing["operators"]:
        yield f"{row['name']}  {row['title']}"
        yield f"    {row['paper']}"
        for p in row["parameters"]:
            values = "|".join(p["values"]) if isinstance(p["values"], list) else p["values"]
            default = f"default {_word(p['default'])}"
            if p["default_paper"] != p["default"]:
                default += f", preset: paper {_word(p['default_paper'])}"
            where = "per model; " if p["per_model"] else ""
            yield f"    {p['name']} ({values}; {where}{default}): {p['doc']}"
        yield ""


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{plan['operator']}: {len(plan['experts'])} experts, {plan['layers']} layers, "
        f"{plan['coordinates']:,} coordinates in {plan['merged_tensors']} tensors"
    )
    yield f"reads   {_size(plan['bytes_to_read'])} per pass"
    yield f"writes  {_size(plan['bytes_to_write'])} in {len(plan['files'])} file(s)"
    yield f"memory  at most {_size(plan['peak_memory_bytes'])} with {plan['threads']} threads"
    for name, value in plan["settings"].items():
        yield f"  {name}: {value}"
    yield from (f"note: {note}" for note in plan["notes"])


def _result_lines(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{result['out']}: {_size(result['bytes_written'])} written in "
        f"{result['wall_seconds']:.1f} s, peak memory {_size(result['peak_memory_bytes'])}"
    )
    if result["blocks_resumed"]:
        yield f"continued an interrupted run: {len(result['blocks_resumed'])} blocks were there"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _emit(content: Any, as_json: bool, lines: Callable[[Any], Iterator[str]]) -> None:
    typer.echo(json.dumps(content, indent=2) if as_json else "\n".join(lines(content)).rstrip())


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar with bytes and the time left, on a terminal's standard error; else nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield update


def main() -> None:
    try:
        app(standalone_mode=False)
    except SigmergeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command continues from the finished blocks", err=True)
        sys.exit(130)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "show"):
            error.show()
            sys.exit(2)
        raise


if __name__ == "__main__":
    main()
