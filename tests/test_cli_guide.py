"""The guide: every command is in it, its options exist, its recipes load and its commands run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import sigmerge as package
from sigmerge.cli.app import GROUPS
from sigmerge.cli.ending import app
from sigmerge.cli.flags import VariantName
from sigmerge.method.controls import VARIANTS
from sigmerge.nano.files import POOL
from sigmerge.recipe import load_recipe
from sigmerge.recipe.moe import load_mixture
from tests.command_line import sigmerge

GUIDE = (Path(__file__).parents[1] / "docs/guide.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.S | re.M)


def listed(*group: str) -> set[str]:
    """The commands of a page of help."""
    help = sigmerge(*group, "-h").out
    if not group:
        return {name for each in GROUPS.values() for name in each if f"\n  {name} " in help}
    page = help.partition("Commands:\n")[2].partition("\n\n")[0]
    return {line.split()[0] for line in page.splitlines()}


def test_every_command_stands_under_one_heading() -> None:
    named = [name for each in GROUPS.values() for name in each]
    assert sorted(named) == sorted(app.commands) == sorted(listed())
    help = sigmerge("-h").out
    places = [help.index(f"\n{heading}:\n") for heading in GROUPS]
    assert places == sorted(places)


def test_variants_are_listed() -> None:
    assert get_args(VariantName) == tuple(VARIANTS)
    assert "[default|uniform_capacity|" in sigmerge("run", "-h").out


def test_every_command_is_in_the_table() -> None:
    rows = "\n".join(line for line in GUIDE.splitlines() if line.startswith("| `sigmerge "))
    for name in listed() - {"splits", "pool", "probe"}:
        assert f"| `sigmerge {name}" in rows, name
    for name in listed("pool"):
        assert f"| `sigmerge pool {name}" in rows, name
    assert listed("splits") == {"build", "verify"} and "splits build\\|verify" in rows
    assert listed("probe") == {"build"} and "| `sigmerge probe build" in rows


def test_every_option_that_it_names_exists() -> None:
    pages = "".join(
        sigmerge(*name.split(), "-h").out
        for name in [
            "",
            *listed(),
            "splits build",
            "splits verify",
            "probe build",
            *(f"pool {n}" for n in listed("pool")),
        ]
    )
    named = set(re.findall(r"--[a-z][a-z-]+", GUIDE))
    assert named and {option for option in named if option not in pages} == set()


def test_every_command_prints_as_it_is_told() -> None:
    groups = {"pool", "splits", "probe", "cache", "mergekit"}
    below = [f"{group} {name}" for group in sorted(groups) for name in listed(group)]
    pages = {name: sigmerge(*name.split(), "-h").out for name in [*(listed() - groups), *below]}
    del pages["mergekit yaml"]  # which has the options of another program
    for option in ("--json", "-q, --quiet", "-v, --verbose"):
        assert [name for name, page in pages.items() if option not in page] == []


def test_every_function_that_it_names_exists() -> None:
    named = re.findall(r"`sigmerge\.(\w+)\(", GUIDE)
    assert set(named) >= {"merge", "repair", "run"}
    assert all(callable(getattr(package, name)) for name in named)


def as_recipe(text: str) -> dict[str, Any]:
    """A block of YAML; one that is a section alone is put under a merge."""
    given = yaml.safe_load(text)
    if "merge_method" in given:
        return given
    models = [{"model": f"pool/{name}"} for name in ("math", "coding")]
    merge = {"merge_method": "ties", "base_model": "pool/reference", "models": models}
    return {**merge, **given}


@pytest.mark.parametrize("block", range(len(blocks("yaml"))))
def test_its_recipes_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    (tmp_path / "pool").symlink_to(POOL)
    for name in ("math.jsonl", "coding.jsonl", "probe.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    given = yaml.safe_load(blocks("yaml")[block])
    if "experts" in given:
        loaded = load_mixture(given)
        assert list(loaded.members) == ["base", "math", "coding"]
        return
    loaded = load_recipe(as_recipe(blocks("yaml")[block]))
    assert list(loaded.experts) == ["math", "coding"]


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, but for fewer items to score."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool").symlink_to(POOL)
    for name in ("anchor", "repaired"):  # any checkpoints will do
        shutil.copytree(POOL / "coding", tmp_path / "run" / name)
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 6
    for words in commands:
        few = ["--limit", "2"] if words[1] == "evaluate" else []
        ran = sigmerge(*words[1:], *few)
        assert ran.code == 0, f"{words}: {ran}"
    assert "math" in ran.out and "macro" in ran.out
