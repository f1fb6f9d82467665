"""A file of several recipes, as mergekit-multi takes it: one may merge what another makes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from sigmerge.errors import RecipeError
from sigmerge.files.yaml_documents import Yaml, decoded, documents, parse_yaml
from sigmerge.recipe.folders import find_model

LAST = "merged"
"""What the recipe without a name is called; there may be one."""
MODEL_KEYS = ("model", "base_model", "tokenizer_source", "source", "anchor", "path", "lora")
"""Keys whose values are models; the last two are of mergekit's long form."""
FILE_KEYS = ("chat_template", "exemplars", "probe", "scores")
"""Keys whose values may be files beside the recipe."""


class Document(NamedTuple):
    """A recipe in a file of several, and how many lines are above it."""

    recipe: Yaml
    above: int


def several(file: Path) -> dict[str, dict[str, Any]]:
    """The recipes of a file by name, each after those it needs; {} if there is only one.

    Their paths are absolute; a model that is the name of another recipe stays a name.
    """
    found = {name: document.recipe.value for name, document in named_documents(file).items()}
    return _in_order(file, found) if len(found) > 1 else {}


def named_documents(file: Path) -> dict[str, Document]:
    """The recipes of a file by name, in its order; {} if it is one YAML document."""
    text = decoded(file, "a recipe in YAML", RecipeError)
    parts = documents(text) if "---" in text else [text]
    found: dict[str, Document] = {}
    above = 0
    for number, part in enumerate(parts if len(parts) > 1 else (), 1):
        where = f"{file}, document {number}"
        recipe, before = parse_yaml(part, where, RecipeError), above
        above += part.count("\n")
        if recipe.twice:
            raise RecipeError(f"{where}: the recipe cannot be run:", _repeated(recipe, before))
        if recipe.value is None:  # nothing but a comment
            continue
        if not isinstance(recipe.value, dict):
            raise RecipeError(f"{where}: a recipe is a mapping.")
        name = str(recipe.value.get("name") or LAST)
        if name in found or "/" in name or name.startswith("."):
            raise RecipeError(f"{where}: name: {name} is taken, or cannot name a folder.")
        found[name] = Document(recipe, before)
    return found


def _repeated(recipe: Yaml, above: int) -> list[str]:
    """The keys that are given twice, with their lines in the file."""
    return [
        f"line {recipe.lines[place] + above}, {'.'.join(map(str, place))}: is given twice"
        for place in recipe.twice
    ]


@contextmanager
def standing_in(found: Iterable[str]) -> Iterator[dict[str, Path]]:
    """Empty folders by the names of recipes, for their results, which are not there yet."""
    with TemporaryDirectory() as scratch:
        places = {name: Path(scratch).resolve() / name for name in found}
        for place in places.values():
            place.mkdir()
        yield places


def needed(recipe: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """The names of recipes whose results a recipe merges."""
    used: set[str] = set()
    _placed(dict(recipe), set(names), Path(), used)
    return used


def _in_order(file: Path, found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    folder = file.expanduser().resolve().parent
    placed, needs = {}, {}
    for name, recipe in found.items():
        needs[name] = used = set[str]()
        placed[name] = _placed(recipe, set(found) - {name}, folder, used)
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        circle = " needs ".join(error.args[1][::-1])
        raise RecipeError(f"{file}: the recipes need each other: {circle}.") from None
    return {name: placed[name] for name in order}


def _placed(node: Any, names: set[str], folder: Path, used: set[str]) -> Any:
    """A recipe with absolute paths; names of other recipes that it uses go into `used`."""
    if isinstance(node, list):
        return [_placed(entry, names, folder, used) for entry in node]
    if not isinstance(node, dict):
        return node
    result = {key: _placed(value, names, folder, used) for key, value in node.items()}
    for key in FILE_KEYS:
        given = result.get(key)
        if isinstance(given, str) and "{" not in given and (folder / given).is_file():
            result[key] = str(folder / given)
    for key in MODEL_KEYS:
        given = result.get(key)
        if not isinstance(given, str) or given in ("base", "union"):
            continue
        model, plus, adapter = given.partition("+")
        name = model.partition("@")[0]
        if name in names and (name == model or not (folder / model).is_dir()):
            used.add(name)
            local = find_model(adapter, folder) if plus else None
            result[key] = f"{model}+{local}" if local else given
        elif (local := find_model(given, folder)) is not None:
            result[key] = str(local)
    return result


def with_folders(node: Any, folders: Mapping[str, Path]) -> Any:
    """A recipe in which the names of others are the folders that they were written to."""
    if isinstance(node, list):
        return [with_folders(entry, folders) for entry in node]
    if not isinstance(node, dict):
        return node
    result = {key: with_folders(value, folders) for key, value in node.items()}
    for key in MODEL_KEYS:
        given = str(result.get(key))
        name = re.split("[@+]", given)[0]
        if name in folders:
            result[key] = f"{folders[name]}{given.removeprefix(name)}"
    return result
