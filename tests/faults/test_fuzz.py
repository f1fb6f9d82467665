"""The fuzzer runs: every target reads its sound input, and some damaged ones within the limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fuzz.corpus import MEASURED, PARAMETERS
from fuzz.targets import TARGETS

from sigmerge.operators.table import OPERATORS, operator

ROOT = Path(__file__).parents[2]
EACH = 8
"""Inputs of a target; `python -m fuzz` reads hundreds."""


def test_every_target_reads_damaged_inputs() -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-m", "fuzz", "--inputs", str(EACH)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{EACH * len(TARGETS)} inputs, 0 failures" in ran.stdout.splitlines()[-1]


def test_every_method_is_fuzzed() -> None:
    """Those that read exemplars apart: their pool has models that run."""
    read = {name for name in OPERATORS if operator(name).needs}
    assert set(PARAMETERS) == set(OPERATORS) - read and set(MEASURED) == read
