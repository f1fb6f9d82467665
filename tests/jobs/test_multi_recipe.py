"""A file of several recipes: one merges what another makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import sigmerge
from sigmerge.errors import RecipeError
from sigmerge.recipe import load_recipe
from sigmerge.recipe.documents import several, with_folders
from tests.adapters import merged, write_adapter
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


def test_what_a_recipe_names_lies_beside_the_file(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the program runs: a command, a suite and a folder of statistics as in one alone."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (pool.root / "score.py").write_text(
        f"import json; print(json.dumps(dict.fromkeys({[*pool.experts]}, 0.5)))"
    )
    section = {"command": f"{sys.executable} score.py {{checkpoint}}"}
    file = pool.root / "scored.yaml"
    recipes = [pool.recipe("linear", name="a", repair=section), pool.recipe("linear")]
    file.write_text("---\n".join(map(yaml.safe_dump, recipes)))
    done("merge", file, tmp_path / "out")


def test_a_file_of_one_recipe_is_no_file_of_several(pool: PoolOnDisk, tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text("---\n" + yaml.safe_dump(pool.recipe("ties")))
    assert several(file) == {}


DIRECTED = "%YAML 1.1\n%TAG !e! !example-\n---"


@pytest.mark.parametrize(
    "start", ["---", "--- # the next", "---\r", "...\n---", f"...\n# next\n{DIRECTED}"]
)
@pytest.mark.parametrize("first", ["", "---\n", "# both\n", f"{DIRECTED}\n"])
def test_how_documents_begin(tmp_path: Path, start: str, first: str) -> None:
    file = tmp_path / "several.yaml"
    text = f"{first}name: one\nchat_template: |\n  --- x\n{start}\nname: two\nmodels: []\n"
    file.write_bytes(text.encode())
    assert list(several(file)) == ["one", "two"]


def test_a_recipe_may_begin_with_a_directive(pool: PoolOnDisk, tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(f"{DIRECTED}\n{yaml.safe_dump(pool.recipe('ties'))}")
    done("merge", file, tmp_path / "out")


@pytest.mark.parametrize(
    "half",
    ["half@main", {"model": "half@main"}, {"model": {"path": "half"}, "lora": None},
     {"model": {"path": "half", "revision": "main"}, "override_architecture": None}],
)  # fmt: skip
def test_the_long_form_of_another_recipes_result(
    pool: PoolOnDisk, tmp_path: Path, half: Any
) -> None:
    first = pool.recipe("ties", {"density": 0.5}, name="half")
    last = pool.recipe("task_arithmetic") | {"base_model": half}
    file = tmp_path / "several.yaml"
    file.write_text("---\n".join(map(yaml.safe_dump, (last, first))))
    found = several(file)
    assert list(found) == ["half", "merged"]
    loaded = load_recipe(with_folders(found["merged"], {"half": pool.experts["math"]}))
    assert loaded.reference == pool.experts["math"]


def test_a_folder_comes_before_a_recipe_with_a_revision(tmp_path: Path) -> None:
    (tmp_path / "half@v1").mkdir()
    (tmp_path / "x").mkdir()
    file = tmp_path / "several.yaml"
    file.write_text(
        "name: half\nmodels: [{model: x}]\n---\nname: two\nmodels: [{model: half@v1}]\n"
    )
    assert several(file)["two"]["models"] == [{"model": str(tmp_path / "half@v1")}]


def test_a_long_adapter_beside_the_recipe(tmp_path: Path) -> None:
    for name in ("model", "one-lora", "two-lora"):
        (tmp_path / name).mkdir()
    file = tmp_path / "several.yaml"
    file.write_text(
        "name: one\nmodels: [{model: {model: model, lora: one-lora}}]\n---\n"
        "name: two\nmodels: [{model: {model: {path: model}, lora: {path: two-lora}}}]\n"
    )
    one, two = several(file).values()
    model, adapter = str(tmp_path / "model"), str(tmp_path / "one-lora")
    assert one["models"] == [{"model": {"model": model, "lora": adapter}}]
    adapter = str(tmp_path / "two-lora")
    assert two["models"] == [{"model": {"model": {"path": model}, "lora": {"path": adapter}}}]


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "several.yaml"
    file.write_text("name: one\nmodels: []\n---\nname: two\nparameters:\n  t: 1\n  t: 2\nname: x\n")
    with pytest.raises(RecipeError, match=r"document 2: the recipe cannot be run") as raised:
        several(file)
    assert raised.value.problems == (
        "line 7, parameters.t: is given twice",
        "line 8, name: is given twice",
    )


def test_a_later_recipe_that_is_wrong_is_told_before_the_first_is_merged(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    recipes = [pool.recipe("ties", name="one"), pool.recipe("ties", dtype="float8", name="two")]
    file = tmp_path / "several.yaml"
    file.write_text("---\n".join(map(yaml.safe_dump, recipes)))
    said = refused(2, "merge", file, tmp_path / "out", beside=tmp_path)
    assert "dtype: must be" in said and not (tmp_path / "out").exists()


def test_the_result_of_another_recipe_with_an_adapter(pool: PoolOnDisk, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora", pool.reference, read_weights(pool.reference))
    half = pool.recipe("ties", {"density": 0.5}, name="half")
    last = {"merge_method": "passthrough", "models": [{"model": "half+lora"}]}
    file = tmp_path / "several.yaml"
    file.write_text("---\n".join(map(yaml.safe_dump, (last, half))))
    done("merge", file, tmp_path / "out")
    wanted = merged(read_weights(tmp_path / "out/half"), adapter)
    ours = read_weights(tmp_path / "out/merged")
    assert all((ours[name] == values).all() for name, values in wanted.items())


def test_a_dry_run_says_what_is_merged_later(pool: PoolOnDisk, tmp_path: Path) -> None:
    said = done("merge", written(pool), tmp_path / "out", "--dry-run")
    assert "merge: ties of 3 experts" in said and "later: recipe merged, merges half" in said
    assert not (tmp_path / "out").exists()


def test_files_beside_the_recipe(pool: PoolOnDisk, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    file = tmp_path / "several.yaml"
    file.write_text("name: one\nchat_template: own.jinja\n---\nname: two\nchat_template: auto\n")
    found = several(file)
    assert found["one"]["chat_template"] == str(tmp_path / "own.jinja")
    assert found["two"]["chat_template"] == "auto"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("name: one\nmodels: []\n", "name: one is taken"),
        ("name: a/b\nmodels: []\n", "cannot name a folder"),
        ("name: .b\nmodels: []\n", "cannot name a folder"),
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


def test_from_python(pool: PoolOnDisk, tmp_path: Path) -> None:
    file = written(pool)
    done("merge", file, tmp_path / "line")
    steps = sigmerge.merge_several.plan(file, tmp_path / "out").steps
    assert [step.name for step in steps] == ["merge", "later"]
    half, last = sigmerge.merge_several(file, tmp_path / "out", threads=1)
    assert [Path(one.out).name for one in (half, last)] == ["half", "merged"]
    for one in (half, last):
        ours, theirs = (
            read_weights(Path(one.out)),
            read_weights(tmp_path / "line" / Path(one.out).name),
        )
        assert all((ours[name] == values).all() for name, values in theirs.items())
    with pytest.raises(RecipeError, match=r"holds several recipes; sigmerge\.merge_several"):
        sigmerge.merge(file, tmp_path / "no")
    with pytest.raises(RecipeError, match=r"holds one recipe; sigmerge\.merge\("):
        sigmerge.merge_several(pool.write(pool.recipe("ties"), "one.yaml"), tmp_path / "no")
    assert not (tmp_path / "no").exists()
