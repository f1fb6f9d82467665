"""What a user's code gets of its environment: variables that it names, and installed libraries."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

MODEL_LIBRARIES = ("lm-eval", "peft", "tokenizers", "torch", "transformers", "vllm")
"""What runs models, whether code of a user imports it itself or a library of its does."""
LARGEST_SOURCE = 1 << 20
"""Bytes of a file that is searched for names of variables; a larger one is data."""
_OF_A_SHELL = {"_", "OLDPWD", "PWD", "SHLVL"}
"""Variables that say where a command was called."""
_WORD = re.compile(r"\w+")
_AT = " @ "


def variables(texts: Iterable[str]) -> dict[str, str]:
    """The variables of the environment whose names are words of these texts, by their digests.

    Values may be secrets.
    """
    words = {word for text in texts for word in _WORD.findall(text)}
    named = sorted(words & {*os.environ} - _OF_A_SHELL)
    return {name: hashlib.sha256(os.fsencode(os.environ[name])).hexdigest()[:16] for name in named}


def source_text(file: Path) -> str:
    """The text of a source; empty of what is large, or no text."""
    try:
        content = file.read_bytes() if file.stat().st_size <= LARGEST_SOURCE else b""
    except OSError:
        return ""
    return "" if b"\0" in content else content.decode(errors="replace")


def library_at(name: str, place: Path | None) -> str:
    """The name of a library that another Python has."""
    return name if place is None else f"{name}{_AT}{place}"


def library_version(library: str) -> str | None:
    """The version of an installed library, also of one at another place; None: there is none."""
    name, _, place = library.partition(_AT)
    if not place:
        return _of_this_process(name)
    return next((found.version for found in distributions(name=name, path=[place])), None)


@cache
def _of_this_process(name: str) -> str | None:
    """A process keeps the library that it has loaded; what is installed is a file to be parsed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def libraries_of(program: Path) -> Path | None:
    """Where the libraries lie of the Python that runs a program; None: of this process, or unknown.

    Of a program that is no Python they are those of the Python that it would find on PATH.
    """
    lines = source_text(program).partition("\n")
    words = lines[0].removeprefix("#!").split() if lines[0].startswith("#!") else [str(program)]
    python = next((word for word in words if "python" in Path(word).name), "python3")
    found = shutil.which(python)
    home = Path(found).parent.parent if found else Path()
    places = [*home.glob("lib/python3*/site-packages"), *home.glob("lib/python3*/dist-packages")]
    if not places or any(place.samefile(own) for place in places for own in _own_places()):
        return None
    return min(places)


def _own_places() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(paths[name]) for name in ("purelib", "platlib") if Path(paths[name]).is_dir()]
