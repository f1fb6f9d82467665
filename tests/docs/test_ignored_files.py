"""What a visitor's commands write in a clone is ignored by git, so that no sdist has it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def written() -> list[str]:
    """Folders and recipes at the top of a clone that the README names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|yaml)\n(.*?)^```", text, re.S | re.M)
    shown = "\n".join(blocks)
    plain = re.findall(r"(?<![\w/.-])[\w-]+(?:/|\.yaml)(?!\S)", shown)
    return sorted({*plain, *re.findall(r"\./([\w-]+/)", shown)})


def test_what_the_readme_writes_is_ignored() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no clone of git's")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    own = {f"{line.split('/')[0]}/" for line in tracked.splitlines()}
    names = [name for name in written() if name not in own]
    assert {"pool/", "run/", "recipe.yaml"} <= {*names}
    asked = subprocess.run(
        ["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert asked.split() == names
