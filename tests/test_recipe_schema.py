"""The JSON Schema that editors read: it is that of the code, and takes what the parser takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmerge.jobs.inspect import write_recipe
from sigmerge.nano.files import POOL, RECIPES
from sigmerge.recipe import load_recipe
from sigmerge.recipe.schema import RECIPE_SCHEMA
from tests import recipe_schema

jsonschema = pytest.importorskip("jsonschema")
CORPUS = sorted((Path(__file__).parents[1] / "benchmarks/corpus").glob("*.yaml"))
GOOD = {
    "merge_method": "ties",
    "base_model": "reference",
    "models": [{"model": "math", "parameters": {"weight": 0.4, "density": [0.2, 0.5]}}],
    "repair": {"scores": "scores.json"},
}


@pytest.fixture(scope="module")
def checked() -> Any:
    return jsonschema.Draft202012Validator(json.loads(RECIPE_SCHEMA.read_text(encoding="utf-8")))


def test_the_schema_is_made_of_the_sections_and_the_tables() -> None:
    assert RECIPE_SCHEMA.read_text(encoding="utf-8") == recipe_schema.text()


@pytest.mark.parametrize("file", [*CORPUS, *sorted(RECIPES.glob("*.yaml"))], ids=lambda f: f.stem)
def test_recipes_are_valid(file: Path, checked: Any) -> None:
    for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
        for each in document if isinstance(document, list) else [document]:
            assert [error.message for error in checked.iter_errors(each)] == []


@pytest.mark.parametrize(
    "changed",
    [{"repiar": {}}, {"repair": {"c_mni": 0.1}}, {"repair": {"variant": "uniform"}},
     {"repair": {"c_min": 2}}, {"dtype": "float65"}, {"models": [{"modell": "math"}]},
     {"tune": {"method": "guess"}}, {"preset": "papers"}],
)  # fmt: skip
def test_faults_are_found(changed: dict[str, Any], checked: Any) -> None:
    assert list(checked.iter_errors(GOOD)) == []
    [key] = changed
    found = list(checked.iter_errors(GOOD | changed))
    assert found and all(key in error.absolute_path or key in error.message for error in found)


def test_a_recipe_to_start_from_names_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    text = write_recipe(POOL, file, "ties", overwrite=False)
    assert text.splitlines()[0] == f"# yaml-language-server: $schema={RECIPE_SCHEMA.as_uri()}"
    assert len(load_recipe(file).experts) == 5
