"""The recipes of examples/ are merged as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from sigmerge.nano.files import POOL
from tests.command_line import sigmerge

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("examples")
    for recipe in RECIPES:
        shutil.copy(recipe, made)
    shutil.copytree(POOL, made / "pool", ignore=shutil.ignore_patterns(".sigmerge"))
    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_merges_without_a_word_of_warning(recipe: Path, folder: Path) -> None:
    out = folder / recipe.stem
    ran = sigmerge("merge", folder / recipe.name, out, "-q")
    assert (ran.code, ran.err) == (0, "")
    assert list(out.rglob("model.safetensors"))


def test_the_page_lists_them_by_their_first_lines() -> None:
    listed = re.findall(
        r"^\| \[(\S+)\]\(\1\) \| (.*) \|$", (EXAMPLES / "README.md").read_text(), re.M
    )
    first = [(file.name, file.read_text().splitlines()[0].removeprefix("# ")) for file in RECIPES]
    assert listed == first and len(first) == 10
