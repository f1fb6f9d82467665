"""Free memory is what the container leaves, where that is less than the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sigmerge.engine import machine


@pytest.mark.parametrize(("limit", "used", "free"), [("5000", "2000", 3000), ("10", "20", 0)])
def test_a_container_s_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, free: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_memory() == free


def test_without_a_limit_the_machine_s_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "nothing")
    plain = machine.free_memory()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert plain > 1 << 20 and abs(machine.free_memory() - plain) < plain / 2


def test_numpy_is_loaded_without_threads_of_its_own_and_nobody_else_is_told() -> None:
    script = (
        "import os\n"
        "from sigmerge.engine.machine import load_numpy\n"
        "load_numpy()\n"
        "import numpy\n"
        "from threadpoolctl import threadpool_info\n"
        "print(*{one['num_threads'] for one in threadpool_info() if one['user_api'] == 'blas'})\n"
        "print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    for told, shown in ((None, ["1", "None"]), ("2", ["2", "2"])):
        environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
        environment |= {"OPENBLAS_NUM_THREADS": told} if told else {}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert ran.stdout.split() == shown


def test_the_peak_of_memory_is_that_of_the_command_alone() -> None:
    """What a large program starts is not as large; the system counts it so."""
    filled = np.ones(1 << 25)
    code = "from sigmerge.engine.machine import Meter; print(Meter().peak_memory_bytes)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(ran.stdout) < filled.nbytes
