"""The same recipe file, unchanged, through sigmerge and through the installed mergekit 0.1.5.

Both compute in float32 on the same folders. mergekit draws DARE's masks from torch's generator; it
is handed ours here (from the oracle's Philox), so that the numbers can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import sigmerge
from tests.oracles.oracle_operators import dare_mask
from tests.pools import PoolOnDisk, make_pool, read_weights

LAYERS = 4


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("parity"), layers=LAYERS, shards=(1, 2, 1, 3))


@pytest.fixture
def our_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """mergekit draws the masks that sigmerge draws, seed 0. Yields the tensors it drew for."""
    from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge

    now: dict[str, Any] = {}
    drawn: list[str] = []
    merge_group = GeneralizedTaskArithmeticMerge.merge_group

    def remember(self: Any, group: Any, /, **parameters: Any) -> torch.Tensor:
        experts = [Path(entry.id.model.path).name for entry in group.non_base]
        now.update(tensor=group.metadata.name, experts=iter(experts))
        return merge_group(self, group, **parameters)

    def bernoulli(probability: torch.Tensor) -> torch.Tensor:
        expert = next(now["experts"])
        density = densities[expert]
        assert torch.allclose(probability, torch.full_like(probability, density))
        mask = dare_mask(0, expert, now["tensor"], probability.numel(), density)
        drawn.append(now["tensor"])
        return torch.tensor(mask, dtype=probability.dtype).reshape(probability.shape)

    monkeypatch.setattr(GeneralizedTaskArithmeticMerge, "merge_group", remember)
    monkeypatch.setattr(torch, "bernoulli", bernoulli)
    densities = {"math": 0.5, "coding": 0.25, "safety": 0.8}
    yield drawn


def run_mergekit(recipe: dict[str, Any], out: Path) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    cache = str(out.with_name("adapters"))
    options = MergeOptions(
        copy_tokenizer=False, write_model_card=False, quiet=True, lora_merge_cache=cache
    )
    run_merge(MergeConfiguration.model_validate(recipe), str(out), options)


def both(pool: PoolOnDisk, recipe: dict[str, Any] | str, out: Path) -> tuple[Any, Any]:
    """Weights from sigmerge and from mergekit for one and the same file."""
    file = out / "recipe.yaml"
    file.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe))
    sigmerge.merge(file, out / "ours", threads=1)
    run_mergekit(yaml.safe_load(file.read_text()), out / "theirs")
    return read_weights(out / "ours"), read_weights(out / "theirs")


def agree(ours: Any, theirs: Any, ulps: int) -> None:
    """Equal up to so many units in the last place of the larger of the numbers that were added."""
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert ours[name].shape == values.shape
        largest = np.abs(values).max()
        apart = np.abs(ours[name].astype(np.float64) - values).max()
        assert apart <= ulps * np.spacing(largest), f"{name}: {apart / np.spacing(largest)} ulp"


def identical(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)


def test_linear(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("linear", weight=(0.7, 0.4, 1.1), dtype="float32")
    del recipe["base_model"]
    agree(*both(pool, recipe, tmp_path), ulps=2)  # mergekit fuses multiplication and addition


def test_linear_without_normalisation(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("linear", {"normalize": False}, (0.7, 0.4, -0.1), dtype="float32")
    del recipe["base_model"]
    agree(*both(pool, recipe, tmp_path), ulps=2)


def test_linear_with_the_base_model_in_the_soup(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("linear", weight=(0.7, 0.4, 1.1), dtype="float32")
    recipe["models"].append({"model": str(pool.reference), "parameters": {"weight": 0.3}})
    agree(*both(pool, recipe, tmp_path), ulps=2)


@pytest.mark.parametrize("parameters", [{}, {"lambda": 0.6}, {"normalize": True, "lambda": 1.5}])
def test_task_arithmetic(pool: PoolOnDisk, tmp_path: Path, parameters: dict[str, Any]) -> None:
    recipe = pool.recipe("task_arithmetic", parameters, (0.7, 0.4, 1.1), dtype="float32")
    identical(*both(pool, recipe, tmp_path))


TIES = {"density": (0.2, 0.5, 0.85)}


@pytest.mark.parametrize(
    "parameters", [{}, {"normalize": False}, {"lambda": 0.6, "int8_mask": True}]
)
def test_ties(pool: PoolOnDisk, tmp_path: Path, parameters: dict[str, Any]) -> None:
    recipe = pool.recipe("ties", parameters, (0.7, 0.4, 1.1), TIES, dtype="float32")
    identical(*both(pool, recipe, tmp_path))


def test_ties_of_extreme_densities(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("ties", None, each={"density": (0.0001, 1.0, 0.0)}, dtype="float32")
    identical(*both(pool, recipe, tmp_path))


DARE = {"density": (0.5, 0.25, 0.8)}


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("normalize", [True, False])
def test_dare_without_rescaling(
    pool: PoolOnDisk, tmp_path: Path, our_masks: list[str], method: str, normalize: bool
) -> None:
    given = {"rescale": False, "normalize": normalize}
    recipe = pool.recipe(method, given, (0.7, 0.4, 1.1), DARE, dtype="float32")
    identical(*both(pool, recipe, tmp_path))
    assert len(our_masks) == 3 * len(read_weights(pool.reference))


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("parameters", [{}, {"rescale": True, "lambda": 0.6, "int8_mask": True}])
def test_dare_with_mergekits_rescaling(
    pool: PoolOnDisk,
    tmp_path: Path,
    our_masks: list[str],
    method: str,
    parameters: dict[str, Any],
) -> None:
    recipe = pool.recipe(method, parameters, (0.7, 0.4, 1.1), DARE, dtype="float32")
    agree(*both(pool, recipe, tmp_path), ulps=2)  # norms are summed in float64 here
    assert our_masks


USERS_FILE = """\
# As found in many model cards.
models:
  - model: {reference}
    # no parameters necessary for base model
  - model: {math}
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: {coding}
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: {safety}
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - filter: self_attn
          value: [0.1, 0.9]
        - value: 0
merge_method: ties
base_model: {reference}
parameters:
  normalize: true
  int8_mask: true
dtype: float32
"""


def test_a_users_file_with_gradients_filters_and_the_base_under_models(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    text = USERS_FILE.format(reference=pool.reference, **pool.experts)
    agree(*both(pool, text, tmp_path), ulps=1)


def test_gradients_and_filters_at_the_top_level(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("task_arithmetic", dtype="float32")
    for model in recipe["models"]:
        del model["parameters"]
    recipe["models"][1]["parameters"] = {"weight": [{"filter": "q_proj", "value": 0.9}]}
    recipe["parameters"] = {"weight": [0, 0.5, 1], "lambda": [{"filter": "mlp", "value": 2}]}
    identical(*both(pool, recipe, tmp_path))


def test_numbers_in_scientific_notation(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("task_arithmetic", weight=(0.7, 0.4, 1.1), dtype="float32")
    text = yaml.safe_dump(recipe).replace("1.1", "11e-1")  # a string to YAML 1.1
    identical(*both(pool, text, tmp_path))


def test_a_gradient_over_a_single_layer(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=1)
    recipe = pool.recipe("task_arithmetic", weight=([0.2, 0.8], 0.5, 0.5), dtype="float32")
    identical(*both(pool, recipe, tmp_path))


def test_out_dtype_rounds_once(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("ties", None, (0.7, 0.4, 1.1), TIES, dtype="float32")
    identical(*both(pool, recipe | {"out_dtype": "bfloat16"}, tmp_path))


def test_tied_heads(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", tied=True)
    recipe = pool.recipe("task_arithmetic", weight=(0.7, 0.4, 1.1), dtype="float32")
    ours, theirs = both(pool, recipe, tmp_path)
    theirs.pop("lm_head.weight", None)  # mergekit may write the tied head as well
    identical(ours, theirs)


def test_models_of_different_precision(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Without dtype: the narrowest type that holds all of a tensor's values is written."""
    from safetensors import safe_open

    halves = make_pool(tmp_path / "halves", experts=1, layers=LAYERS, dtype="bf16")
    recipe = pool.recipe("task_arithmetic", weight=(0.7, 0.4, 1.1))
    recipe["models"][0]["model"] = str(halves.experts["math"])
    agree(*both(pool, recipe, tmp_path), ulps=2)
    assert json.loads((tmp_path / "ours/config.json").read_text())["torch_dtype"] == "float32"
    recipe["base_model"] = str(halves.reference)
    recipe["models"] = [{"model": str(halves.experts["math"]), "parameters": {"weight": 1.0}}]
    assert sigmerge.merge(recipe, tmp_path / "same").warnings == ()
    with safe_open(tmp_path / "same/model.safetensors", "pt") as stored:
        assert {str(stored.get_tensor(name).dtype) for name in stored.keys()} == {  # noqa: SIM118
            "torch.bfloat16"
        }
