"""Recipes and scores in the forms that other tools write, and recipes that come through a pipe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmerge.engine.machine import Meter
from sigmerge.errors import RecipeError, ScoreError
from sigmerge.jobs.scores import printed_scores, read_scores
from sigmerge.lab.experiments.suite import load_suite as load_experiment
from sigmerge.recipe import load_recipe
from tests.command_line import sigmerge
from tests.pools import EXPERTS, PoolOnDisk, make_pool

DOMAINS = EXPERTS[:2]
SCORES = {"experts": {e: {d: 0.9 if d == e else 0.4 for d in DOMAINS} for e in DOMAINS},
          "anchor": dict.fromkeys(DOMAINS, 0.5)}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), experts=2, layers=1)


@contextmanager
def piped(text: str, number: int | None = None) -> Iterator[str]:
    """A pipe that the text comes through; as this descriptor, or as any."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    if number is None:
        yield f"/dev/fd/{reading}"
        os.close(reading)
        return
    before = os.dup(number)
    os.dup2(reading, number)
    os.close(reading)
    try:
        yield "-"
    finally:
        os.dup2(before, number)
        os.close(before)


VERBS: dict[str, tuple[str, ...]] = {
    "merge": ("RECIPE", "out", "--dry-run"),
    "capture": ("RECIPE", "--dry-run"),
    "profile": ("RECIPE", "--dry-run"),
    "deficits": ("RECIPE", "--anchor", "REFERENCE", "--dry-run"),
    "repair": ("RECIPE", "out", "--anchor", "MATH", "--dry-run"),
    "run": ("RECIPE", "out", "--dry-run"),
    "search": ("RECIPE", "out", "--dry-run"),
    "tune": ("RECIPE", "out", "--dry-run"),
    "anchors": ("RECIPE", "--dry-run"),
    "migrate": ("RECIPE",),
}
SECTIONS: dict[str, dict[str, Any]] = {
    "search": {"search": {"suite": "nano"}},
    "tune": {"repair": {"command": "echo {checkpoint}"}},
    "anchors": {"repair": {"command": "echo {checkpoint}"}},
}

ENDS = ("capture", "search")
"""Verbs that say, when the recipe is read, that it has no exemplars and is no pool of the suite."""


@pytest.mark.parametrize("verb", VERBS)
def test_a_recipe_through_a_pipe(
    pool: PoolOnDisk, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it names lies where the command runs; all that is said is what is said of a file."""
    monkeypatch.chdir(tmp_path)
    section = SECTIONS.get(verb, {"repair": {"scores": SCORES_FILE}})
    (tmp_path / SCORES_FILE).write_text(json.dumps(SCORES))
    recipe = pool.recipe("task_arithmetic", **section)
    text = yaml.safe_dump(recipe)
    (tmp_path / "recipe.yaml").write_text(text)
    places = {"REFERENCE": str(pool.reference), "MATH": str(pool.experts["math"])}

    def ran(file: str) -> Any:
        words = {**places, "RECIPE": file}
        found = sigmerge(verb, *(words.get(word, word) for word in VERBS[verb]))
        return found.code, found.out, found.err.replace(f" {file}:", " FILE:")

    wanted = ran("recipe.yaml")
    with piped(text) as file:
        assert ran(file) == wanted
    with piped(text, 0) as file:
        assert ran(file) == wanted
    assert (wanted[0] == 0) == (verb not in ENDS), wanted


SCORES_FILE = "scores.json"


def test_several_recipes_through_a_pipe(pool: PoolOnDisk, tmp_path: Path) -> None:
    one = pool.recipe("linear")
    text = yaml.safe_dump({"name": "a", **one}) + "---\n" + yaml.safe_dump({"name": "b", **one})
    with piped(text + "---\n") as pipe:
        ran = sigmerge("merge", pipe, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert sorted(folder.name for folder in (tmp_path / "out").iterdir()) == ["a", "b"]


def test_pipes_that_bring_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nobody writes")
    ran = sigmerge("merge", tmp_path / "nobody writes", tmp_path / "out")
    assert ran.code == 2 and "an empty file" in ran.err
    with piped("- 1") as pipe:
        ran = sigmerge("merge", pipe, tmp_path / "out")
    assert ran.code == 2 and "a recipe is a mapping" in ran.err


def test_a_trailing_line_that_begins_another_recipe(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("ties", each={"density": (0.5, 0.5)})
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe) + "---\n# nothing more\n")
    for words in (("merge", file, tmp_path / "out", "--dry-run"), ("migrate", file)):
        ran = sigmerge(*words)
        assert ran.code == 0, ran.err


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_a_recipe_in_json(tmp_path: Path, indent: int | str | None) -> None:
    """Beyond 16 bits JSON escapes two halves of a character; small numbers have no point there."""
    pool = make_pool(tmp_path / "smile 😀", experts=2, layers=1)
    recipe = pool.recipe("ties", {"lambda": 1e-05}, each={"density": (0.5, 0.5)})
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe, indent=indent))
    assert r"\ud83d\ude00" in file.read_text() and "1e-05" in file.read_text()
    loaded = load_recipe(file)
    assert loaded.reference == pool.reference and loaded.parameters["lambda"] == 1e-05
    again = load_recipe(recipe)
    assert again.models == loaded.models and load_recipe(again.given).models == loaded.models


NUMBERS = """
merge_method: task_arithmetic
base_model: {reference}
models:
- {{model: {math}, parameters: {{weight: 5e-1}}}}
- {{model: {coding}, parameters: {{weight: [1e-1, 5e-1]}}}}
parameters: {{lambda: 1E0}}
capture: {{scale: 5e-1}}
repair: {{c_min: 1e-1, c_max: 4.5e-1, scale: 6e-1, drop: 5e-1, shares: {{math: 5e-1, coding: 5e-1}},
         capacity: [2e-1]}}
search: {{trust: 5e-1, suite: nano}}
tune: {{objective: weighted, weights: {{math: 2e0, coding: 1e0}}, floors: {{math: 5e-1}}}}
"""


def test_numbers_with_an_exponent(pool: PoolOnDisk, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    places = {name: str(folder) for name, folder in pool.experts.items()}
    file.write_text(NUMBERS.format(reference=pool.reference, **places))
    loaded = load_recipe(file)
    assert [model.parameters["weight"] for model in loaded.models] == [0.5, [0.1, 0.5]]
    assert loaded.parameters["lambda"] == 1.0 and loaded.capture.scale == 0.5
    assert loaded.repair and loaded.search and loaded.tune
    repair = loaded.repair
    assert (repair.c_min, repair.c_max, repair.scale, repair.drop) == (0.1, 0.45, 0.6, 0.5)
    assert repair.shares == {"math": 0.5, "coding": 0.5} and repair.capacity == [0.2]
    assert loaded.search.trust == 0.5
    assert loaded.tune.weights == {"math": 2.0, "coding": 1.0}
    assert loaded.tune.floors == {"math": 0.5}


def test_numbers_with_an_exponent_in_a_suite(tmp_path: Path) -> None:
    def suite(number: str) -> Any:
        file = tmp_path / "suite.yaml"
        file.write_text(
            "name: a\npools: [{name: p, reference: r, experts: {m: m}, "
            f"probe: p.jsonl}}]\nevaluate: {{suite: nano}}\nconstants: {{c_max: {number}}}\n"
        )
        return load_experiment(file)

    assert suite("2.5e-1") == suite("0.25")


TWICE = json.dumps(SCORES)[:-1] + ', "anchor": {"math": 0.1, "coding": 0.2}}'
INNER = json.dumps(SCORES).replace('"anchor": {', '"anchor": {"coding": 0.9, ')
RESULTS = {"experts": {"m": "s.json"}, "anchor": "s.json", "domains": {"m": "t/acc"}}
HARNESS = '{"results": {"t": {"acc": 0.1, "acc": 0.2}}}'


@pytest.mark.parametrize(
    ("content", "given", "key"),
    [
        (TWICE, "s.json", "anchor"),
        (INNER, "s.json", "coding"),
        (
            HARNESS,
            {"experts": {"m": "s.json"}, "anchor": "s.json", "domains": {"m": "t/acc"}},
            "acc",
        ),
    ],
)
def test_a_key_that_stands_twice_in_a_file_of_scores(
    tmp_path: Path, content: str, given: Any, key: str
) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ScoreError, match=rf"s\.json: the key '{key}' is given twice"):
        read_scores(given, tmp_path)


def test_a_key_that_stands_twice_in_what_a_command_prints() -> None:
    with pytest.raises(ScoreError, match="the key 'math' is given twice"):
        printed_scores(['{"math": 0.1, "math": 0.2}'], "command", Meter())


def test_half_of_a_character(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(r'{"merge_method": "linear", "name": "\ud83d"}')
    with pytest.raises(RecipeError, match="half of a character"):
        load_recipe(file)
