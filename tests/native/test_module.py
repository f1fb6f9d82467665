"""The module as a whole: its stub, and the instruction set it takes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sigmerge
from sigmerge import _native


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(sigmerge.__file__).parent / "_native.pyi").read_text("utf-8"))
    named = {one.name for one in stub.body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    assert named == {name for name in vars(_native) if not name.startswith("_")}


def test_the_environment_chooses_an_instruction_set(isa: str) -> None:
    code = "from sigmerge import _native; print(_native.isa())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"SIGMERGE_ISA": isa, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == isa


def test_an_instruction_set_that_is_not_there_is_an_error(isa: str) -> None:
    if isa != _native.isas()[-1]:
        pytest.skip("once")
    done = subprocess.run(
        [sys.executable, "-c", "from sigmerge import _native"],
        env={"SIGMERGE_ISA": "avx2", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode and "SIGMERGE_ISA" in done.stderr.splitlines()[-1]


def test_no_other_instruction_set_is_taken() -> None:
    with pytest.raises(ValueError, match="no such instruction set"):
        _native.use_isa("v9")
