"""`sigmerge migrate`: what differs from mergekit, by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sigmerge.errors import RecipeError
from sigmerge.operators.table import MERGEKIT
from sigmerge.recipe.migration import migration
from tests.adapters import write_adapter
from tests.command_line import sigmerge
from tests.pools import PoolOnDisk, make_pool, read_weights

PLAIN = """\
merge_method: task_arithmetic
base_model: {reference}
models:
  - model: {math}
    parameters: {{weight: 0.5, nomalize: true}}
dtype: {dtype}
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("migrate"), experts=2)


def written(pool: PoolOnDisk, folder: Path, text: str, **places: str) -> Path:
    file = folder / "recipe.yaml"
    folders = {"reference": pool.reference, **pool.experts}
    file.write_text(text.format(**{**folders, "dtype": "float32", **places}))
    return file


def test_nothing_differs_but_what_is_passed_over(pool: PoolOnDisk, tmp_path: Path) -> None:
    (change,) = migration(written(pool, tmp_path, PLAIN))
    assert "nomalize" in change.text and "line 5" in change.text


def test_lines_are_those_of_the_file(pool: PoolOnDisk, tmp_path: Path) -> None:
    text = PLAIN.replace("task_arithmetic", "dare_ties").replace(", nomalize: true", "")
    file = written(pool, tmp_path, text + "tokenizer_source: union\n", dtype="bfloat16")
    told = [str(change) for change in migration(file)]
    assert told[0].startswith("line 1, merge_method: entries are dropped by other draws")
    assert told[1].startswith("line 6, dtype: arithmetic is float32, rounded once to bfloat16")
    assert [line[:6] for line in told] == ["line 1", "line 6", *["line 7"] * 3]
    assert sigmerge("migrate", file).out.splitlines() == told
    assert json.loads(sigmerge("migrate", file, "--json").out)[1]["line"] == 6


def test_adapters_slices_and_our_keys(pool: PoolOnDisk, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora", pool.reference, read_weights(pool.reference))
    with_adapter = PLAIN.replace("{math}", "{reference}+{lora}").replace(", nomalize: true", "")
    (change,) = migration(written(pool, tmp_path, with_adapter, lora=str(adapter)))
    assert (change.line, change.key) == (3, "models") and "adapters are added" in change.text
    ours = with_adapter.replace("{reference}+{lora}", "{math}") + "seed: 3\n"
    (change,) = migration(written(pool, tmp_path, ours))
    assert (change.line, change.key) == (7, "seed")
    sources = [
        {"sources": [{"model": str(pool.experts["math"]), "layer_range": [0, 1]}]},
        {"sources": [{"model": str(pool.experts[n]), "layer_range": [0, 1]} for n in
                     ("math", "coding")]},
    ]  # fmt: skip
    recipe = {"slices": sources, "merge_method": "linear", "parameters": {"weight": 1},
              "dtype": "float32"}  # fmt: skip
    file = tmp_path / "slices.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    told = " ".join(change.text for change in migration(file))
    assert "what lies behind the layers" in told and "without base_model" in told


def test_a_recipe_that_cannot_run_is_an_error(pool: PoolOnDisk, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="tise"):
        migration(written(pool, tmp_path, PLAIN.replace("task_arithmetic", "tise")))
    assert "task_arithmetic" in MERGEKIT


def test_of_several_recipes_each_is_told_under_its_name(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Lines are those of the file; a model that another recipe makes need not be there."""
    first = PLAIN.replace("task_arithmetic", "dare_ties").replace(", nomalize: true", "")
    last = PLAIN.replace("{math}", "half") + "seed: 3\n"
    text = f"# two\n---\nname: half\n{first}---\n{last}"
    told = [str(change) for change in migration(written(pool, tmp_path, text, dtype="bfloat16"))]
    starts = ["line 4, half.merge_method", "line 9, half.dtype", "line 16, merged.dtype",
              "line 17, merged.seed", "merged: "]  # fmt: skip
    assert [line[: len(start)] for line, start in zip(told, starts, strict=True)] == starts
    assert "nomalize" in told[-1]
