"""The build backend: what it asks for where there is no compiler, and what it tells CMake then.

`python -m benchmarks.installation --no-compiler` builds in such a place, which takes minutes.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

BACKEND = Path(__file__).parents[1] / "native" / "backend.py"


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, beside a library of no effect, in a folder of its own and without a compiler."""
    library = MagicMock()
    library.build.get_requires_for_build_wheel.return_value = ["cmake"]
    monkeypatch.setitem(sys.modules, "scikit_build_core", library)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", {"PATH": str(tmp_path)})
        spec = importlib.util.spec_from_file_location("backend", BACKEND)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def brings_one(backend: ModuleType) -> bool:
    return any(each.startswith("ziglang") for each in backend.get_requires_for_build_wheel())


def test_a_compiler_comes_along_where_there_is_none(backend: ModuleType, tmp_path: Path) -> None:
    assert brings_one(backend)
    program(tmp_path / "g++", "")
    assert not brings_one(backend)
    os.environ[backend.TARGET] = "aarch64-linux-gnu.2.17"
    assert brings_one(backend)


def test_a_named_compiler_is_taken(backend: ModuleType) -> None:
    os.environ["CXX"] = "/opt/bin/clang++"
    assert not brings_one(backend)
    backend.build_wheel("dist")
    assert os.environ["CXX"] == "/opt/bin/clang++"
    assert "CMAKE_ARGS" not in os.environ


def called(compiler: str, *words: str) -> list[str]:
    done = subprocess.run([compiler, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("target", ["", "aarch64-linux-gnu.2.17"])
def test_the_compiler_is_told_the_machine(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    program(tmp_path / "python", 'printf "%s\\n" "$@"')  # in place of what runs `-m ziglang`
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    os.environ |= {"CMAKE_ARGS": "-DMINE='a b'"} | ({backend.TARGET: target} if target else {})
    backend.build_wheel("dist")
    machine = ["-target", target] if target else ["-mcpu=baseline"]
    assert called(os.environ["CXX"], "-march=x86-64-v3", "-DSM_ISA=v3", "a b.cpp") == [
        "-m", "ziglang", "c++", *machine, "-mcpu=x86_64_v3", "-DSM_ISA=v3", "a b.cpp",
    ]  # fmt: skip
    mine, ar, ranlib, *others = shlex.split(os.environ["CMAKE_ARGS"])
    assert mine == "-DMINE=a b"
    assert called(ar.partition("=")[2], "qc") == ["-m", "ziglang", "ar", "qc"]
    assert called(ranlib.partition("=")[2]) == ["-m", "ziglang", "ranlib"]
    assert ("-DCMAKE_SYSTEM_PROCESSOR=aarch64" in others) == bool(target)
    assert os.environ.get("_PYTHON_HOST_PLATFORM") == ("linux-aarch64" if target else None)
