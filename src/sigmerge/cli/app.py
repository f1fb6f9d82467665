"""The application, its four groups of commands, and what stands below their help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sigmerge.cli.declared import HELP

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
    "Merge": ("merge", "repair", "run", "tune", "extract", "moe", "tokens", "mergekit"),
    "Look": (
        "init", "inspect", "diff", "migrate", "verify", "report", "operators", "cache", "demo",
    ),
    "Score": ("evaluate", "aggregate", "deficits", "profile", "capture", "try"),
    "Laboratory": ("suite", "analyze", "anchors", "search", "splits", "probe", "pool"),
}  # fmt: skip
"""The commands by heading, in the order of `sigmerge --help`."""


class Commands(click.Group):
    """Commands under their headings."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            width = formatter.width - 6 - max(map(len, names))
            rows = [(name, one.get_short_help_str(width)) for name, one in found if one is not None]
            with formatter.section(heading):
                formatter.write_dl(rows)


app = Commands(
    name="sigmerge",
    help="Merge fine-tuned checkpoints of one reference model, then repair the merge.",
    epilog=EXIT_CODES,
    context_settings=HELP,
)


def group(name: str, help: str, epilog: str | None = None) -> click.Group:
    """A command that has commands of its own."""
    made = click.Group(name, help=help, epilog=epilog, context_settings=HELP)
    app.add_command(made)
    return made


def examples(*commands: str) -> str:
    """An epilog that keeps its lines."""
    return "\n".join(["\b", "Examples:" if commands[1:] else "Example:", *commands]).replace(
        "\nsigmerge", "\n  sigmerge"
    )


def _shown_first(
    *names: str, help: str, **how: Any
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """An option that prints something in place of any command."""

    def declared(show: Callable[[Any], None]) -> Callable[[Any], None]:
        def answer(context: click.Context, parameter: click.Parameter, given: Any) -> None:
            if given and not context.resilient_parsing:
                show(given)
                context.exit()

        how.update(callback=answer, is_eager=True, expose_value=False)
        app.params.append(click.Option(names, help=help, **how))
        return show

    return declared


@_shown_first("--version", is_flag=True, help="Print the version.")
def _version(asked: bool) -> None:
    from importlib.metadata import version

    click.echo(f"sigmerge {version('sigmerge-llm')}")


@_shown_first(
    "--completion", type=click.Choice(["bash", "zsh", "fish"]),
    help='Print what completes commands in a shell, for its settings: eval "$(sigmerge '
    '--completion bash)".',
)  # fmt: skip
def _completion(shell: str) -> None:
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # click has these three
    click.echo(made(app, {}, "sigmerge", "_SIGMERGE_COMPLETE").source())
