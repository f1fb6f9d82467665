"""A user's commands that score checkpoints: their arguments, files they name, their output."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.errors import ScoreError
from sigmerge.evaluation.scored_by import ScoredBy
from sigmerge.files.environment import (
    MODEL_LIBRARIES,
    libraries_of,
    library_at,
    library_version,
    source_text,
    variables,
)
from sigmerge.files.imports import imported_files, imported_names, module_files


def command_words(command: str, where: str) -> list[str]:
    """A command line split into its arguments; `where` names it in errors."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ScoreError(f"{where}: {command!r} is no command line ({error}).") from None
    if not words:
        raise ScoreError(f"{where}: is empty; give the program and its arguments.")
    return words


def check_program(command: str, folder: Path, where: str) -> None:
    """ScoreError if the program of a command that runs in `folder` is not there."""
    program = command_words(command, where)[0]
    inside = "/" in program  # else it is looked for on PATH
    if "{" not in program and shutil.which(str(folder / program) if inside else program) is None:
        raise ScoreError(
            f"{where}: {program!r} cannot be run: no such program "
            f"{f'in {folder}' if inside else 'on PATH'}, or it is not executable."
        )


def scored_by_command(command: str, folder: Path, where: str) -> ScoredBy:
    """What decides the scores of a command that runs in `folder`, besides the checkpoint.

    Its line, the files and folders that it names, variables of the environment whose names stand in
    it or in its sources, and the libraries of its Python.
    """
    files = named_files(command, folder, where)
    return ScoredBy(
        {
            "command": command,
            "folder": str(folder.absolute()),
            "environment": variables([command, *map(source_text, files)]),
        },
        {str(place): file for place, file in enumerate(files)},
        _libraries(command_words(command, where)[0], folder, files),
    )


def named_files(command: str, folder: Path, where: str) -> list[Path]:
    """The files that a command names, its script among them, as they are named.

    After each what it imports, if it is Python: modules that lie beside it or on PYTHONPATH. Then
    what lies in the folders that it names. Last the program, where it is found on PATH.
    """
    words = command_words(command, where)
    named = [folder / part for word in words for part in (word, *word.split("=")[1:])
             if part and "{" not in part]  # fmt: skip
    homes = [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    files = [[f, *imported_files(f, [f.parent, *homes])] for f in named if f.is_file()]
    files += [
        module_files(name, [folder, *homes]) for flag, name in pairwise(words) if flag == "-m"
    ]
    files += [_inside(place, folder) for place in named if place.is_dir()]
    files += [[Path(found)] for found in [shutil.which(words[0])] if found and "/" not in words[0]]
    return [*dict.fromkeys(file for each in files for file in each)]


def _inside(place: Path, folder: Path) -> list[Path]:
    """The files in a folder and its folders, without hidden ones.

    None of a folder in which the command runs, directly or deeper: its results lie there as well.
    """
    if folder.resolve().is_relative_to(place.resolve()):
        return []
    files = (
        file for file in place.rglob("*")
        if not any(part.startswith(_PASSED_OVER) for part in file.relative_to(place).parts)
    )  # fmt: skip
    return sorted(filter(Path.is_file, files))


_PASSED_OVER = (".", "__pycache__")


def _libraries(program: str, folder: Path, files: Iterable[Path]) -> tuple[str, ...]:
    """Those of the command's Python that run models, or that the files import."""
    names = {*MODEL_LIBRARIES, *(name for file in files for name in imported_names(file))}
    found = shutil.which(str(folder / program) if "/" in program else program)
    place = libraries_of(Path(found)) if found else None
    named = [library_at(name, place) for name in sorted(names)]
    return tuple(name for name in named if library_version(name) is not None)


def run_command(command: str, places: Mapping[str, Path], folder: Path, where: str) -> list[str]:
    """Run a command in `folder` and return the lines of its output that are not empty.

    `places` replace {name} in the command's arguments. ScoreError if the command cannot start or
    fails.
    """
    words = command_words(command, where)
    if (model := places.get("checkpoint")) and home_of(model) != model:
        raise ScoreError(
            f"{where}: a command is given one folder, and {model} are two; store the model with "
            "its adapter first, by merge_method: passthrough."
        )
    for name, path in places.items():
        words = [word.replace(f"{{{name}}}", str(path)) for word in words]
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except OSError as error:
        raise ScoreError(f"{where}: {words[0]!r} cannot be run ({error}).") from None
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        given = ", ".join(str(path) for path in places.values())
        raise ScoreError(f"{where}: exit code {done.returncode} on {given}:\n{tail}")
    return [line for line in done.stdout.splitlines() if line.strip()]
