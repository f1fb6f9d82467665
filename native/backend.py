"""The build backend: scikit-build-core, with a compiler from the package index where there is none.

Named by pyproject.toml; runs in an environment that holds what is asked for below.
"""

from __future__ import annotations

import os
import shlex
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


def prepare_metadata_for_build_wheel(folder: str, *given: Any, **named: Any) -> str:
    _name_compiler()
    return base.prepare_metadata_for_build_wheel(folder, *given, **named)


def build_wheel(folder: str, *given: Any, **named: Any) -> str:
    _name_compiler()
    return base.build_wheel(folder, *given, **named)


def build_editable(folder: str, *given: Any, **named: Any) -> str:
    _name_compiler()
    return base.build_editable(folder, *given, **named)


def _compiler() -> list[str]:
    """What the build needs beside this machine's own compiler. On Windows it is always its own."""
    if TARGET in os.environ:
        return [ZIG]
    found = os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))
    return [] if found or os.name == "nt" else [ZIG]


def _name_compiler() -> None:
    """Let CMake find `python -m ziglang c++` under one word, which is how it names a compiler."""
    if not _compiler():
        return
    target = os.environ.get(TARGET, "")
    folder = Path("build/zig", target).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for command in ("c++", "ar", "ranlib"):
        script = folder / f"zig-{command}"
        given = f"c++ {_machine_of(target)}" if command == "c++" else command
        script.write_text(_SCRIPT.format(python=sys.executable, given=given))
        script.chmod(0o755)
        made[command] = str(script)
    os.environ["CXX"] = made["c++"]
    # CMake asks no variable for these two.
    told = [f"-DCMAKE_AR={made['ar']}", f"-DCMAKE_RANLIB={made['ranlib']}", *_told_of(target)]
    os.environ["CMAKE_ARGS"] = shlex.join([*shlex.split(os.environ.get("CMAKE_ARGS", "")), *told])


def _machine_of(target: str) -> str:
    """Without a target, it would take every instruction that this processor has."""
    return f"-target {target}" if target else "-mcpu=baseline"


def _told_of(target: str) -> list[str]:
    """What CMake, and the names of wheel and module, are told of another machine."""
    if not target:
        return []
    machine = target.partition("-")[0]
    os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    python = f"cpython-{sys.version_info[0]}{sys.version_info[1]}-{machine}-linux-gnu"
    return [
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={machine}",
        f"-DSM_SUFFIX=.{'abi3' if sys.version_info >= (3, 12) else python}.so",
    ]
