"""Free memory is what the container leaves, where that is less than the machine's."""

from __future__ import annotations

from pathlib import Path

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
