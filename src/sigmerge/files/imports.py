"""The files that a user's Python source imports, libraries excluded."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from sigmerge.files.environment import source_text


def imported_files(file: Path, homes: Sequence[Path]) -> list[Path]:
    """A file and all modules in these folders that it imports, directly or indirectly.

    A file that is not Python source imports nothing.
    """
    found: set[Path] = set()
    todo = [file]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += _imported(one, homes)
    return sorted(found)


def module_files(name: str, homes: Sequence[Path]) -> list[Path]:
    """The files of a module and its packages, and of all that these import."""
    own = _files_of(tuple(name.split(".")), homes)
    return sorted({each for file in own for each in imported_files(file, homes)})


def imported_names(file: Path) -> set[str]:
    """The modules, by the first part of their names, that a Python source or script imports."""
    text = source_text(file)
    first = text.partition("\n")[0]
    if file.suffix != ".py" and not (first.startswith("#!") and "python" in first):
        return set()
    return {parts[0] for level, parts in _names(text.encode()) if not level and parts}


def users_homes() -> list[Path]:
    """The folders of sys.path without those of Python and of installed libraries."""
    return [Path(place) for place in sys.path if not is_installed(Path(place))]


def is_installed(file: Path) -> bool:
    """Whether a file is Python's own or a library's."""
    return any(file.is_relative_to(place) for place in _installed())


@cache
def _installed() -> tuple[Path, ...]:
    """The folders of Python and of installed libraries."""
    places = sysconfig.get_paths()
    return tuple(Path(places[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _imported(file: Path, homes: Sequence[Path]) -> Iterator[Path]:
    if file.suffix != ".py":
        return
    try:
        named = _names(file.read_bytes())
    except OSError:
        return
    for level, parts in named:
        above = file.parents[min(level, len(file.parents)) - 1]
        yield from _files_of(parts, [above] if level else homes)


@cache
def _names(source: bytes) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The imports of a source: level of a relative import, and the parts of the name."""
    found = []
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError, RecursionError):
        return ()
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(0, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            found += [(node.level, (*base, alias.name)) for alias in node.names]
    return tuple(dict.fromkeys(found))


def _files_of(parts: Sequence[str], homes: Sequence[Path]) -> list[Path]:
    """The files of a module and its packages, in the first folder that has any."""
    for home in homes:
        places = [home.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        files = [f for place in places for f in (place.with_name(f"{place.name}.py"),
                                                 place / "__init__.py")]  # fmt: skip
        if found := [file for file in files if file.is_file()]:
            return found
    return []
