"""The reference pages, written from the code: recipe keys, methods, commands, Python, examples.

Keys come from the JSON Schema of recipes (which the parser's sections make), methods from the
operators' table, commands from the command line itself, functions from their docstrings.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import click

import sigmerge
from sigmerge import errors, methods
from sigmerge.cli.app import EXIT_CODES, GROUPS
from sigmerge.cli.ending import app
from sigmerge.operators.base import Parameter
from sigmerge.operators.table import names, operator
from sigmerge.recipe.schema import RECIPE_SCHEMA

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = {
    "string": "text", "integer": "whole number", "number": "number", "boolean": "true or false",
    "object": "mapping", "array": "list",
}  # fmt: skip
WIDTH = 80
LARGE = 1e30
"""What is no bound any more."""


def pages() -> dict[str, str]:
    """Text of every page by its name."""
    groups = {f"commands-{name.lower()}": _group(name) for name in GROUPS}
    return {
        "recipe": _recipe(json.loads(RECIPE_SCHEMA.read_text(encoding="utf-8"))),
        "operators": _operators(),
        "commands": _commands(),
        **groups,
        "python": _python(),
        "examples": _examples(),
    }


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    made = {folder / f"{name}.md": text for name, text in pages().items()}
    for file in set(folder.glob("*.md")) - made.keys():
        file.unlink()
    for file, text in made.items():
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*heads]]
    lines += [["---"] * len(lines[0]), *([_cell(each) for each in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _code(value: Any) -> str:
    return f"`{value}`"


# Recipe keys


def _recipe(schema: dict[str, Any]) -> str:
    parts = [
        "# Recipe keys\n",
        "A recipe is YAML or JSON. These are its keys, section by section; a key that is not here "
        "is an error. Those of a method stand under [methods](operators.md). The same table is a "
        f"JSON Schema, `{RECIPE_SCHEMA.name}` in the package, for editors.\n",
        "## Top level\n",
        _keys(schema, schema),
    ]
    for title, section in _sections(schema):
        parts += [f"## {title}\n", _words(section.get("description", "")), _keys(section, schema)]
    return "\n".join(parts)


def _sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sections below the top level under the places where they stand."""
    top = schema["properties"]
    repair = _resolved(top["repair"], schema)
    slices = _resolved(top["slices"]["items"], schema)
    listed, run = top["models"]["anyOf"]
    yield "models: an entry", _resolved(listed["items"], schema)
    yield "models: the checkpoints of a run", _resolved(run, schema)
    yield "slices: an entry", slices
    yield "slices: a source", _resolved(slices["properties"]["sources"]["items"], schema)
    for key in ("tokenizer", "capture", "repair"):
        yield f"{key}:", _resolved(top[key], schema)
    missing = _resolved(top["tokenizer"], schema)["properties"]["missing"]
    yield "tokenizer: missing:", _resolved(missing, schema)
    yield "repair: calibrate:", _resolved(repair["properties"]["calibrate"], schema)
    for key in ("guide", "tune", "search"):
        yield f"{key}:", _resolved(top[key], schema)


def _resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for each in (part, *part.get("anyOf", ())):
        if "$ref" in each:
            found: dict[str, Any] = schema["$defs"][each["$ref"].rpartition("/")[2]]
            return found
    return part


def _keys(section: dict[str, Any], schema: dict[str, Any]) -> str:
    rows = (
        (_code(key), _kind(part, schema), _default(part, key in section.get("required", ())),
         part.get("description", ""))
        for key, part in section["properties"].items()
    )  # fmt: skip
    return _table(("key", "takes", "default", "meaning"), rows)


def _kind(part: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a key takes, in words."""
    if "$ref" in part:
        return (
            "parameters of the [method](operators.md)"
            if "Parameters" in part["$ref"]
            else "a section"
        )
    if "enum" in part:
        return ", ".join(map(_code, part["enum"]))
    if "const" in part:
        return _code(part["const"])
    if "anyOf" in part:
        several = [each for each in part["anyOf"] if each.get("type") != "null"]
        if any("description" in each for each in several):  # the methods
            return "a [method](operators.md)"
        return " or ".join(dict.fromkeys(_kind(each, schema) for each in several)) or "a value"
    return KINDS.get(str(part.get("type")), "a value") + _bounds(part)


def _bounds(part: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    said = [
        f"{sign} {part[key]:g}" for key, sign in signs.items() if key in part and part[key] < LARGE
    ]
    return f" {', '.join(said)}" if said else ""


def _default(part: dict[str, Any], required: bool) -> str:
    if required:
        return "needed"
    default = part.get("default")
    return "" if default in (None, [], {}) else _code(json.dumps(default).strip('"'))


# Methods


def _operators() -> str:
    made = [operator(name) for name in names()]
    text = (
        "# Methods\n\nThe values of `merge_method:` with their parameters. *Each*: a model may "
        "have a value of its own. A parameter takes a value, a list that runs from the first layer "
        "to the last, or a list of filters. Defaults are those of `preset: mergekit`; where "
        "`preset: paper` differs, its default stands behind it. [Whose formula each "
        "is](../methods.md) has a page of its own.\n\n"
    )
    text += _table(
        ("`merge_method`", "method", "paper"),
        (
            (f"[`{each.name}`](#{each.name.replace('_', '-')})", each.title, each.paper)
            for each in made
        ),
    )
    return text + "".join(map(_operator, made))


def _operator(each: Any) -> str:
    text = f"\n## {each.name}\n\n{each.title}: {each.paper}\n"
    if each.needs:
        text += f"\nIt reads exemplars of every expert, to capture {each.needs}.\n"
    rows = (
        (_code(p.name), _takes(p), "each" if p.per_model else "", _defaults(p), p.doc)
        for p in each.parameters
    )
    return f"{text}\n{_table(('parameter', 'takes', '', 'default', 'meaning'), rows)}"


def _takes(parameter: Parameter) -> str:
    if isinstance(parameter.kind, tuple):
        return ", ".join(map(_code, parameter.kind))
    named = {float: "number", int: "whole number", bool: "true or false"}[parameter.kind]
    low, high = parameter.low, parameter.high
    ends = [f"≥ {low:g}"] * (low > -LARGE) + [f"≤ {high:g}"] * (high < LARGE)
    if parameter.kind is not bool and ends:
        named += f" {', '.join(ends)}"
    return f"{named} or `auto`" if parameter.auto else named


def _defaults(parameter: Parameter) -> str:
    said = [_spelled(value) for value in dict.fromkeys((parameter.mergekit, parameter.paper))]
    return "; paper: ".join(said)


def _spelled(value: Any) -> str:
    return "needed" if value is None else _code(json.dumps(value).strip('"'))


# Commands


def _commands() -> str:
    text = "# Commands\n\n"
    for heading, listed in GROUPS.items():
        text += f"## {heading}\n\n"
        rows = []
        for name in listed:
            page = f"commands-{heading.lower()}.md#sigmerge-{name}"
            rows.append(
                (f"[`sigmerge {name}`]({page})", app.commands[name].get_short_help_str(200))
            )
        text += _table(("command", "does"), rows) + "\n"
    codes = re.findall(r"^  (\d+)  (.*)$", EXIT_CODES, re.M)
    text += f"## Exit codes\n\n{_table(('code', 'meaning'), codes)}\n"
    return text + f"## Options of `sigmerge` itself\n\n{_options(app, click.Context(app))}"


def _group(heading: str) -> str:
    text = f"# Commands: {heading.lower()}\n"
    for name in GROUPS[heading]:
        text += _command(
            app.commands[name], click.Context(app.commands[name], info_name=f"sigmerge {name}")
        )
    return text


def _command(one: click.Command, context: click.Context) -> str:
    text = f"\n## {context.info_name}\n\n{_words(_help(one.help))}\n"
    if isinstance(one, click.Group):
        for name, below in one.commands.items():
            found = click.Context(below, info_name=f"{context.info_name} {name}")
            text += _command(below, found).replace("\n## ", "\n### ", 1)
        return text
    usage = " ".join(one.collect_usage_pieces(context))
    text += f"\n```text\n{context.info_name} {usage}\n```\n\n{_options(one, context)}"
    if one.epilog:
        kept = inspect.cleandoc(one.epilog).replace("\b", "").strip()
        shown = [line.strip() for line in kept.splitlines() if line.strip().startswith("sigmerge ")]
        text += "\n```sh\n" + "\n".join(shown) + "\n```\n"
    return text


def _help(text: str | None) -> str:
    return inspect.cleandoc((text or "").replace("\b\n", "").replace("\f", ""))


def _options(one: click.Command, context: click.Context) -> str:
    rows = []
    for parameter in one.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or "--help" in parameter.opts:  # hidden, or that of every command
            continue
        named, told = record
        if isinstance(parameter, click.Argument):
            named = parameter.make_metavar(context)
        elif isinstance(parameter.type, click.Choice):  # too many for a narrow column
            named = named.partition(" [")[0]
            words = [
                parameter.type.normalize_choice(each, context) for each in parameter.type.choices
            ]
            told += f" One of {', '.join(map(_code, words))}."
        rows.append((_code(named), told))
    return _table(("argument or option", "meaning"), rows) if rows else ""


# Python


def _python() -> str:
    classes = [name for name in sigmerge.__all__ if name in methods.CLASSES]
    others = [name for name in sigmerge.__all__ if name not in methods.CLASSES]
    objects = [name for name in others if inspect.isclass(getattr(sigmerge, name))]
    verbs = [name for name in others if name not in objects]
    text = (
        "# Python API\n\nEverything that `import sigmerge` gives, from the code's own signatures "
        "and docstrings; the tests run the examples. [A tour](../python-api.md) shows how they go "
        "together.\n\n## Functions\n"
    )
    text += "".join(_documented(name, getattr(sigmerge, name)) for name in verbs)
    text += "\n## Objects\n" + "".join(
        _documented(name, getattr(sigmerge, name)) for name in objects
    )
    text += (
        "\n## Methods as classes\n\nEach is a frozen dataclass; what recipes call `lambda` is "
        "`scale`. What the parameters mean stands under [methods](operators.md).\n\n"
    )
    text += _table(("method", "`merge_method`", "arguments"), map(_class, classes))
    text += "\n## Errors\n\n" + _table(("error", "exit code", "meaning"), _errors())
    return text


def _documented(name: str, made: Any) -> str:
    called = f"```python\n{_signature(name, made)}\n```"
    text = f"\n### {name}\n\n{called}\n\n{_words(inspect.getdoc(made) or '')}\n"
    if inspect.isclass(made):
        for key, each in vars(made).items():
            if (
                not key.startswith("_")
                and callable(getattr(made, key))
                and getattr(made, key).__doc__
            ):
                text += _method(name, key, getattr(made, key))
            elif isinstance(each, property) and each.__doc__:
                text += f"\n**`{name}.{key}`**\n\n{_words(inspect.getdoc(each) or '')}\n"
    return text


def _method(owner: str, name: str, made: Any) -> str:
    called = f"```python\n{_signature(f'{owner}.{name}', made)}\n```"
    return f"\n{called}\n\n{_words(inspect.getdoc(made) or '')}\n"


def _signature(name: str, made: Any) -> str:
    if is_dataclass(made) and inspect.isclass(made) and "Recipe" in name:
        return f"class {name}"  # its fields are those of a recipe
    found = inspect.signature(made)
    shown = [_parameter(each) for key, each in found.parameters.items() if key != "self"]
    returned = found.return_annotation
    given = "" if returned in (found.empty, "None") else f" -> {returned}"
    whole = f"{name}({', '.join(shown)}){given}"
    if len(whole) <= WIDTH:
        return whole
    lines = "".join(f"    {each},\n" for each in shown)
    return f"{name}(\n{lines}){given}"


def _parameter(each: inspect.Parameter) -> str:
    """As `str` has it, but for the quotes of annotations."""
    plain = each.replace(annotation=each.empty, default=each.empty)
    kind = "" if each.annotation is each.empty else f": {each.annotation}"
    if each.default is each.empty:
        return f"{plain}{kind}"
    return f"{plain}{kind} = {'…' if '<' in repr(each.default) else repr(each.default)}"


def _class(name: str) -> tuple[str, str, str]:
    said = ", ".join(f"`{each.name}={_argument(each)}`" for each in fields(getattr(sigmerge, name)))
    called = methods.CLASSES[name]
    return f"`{name}(…)`", f"[`{called}`](operators.md#{called.replace('_', '-')})", said


def _argument(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return repr(each.default)
    return "…" if each.default_factory is MISSING else "TaskArithmetic()"


def _errors() -> Iterator[tuple[str, str, str]]:
    for name, each in vars(errors).items():
        if inspect.isclass(each) and issubclass(each, errors.SigmergeError):
            code = getattr(each, "exit_code", "")
            yield _code(name), str(code), (inspect.getdoc(each) or "").split("\n\n")[0]


# Examples


def _examples() -> str:
    text = "# Ten recipes\n\nThe files of `examples/`; a test merges each as it stands.\n"
    for file in sorted(EXAMPLES.glob("*.yaml")):
        first, _, rest = file.read_text(encoding="utf-8").partition("\n")
        text += (
            f"\n## {first.removeprefix('# ')}\n\n`{file.name}`\n\n```yaml\n{rest.strip()}\n```\n"
        )
    return text


def _words(text: str) -> str:
    """A docstring as Markdown: its examples are code."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = line.startswith(">>>")
        if starts and not inside:
            lines += ["```pycon"]
        if inside and not line.strip():
            lines += ["```"]
        inside = starts or (inside and bool(line.strip()))
        lines.append(line)
    return "\n".join([*lines, *(["```"] if inside else []), ""])
