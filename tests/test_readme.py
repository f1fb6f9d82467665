"""The README's own recipe and commands, run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from sigmerge.nano.files import POOL
from tests.command_line import Ran, sigmerge
from tests.pools import make_pool

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


def recipes() -> dict[str, str]:
    """The recipes of the page by the names under which it has them written."""
    return dict(re.findall(r"[Aa]s `(\S+\.yaml)`:\n\n^```yaml\n(.*?)^```", README, re.S | re.M))


def on_the_hub(cache: Path, names: Iterable[str]) -> None:
    """The hub's cache, where small models have these names."""
    pool = make_pool(cache.parent / "models", tokenizer=True)
    folders = [pool.reference, *pool.experts.values()]
    for name, folder in zip(names, folders, strict=False):
        home = cache / f"models--{name.replace('/', '--')}"
        (home / "refs").mkdir(parents=True)
        (home / "refs/main").write_text("0" * 40)
        shutil.copytree(folder, home / "snapshots" / ("0" * 40))


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipes and its commands as they stand and in its order, but for fewer items to score.

    Models of the hub are small ones in its cache. The dry run of a merge is a process of its own,
    the others need not load torch again.
    """
    monkeypatch.chdir(tmp_path)
    given = recipes()
    names = re.findall(r"\w+/[\w.-]+", given["two.yaml"])
    on_the_hub(tmp_path / "hub", names)
    for key, value in {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(key, value)
        found = value if key == "HF_HUB_CACHE" else True
        monkeypatch.setattr(f"huggingface_hub.constants.{key}", found)
    few = given["recipe.yaml"].replace("{suite: nano}", "{suite: nano, limit: 6}")
    assert few != given["recipe.yaml"]
    (tmp_path / "two.yaml").write_text(given["two.yaml"])
    (tmp_path / "recipe.yaml").write_text(few)
    (tmp_path / "mergekit_config.yml").write_text(few[: few.index("repair:")])
    shipped_pool(tmp_path)
    wanted = commands()
    verbs = ["merge", "merge", "migrate", "merge", "run", "merge", "merge", "repair", "repair"]
    assert [words[1] for words in wanted] == verbs
    for words in wanted:
        dry = "--dry-run" in words
        told = run(program if dry and words[2] == "recipe.yaml" else sigmerge, *words[1:])
        if words[1] == "run":
            shown = blocks("text")[0].splitlines()
            assert [line.split()[0] for line in told.splitlines()] == [
                line.split()[0] for line in shown
            ]
    assert json.loads((tmp_path / "two/config.json").read_text())["vocab_size"]
    weights = [tmp_path / name / "model.safetensors" for name in
               ("merged", "repaired", "again", "run/repaired", "run/anchor", "plain")]  # fmt: skip
    *repaired, anchor, plain = [file.read_bytes() for file in weights]
    assert len(set(repaired)) == 1 and anchor not in repaired and anchor == plain
    assert (tmp_path / "run/report.html").stat().st_size > 10_000


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert missing == []


def test_the_test_command_of_the_readme_is_what_ci_runs() -> None:
    assert any("make test" in block for block in blocks("sh"))
    assert "make test" in (ROOT / ".ci/run").read_text()
