"""Commands of the command line, from the signatures of functions.

An annotation says what is taken: `Annotated[Path | None, Option("--plan", help=…)]`. A command's
options are put together when it is called or asked for its help: a process runs one of dozens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from sigmerge.errors import SigmergeError


class Option:
    """An option, under these names or under that of the function's parameter.

    `callback` takes the value and gives what the function gets in its place.
    """

    def __init__(
        self, *names: str, callback: Callable[[Any], Any] | None = None,
        min: int | None = None, **how: Any,
    ) -> None:  # fmt: skip
        self.names, self.callback, self.least, self.how = names, callback, min, how

    def parameter(self, name: str, kind: Any, default: Any) -> click.Parameter:
        kind, many = _value(kind)
        names = self.names or (f"--{name.replace('_', '-')}",)
        typed = {"is_flag": True} if kind is bool else {"type": _type(kind, self.least)}
        return click.Option(
            [name, *names],
            multiple=many,
            callback=self._converted(many),
            **({"show_default": True} | typed | self._given(default)),
        )

    def _given(self, default: Any) -> dict[str, Any]:
        if default is inspect.Parameter.empty:
            return {**self.how, "required": True}
        return self.how if default is None else {**self.how, "default": default}

    def _converted(self, many: bool) -> Callable[..., Any]:
        def convert(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
            if context.resilient_parsing:
                return value
            if many:
                value = [*value] if value else None
            return self.callback(value) if self.callback else value

        return convert


class Argument(Option):
    """A value that has its place and no name."""

    def parameter(self, name: str, kind: Any, default: Any) -> click.Parameter:
        kind, many = _value(kind)
        given = self._given(default)
        if (shown := given.get("default")) is not None:
            given["help"] += f"  [default: {shown}]"
        return click.Argument(
            [name],
            type=_type(kind, self.least),
            nargs=-1 if many else 1,
            callback=self._converted(many),
            **({"required": False} | given),
        )


HELP = {"help_option_names": ["-h", "--help"]}
"""Settings of every command: click keeps what a command's first context said of its help."""


class DeclaredCommand(click.Command):
    """A function as a command, under its name; its docstring is the help."""

    def __init__(self, function: Callable[..., None], name: str | None, epilog: str) -> None:
        named = name or function.__name__.replace("_", "-")
        super().__init__(
            named, callback=function, help=inspect.getdoc(function), epilog=epilog,
            context_settings=HELP,
        )  # fmt: skip

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params:
            assert self.callback is not None  # every command is a function
            self.params = _parameters(self.callback)
        return super().get_params(ctx)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # no stream of ours: cli/streams.py; click would leave silently
            raise SigmergeError("a pipe to another process broke.") from None


def _parameters(function: Callable[..., None]) -> list[click.Parameter]:
    found = []
    for name, each in inspect.signature(function).parameters.items():
        kind, declared = get_args(each.annotation)
        found.append(declared.parameter(name, kind, each.default))
    return found


def _value(kind: Any) -> tuple[Any, bool]:
    """The type of a value, without None, and whether there may be several."""
    if get_origin(kind) is not Literal and get_origin(kind) is not list:
        several = [each for each in get_args(kind) if each is not type(None)]
        kind = several[0] if several else kind
    return (get_args(kind)[0], True) if get_origin(kind) is list else (kind, False)


def _type(kind: Any, least: int | None) -> click.ParamType[Any]:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if issubclass(kind, Enum):
        return click.Choice(kind)
    if kind is Path:
        return click.Path(path_type=Path)
    if least is not None:
        bounded = click.IntRange(least)
        bounded.name = "integer"  # of which the messages speak
        return bounded
    plain: dict[type, click.ParamType[Any]] = {
        int: click.INT,
        float: click.FLOAT,
        str: click.STRING,
    }
    return plain[kind]
