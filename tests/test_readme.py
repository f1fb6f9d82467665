"""The README's own recipe and commands, run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sigmerge.nano.files import POOL
from tests.command_line import Ran, sigmerge

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("sigmerge ")]


def shipped_pool(folder: Path) -> None:
    """The embedded pool, without what earlier commands measured on it."""
    shutil.copytree(POOL, folder / "pool", ignore=shutil.ignore_patterns(".sigmerge"))


def program(*words: str) -> Ran:
    """The command as it is installed."""
    path = str(Path(sys.executable).parent / "sigmerge")
    done = subprocess.run(
        [path, *words], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr)


def run(how: Callable[..., Ran], *words: str) -> str:
    done = how(*words)
    told = [line for line in done.err.splitlines() if not re.match(r"[a-z ]+: \d", line)]
    assert (done.code, told) == (0, []), f"{words}: {done.err}"  # but for progress
    return done.out


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe and its commands as they stand, but for fewer items to score.

    The dry run is a process of its own, the others need not load torch again.
    """
    monkeypatch.chdir(tmp_path)
    [recipe] = blocks("yaml")
    few = recipe.replace("{suite: nano}", "{suite: nano, limit: 6}")
    assert few != recipe
    (tmp_path / "recipe.yaml").write_text(few)
    (tmp_path / "plain.yaml").write_text(few[: few.index("repair:")])
    shipped_pool(tmp_path)
    run(sigmerge, "merge", "plain.yaml", "made-elsewhere")
    wanted = commands()
    assert [words[1] for words in wanted] == ["run", "merge", "merge", "repair", "repair"]
    for words in wanted:
        told = run(program if "--dry-run" in words else sigmerge, *words[1:])
        if words[1] == "run":
            shown = blocks("text")[0].splitlines()
            assert [line.split()[0] for line in told.splitlines()] == [
                line.split()[0] for line in shown
            ]
        if "--dry-run" in words:
            assert not (tmp_path / "merged").exists()
    weights = [tmp_path / name / "model.safetensors" for name in
               ("merged", "repaired", "again", "run/repaired", "made-elsewhere")]  # fmt: skip
    *repaired, anchor = [file.read_bytes() for file in weights]
    assert len(set(repaired)) == 1 and anchor not in repaired
    assert (tmp_path / "run/report.html").stat().st_size > 10_000


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert missing == []


def test_the_test_command_of_the_readme_is_what_ci_runs() -> None:
    assert any("make test" in block for block in blocks("sh"))
    assert "make test" in (ROOT / ".ci/run").read_text()
