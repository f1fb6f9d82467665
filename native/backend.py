"""The build backend: scikit-build-core, with a compiler from the package index where there is none.

Named by pyproject.toml; runs in an environment that holds what is asked for below.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build as base

ZIG = "ziglang>=0.13,<0.18"
"""A C++ compiler in a package. Its first build is slow: it compiles its own C++ library."""
TARGET = "SIGMERGE_TARGET"
"""Names, in the environment, what that compiler builds for, in place of this machine: a processor,
Linux and the oldest glibc, as in `aarch64-linux-gnu.2.17` (native/wheels.py)."""

build_sdist = base.build_sdist
get_requires_for_build_sdist = base.get_requires_for_build_sdist
prepare_metadata_for_build_editable = base.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = base.prepare_metadata_for_build_wheel

_SCRIPT = """#!/bin/sh
for one; do  # with a target, it has names of its own for instruction sets
  shift
  case $one in -march=x86-64-v*) one=-mcpu=x86_64_v${{one##*v}};; esac
  set -- "$@" "$one"
done
exec "{python}" -m ziglang {given} "$@"
"""


def get_requires_for_build_wheel(settings: dict[str, Any] | None = None) -> list[str]:
    return [*base.get_requires_for_build_wheel(settings), *_compiler()]


def get_requires_for_build_editable(settings: dict[str, Any] | None = None) -> list[str]:
    return [*base.get_requires_for_build_editable(settings), *_compiler()]


def build_wheel(folder: str, *given: Any, **named: Any) -> str:
    _name_compiler()
    return base.build_wheel(folder, *given, **named)


def build_editable(folder: str, *given: Any, **named: Any) -> str:
    _name_compiler()
    return base.build_editable(folder, *given, **named)


def _compiler() -> list[str]:
    if TARGET in os.environ:
        return [ZIG]
    found = os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))
    return [] if found else [ZIG]


def _name_compiler() -> None:
    """Let CMake find `python -m ziglang c++` under one word, which is how it names a compiler."""
    if not _compiler():
        return
    target = os.environ.get(TARGET, "")
    folder = Path("build/zig", target).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in (("CC", "cc"), ("CXX", "c++"), ("AR", "ar"), ("RANLIB", "ranlib")):
        given = f"{command} -target {target}" if target and command in ("cc", "c++") else command
        script = folder / f"zig-{command}"
        script.write_text(_SCRIPT.format(python=sys.executable, given=given))
        script.chmod(0o755)
        os.environ[name] = str(script)
