"""The application, its four groups of commands, and what stands below their help."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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

GROUPS = {
    "Merge": ("merge", "repair", "run", "tune", "extract"),
    "Look": (
        "init", "inspect", "diff", "migrate", "verify", "report", "operators", "cache", "demo",
    ),
    "Score": ("evaluate", "aggregate", "deficits", "profile", "capture"),
    "Laboratory": ("suite", "analyze", "anchors", "search", "splits", "probe", "pool"),
}  # fmt: skip
"""The commands by heading, in the order of `sigmerge --help`."""


class Commands(TyperGroup):
    """Commands under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            width = formatter.width - 6 - max(map(len, names))
            rows = [(name, one.get_short_help_str(width)) for name, one in found if one is not None]
            with formatter.section(heading):
                formatter.write_dl(rows)


app = typer.Typer(
    name="sigmerge",
    cls=Commands,
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
