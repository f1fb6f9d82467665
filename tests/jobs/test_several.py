"""A file of several recipes: one merges what another makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import sigmerge
from sigmerge.errors import RecipeError
from sigmerge.recipe.documents import several
from tests.command_line import refused
from tests.command_line import sigmerge as run
from tests.pools import PoolOnDisk, make_pool, read_weights


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("several"))


def written(pool: PoolOnDisk) -> Path:
    last = pool.recipe("linear", weight=(1.0, 3.0, 1.0))
    del last["base_model"]
    last["models"] = [{**last["models"][0], "model": "half"}, last["models"][1]]
    half = pool.recipe("ties", {"density": 0.5}, name="half")
    file = pool.root / "several.yaml"
    file.write_text("# both\n---\n" + "---\n".join(map(yaml.safe_dump, (last, half))))
    return file


def done(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.code == 0, result.err
    return result.out


def test_each_goes_into_its_folder_after_those_it_needs(pool: PoolOnDisk, tmp_path: Path) -> None:
    file, out = written(pool), tmp_path / "out"
    said = done("merge", file, out)
    assert said.index("out/half: ") < said.index("out/merged: ")
    one = sigmerge.merge(pool.recipe("ties", {"density": 0.5}), tmp_path / "half")
    models = [
        {"model": one.out, "name": "half", "parameters": {"weight": 1.0}},
        {"model": str(pool.experts["coding"]), "parameters": {"weight": 3.0}},
    ]
    sigmerge.merge({"merge_method": "linear", "models": models}, tmp_path / "by-hand")
    ours, wanted = read_weights(out / "merged"), read_weights(tmp_path / "by-hand")
    assert all((ours[name] == values).all() for name, values in wanted.items())
    before = (out / "half/model.safetensors").stat()
    done("merge", file, out)  # what is there is kept
    assert (out / "half/model.safetensors").stat().st_ino == before.st_ino


def test_a_file_of_one_recipe_is_no_file_of_several(pool: PoolOnDisk, tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text("---\n" + yaml.safe_dump(pool.recipe("ties")))
    assert several(file) == {}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("name: one\nmodels: []\n", "name: one is taken"),
        ("name: a/b\nmodels: []\n", "cannot name a folder"),
        ("name: two\nmodels: [{model: one}]\n", "the recipes need each other: "),
        ("- model\n", "document 2: a recipe is a mapping"),
    ],
)
def test_wrong_files(tmp_path: Path, second: str, words: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(f"name: one\nmodels: [{{model: two}}]\n---\n{second}")
    if "two" not in second:
        file.write_text(f"name: one\nmodels: []\n---\n{second}")
    with pytest.raises(RecipeError, match=words):
        several(file)


def test_a_flag_does_not_change_several_recipes(pool: PoolOnDisk, tmp_path: Path) -> None:
    said = refused(2, "merge", written(pool), tmp_path / "out", "--c-max", "0.3", beside=tmp_path)
    assert "a flag cannot change all of them" in said
