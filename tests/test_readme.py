"""The README's own recipe and commands, run as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from sigmerge.nano.files import POOL

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("sigmerge ")]


def test_the_readme_runs(tmp_path: Path) -> None:
    [recipe] = blocks("yaml")
    (tmp_path / "recipe.yaml").write_text(recipe)
    for name in ("reference", "math", "coding"):
        shutil.copytree(POOL / name, tmp_path / "pool" / name)
    shutil.copyfile(POOL / "probe.jsonl", tmp_path / "probe.jsonl")
    both = {"math": {"math": 1.0, "coding": 0.6}, "coding": {"math": 0.6, "coding": 1.0}}
    scores = {"experts": both, "anchor": {"math": 0.8, "coding": 0.7}}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    wanted = commands()
    assert [words[1] for words in wanted] == ["merge", "merge", "repair", "run"]
    program = str(Path(sys.executable).parent / "sigmerge")
    for words in wanted:
        if "--anchor" in words:
            elsewhere = tmp_path / words[words.index("--anchor") + 1]
            shutil.copytree(tmp_path / "run-anchor", elsewhere)
        done = subprocess.run(
            [program, *words[1:]], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stderr}"
        if "--dry-run" in words:
            assert not (tmp_path / "merged").exists()
            # The next anchor "made elsewhere" is a plain merge of the same recipe.
            plain = recipe[: recipe.index("repair:")]
            (tmp_path / "plain.yaml").write_text(plain)
            subprocess.run([program, "merge", "plain.yaml", "run-anchor"], cwd=tmp_path, check=True)
    weights = "model.safetensors"
    merged = (tmp_path / "merged" / weights).read_bytes()
    assert merged == (tmp_path / "repaired" / weights).read_bytes()
    assert merged == (tmp_path / "run/repaired" / weights).read_bytes()
    assert (tmp_path / "run/report.html").stat().st_size > 10_000


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert missing == []


def test_the_test_command_of_the_readme_is_what_ci_runs() -> None:
    assert any("make test" in block for block in blocks("sh"))
    assert "make test" in (ROOT / ".ci/run").read_text()
