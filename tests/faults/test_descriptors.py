"""Few files may be open at once."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sigmerge.messages import reason
from tests.command_line import sigmerge
from tests.pools import draw, shapes, weight_bytes, write_member

MEMBERS, SHARDS = 61, 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty experts and their reference, in two files each."""
    root = tmp_path_factory.mktemp("many")
    named = shapes(layers=1)
    for i in range(MEMBERS):
        write_member(root / f"m{i}", draw(named, i), layers=1, shards=SHARDS)
    lines = [f"- {{model: m{i}, parameters: {{weight: 0.1}}}}" for i in range(1, MEMBERS)]
    file = root / "recipe.yaml"
    file.write_text("\n".join(["merge_method: ties", "base_model: m0", "models:", *lines]))
    return file


def within(limit: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command that may have so many files open, and can raise that no further."""
    given = (sys.executable, "-m", "sigmerge", *map(str, words))
    return subprocess.run(
        given,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )


def test_a_merge_of_more_files_than_may_be_open(recipe: Path, tmp_path: Path) -> None:
    ran = within(MEMBERS * SHARDS // 3, "merge", recipe, tmp_path / "few")
    assert ran.returncode == 0, ran.stderr
    assert sigmerge("merge", recipe, tmp_path / "many").code == 0
    assert weight_bytes(tmp_path / "few") == weight_bytes(tmp_path / "many")


def test_too_few_files_may_be_open(recipe: Path, tmp_path: Path) -> None:
    ran = within(9, "merge", recipe, tmp_path / "out")
    assert ran.returncode != 0
    (line,) = (line for line in ran.stderr.splitlines() if line.startswith("error: "))
    assert "Too many open files: 9 at once are allowed to a process" in line
    assert "the hard limit, which root raises" in line
    assert "fault of sigmerge" not in ran.stderr


def test_what_is_said_of_a_limit_that_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    said = reason(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert "256 at once are allowed to a process, and `ulimit -n 4096` allows more" in said
    assert reason(OSError(errno.EACCES, "Permission denied")) == "Permission denied"
