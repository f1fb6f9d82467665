"""Pools, methods and plans: their merges are those of recipes, and what is wrong is said early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sigmerge
from sigmerge import methods
from sigmerge.checkpoints.arrays import store
from sigmerge.errors import PoolError, RecipeError, ScoreError
from sigmerge.operators.table import OPERATORS
from sigmerge.operators.table import operator as built_in
from tests.method_stubs import STUB, stub
from tests.pools import EXPERTS, PoolOnDisk, make_pool, read_weights, weight_bytes

DOMAINS = EXPERTS[:3]
TRIED = {
    "ties": sigmerge.Ties(density=0.3, weight={"math": 1.0, "coding": 0.5, "safety": 0.75}),
    "dare": sigmerge.DareLinear(density=0.5, weight=0.4),
    "iso": sigmerge.IsoC(),
    "lines": sigmerge.Lines(on=sigmerge.TaskArithmetic(weight=0.3), alpha=0.5),
}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("objects") / "pool", dtype="bf16")


@pytest.fixture(scope="module")
def pool(disk: PoolOnDisk) -> sigmerge.Pool:
    return sigmerge.Pool(disk.reference, disk.experts)


def stored_weights(folder: Path) -> dict[str, bytes]:
    """The bytes of the files that hold weights."""
    return {n: each for n, each in weight_bytes(folder).items() if n.endswith(".safetensors")}


def scores(checkpoint: Path) -> dict[str, float]:
    return {domain: 0.9 if checkpoint.name == domain else 0.5 for domain in DOMAINS}


@pytest.mark.parametrize("name", TRIED)
def test_folder_tensors_state_dict_and_yaml_are_one_merge(
    pool: sigmerge.Pool, name: str, tmp_path: Path
) -> None:
    plan = pool.plan(TRIED[name], seed=3)
    made = plan.save(tmp_path / "folder")
    stored = read_weights(Path(made.out))
    for tensor, values in plan.tensors().items():
        np.testing.assert_array_equal(values, stored[tensor], strict=True)
    for tensor, found in plan.state_dict().items():
        assert found.dtype == torch.bfloat16
        np.testing.assert_array_equal(found.float().numpy(), stored[tensor])
    (tmp_path / "recipe.yaml").write_text(plan.to_yaml())
    again = sigmerge.Recipe.from_yaml(tmp_path / "recipe.yaml").plan().save(tmp_path / "again")
    assert stored_weights(Path(again.out)) == stored_weights(Path(made.out))


def test_a_method_is_the_recipe_with_its_numbers(disk: PoolOnDisk, tmp_path: Path) -> None:
    pool = sigmerge.Pool(disk.reference, disk.experts)
    weight = {"math": 1.0, "coding": 0.5, "safety": 0.75}
    pool.plan(sigmerge.Ties(density=0.3, weight=weight)).save(tmp_path / "objects")
    recipe = disk.recipe("ties", weight=list(weight.values()), preset="paper")
    for model in recipe["models"]:
        model["parameters"]["density"] = 0.3
    sigmerge.merge(recipe, tmp_path / "recipe")
    assert stored_weights(tmp_path / "objects") == stored_weights(tmp_path / "recipe")


def test_a_repair_in_memory_is_the_stored_one(pool: sigmerge.Pool, tmp_path: Path) -> None:
    plan = pool.plan(sigmerge.TaskArithmetic(weight=0.4)).repair(
        deficits=scores, variant="uniform_capacity", c_min=0.2, c_max=0.2
    )
    assert plan.description.steps[0].name == "merge"
    made = plan.save(tmp_path / "out")
    assert made.repair.deficit == pytest.approx(dict.fromkeys(DOMAINS, 0.4))
    stored = read_weights(tmp_path / "out")
    for tensor, values in plan.tensors().items():
        np.testing.assert_array_equal(values, stored[tensor])


def test_scores_may_stand_in_the_plan(pool: sigmerge.Pool, tmp_path: Path) -> None:
    table = {
        "experts": {d: {o: 0.9 if o == d else 0.5 for o in DOMAINS} for d in DOMAINS},
        "anchor": dict.fromkeys(DOMAINS, 0.5),
    }
    plan = pool.plan("task_arithmetic").repair(
        deficits=table, variant="uniform_capacity", c_min=0.2, c_max=0.2
    )
    assert plan.save(tmp_path / "out").repair.share == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    assert sigmerge.Recipe.from_mapping(plan.recipe.given).plan().to_yaml() == plan.to_yaml()
    with pytest.raises(ScoreError, match="experts missing"):
        pool.plan("task_arithmetic").repair(deficits={"anchor": {}}, variant="uniform_capacity")


def test_a_merge_made_elsewhere_is_repaired(pool: sigmerge.Pool, tmp_path: Path) -> None:
    pool.plan("task_arithmetic").save(tmp_path / "anchor")
    section = {"deficits": scores, "variant": "uniform_capacity", "c_min": 0.2, "c_max": 0.2}
    pool.repair(tmp_path / "anchor", **section).save(tmp_path / "one")
    pool.plan("task_arithmetic").repair(**section).save(tmp_path / "two")
    assert stored_weights(tmp_path / "one") == stored_weights(tmp_path / "two")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_state_dicts_merge_as_folders_do(disk: PoolOnDisk, kind: str, tmp_path: Path) -> None:
    members = {"reference": disk.reference, **disk.experts}
    given: dict[str, dict[str, Any]] = {n: read_weights(folder) for n, folder in members.items()}
    if kind == "torch":
        given = {
            name: {t: torch.from_numpy(v).bfloat16() for t, v in each.items()}
            for name, each in given.items()
        }
    how = sigmerge.DareTies(density=0.5, weight=0.5)
    reference = given.pop("reference")
    merged = sigmerge.merge_state_dicts(reference, given, how, seed=1)
    pool = sigmerge.Pool(disk.reference, disk.experts)
    dtype = None if kind == "torch" else "float32"
    pool.plan(how, seed=1, dtype=dtype).save(tmp_path / "out")
    stored = read_weights(tmp_path / "out")
    assert merged.keys() == stored.keys()
    for name, values in merged.items():
        plain = values.float().numpy() if kind == "torch" else values
        np.testing.assert_array_equal(plain, stored[name])


def test_experts_of_a_list_have_numbers() -> None:
    reference = {"w": np.zeros((2, 2), np.float32)}
    experts = [{"w": np.full((2, 2), value, np.float32)} for value in (1.0, 3.0)]
    merged = sigmerge.merge_state_dicts(
        reference, experts, sigmerge.TaskArithmetic(weight={"expert_0": 1.0, "expert_1": 0.5})
    )
    np.testing.assert_array_equal(merged["w"], np.full((2, 2), 2.5, np.float32))
    with pytest.raises(PoolError, match="complex64 is no type of tensor"):
        sigmerge.merge_state_dicts({"w": np.zeros(2, np.complex64)}, experts, "linear")


class Model(torch.nn.Module):
    def __init__(self, inner: int = 3) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, inner)
        self.second = torch.nn.Linear(inner, 2)
        self.tied = self.second


def test_a_merge_is_loaded_into_a_module(tmp_path: Path) -> None:
    one, two = Model(), Model()
    kept = [n for n in one.state_dict() if not n.startswith("tied")]  # what a checkpoint stores
    folders = {
        name: store({n: model.state_dict()[n] for n in kept}, tmp_path / name)
        for name, model in {"one": one, "two": two}.items()
    }
    plan = sigmerge.Pool(None, folders).plan("linear")
    merged = plan.load(Model())
    wanted = (one.second.weight + two.second.weight) / 2
    assert isinstance(merged, Model)
    torch.testing.assert_close(merged.tied.weight, wanted)
    with pytest.raises(PoolError, match="the model lacks: second"):
        plan.load(torch.nn.ModuleDict({"first": one.first}))
    with pytest.raises(PoolError, match="the merge lacks: third"):
        merged.third = torch.nn.Linear(2, 2)
        plan.load(merged)
    with pytest.raises(PoolError, match=r"first\.bias: \[3\] in the merge, \[4\] in the model"):
        plan.load(Model(4))


def test_every_operator_has_a_class_with_its_parameters() -> None:
    assert set(methods.CLASSES.values()) == set(OPERATORS)
    for name, of in methods.CLASSES.items():
        made = getattr(sigmerge, name)(**({"t": 0.5} if of in ("slerp", "nearswap") else {}))
        known = {each.name for each in built_in(of).parameters}
        assert set(made.section({"a": "a"})["parameters"]) <= known | {"on"}
        assert sigmerge.Method.of(of, **made.arguments()) == made


def test_the_stub_is_current() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "run python -m tests.method_stubs"


def test_what_is_wrong_with_a_method() -> None:
    with pytest.raises(
        RecipeError, match=r"Ties cannot be made:\n.*density: must lie between 0 and 1"
    ):
        sigmerge.Ties(density=1.5)
    with pytest.raises(RecipeError, match="one value for all experts"):
        sigmerge.Ties(scope={"math": "model"})
    with pytest.raises(RecipeError, match=r"math\.density: must be a number"):
        sigmerge.Ties(density={"math": "many"})
    with pytest.raises(TypeError, match="did you mean 'density'"):
        sigmerge.Method.of("ties", densty=0.1)
    with pytest.raises(RecipeError, match="did you mean 'ties'"):
        sigmerge.Method.of("tie")
    with pytest.raises(FrozenInstanceError):
        sigmerge.Ties().density = 0.5  # type: ignore[misc]
    assert replace(sigmerge.Ties(), density=0.5) == sigmerge.Ties(density=0.5)


def test_what_is_wrong_with_a_pool(pool: sigmerge.Pool, disk: PoolOnDisk, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="needs experts"):
        sigmerge.Pool(disk.reference)
    with pytest.raises(RecipeError, match="nowhere"):
        sigmerge.Pool(disk.reference, math=tmp_path / "nowhere")
    with pytest.raises(RecipeError, match=r"weight: .*maths.* did you mean 'math'"):
        pool.plan(sigmerge.Ties(weight={"maths": 1.0}))
    with pytest.raises(TypeError, match="no method"):
        pool.plan(3)  # type: ignore[arg-type]
    assert repr(pool).startswith("Pool of 3 experts (math, coding, safety), 2 layers")
    assert (
        "reads" in repr(pool.plan("linear"))
        and "evaluation calls" in pool.plan("linear")._repr_html_()
    )


def test_an_operator_of_ones_own(pool: sigmerge.Pool, tmp_path: Path) -> None:
    @sigmerge.operator("objects_mean", parameters=[sigmerge.parameter("factor", 1.0, "of it")])
    def mean(tile: Any, site: Any) -> None:
        tile.out[:] = site.settings["factor"] * tile.experts.mean(axis=0)

    doubled = pool.plan(sigmerge.Method.of(mean, factor=2.0)).tensors()
    plain = pool.plan(sigmerge.TaskArithmetic(weight=2 / 3), dtype="float32").tensors()
    assert doubled.keys() == plain.keys()
    for name, values in doubled.items():
        np.testing.assert_allclose(values, plain[name], rtol=0.01, atol=1e-6)


def test_a_score_may_return_items(pool: sigmerge.Pool, tmp_path: Path) -> None:
    asked: list[str] = []

    def items(checkpoint: Path) -> Mapping[str, list[float]]:
        asked.append(checkpoint.name)
        weights = read_weights(checkpoint)
        size = float(np.mean([np.abs(each).mean() for each in weights.values()]))
        return {d: [1.0, 0.0, size, float(checkpoint.name == d)] for d in DOMAINS}

    result = pool.tune(items, tmp_path / "tuned", calls=3, anchors=["task_arithmetic"])
    assert asked and result.calibration.gain is not None
    assert result.calibration.gain.items == 4 * len(DOMAINS)
    with pytest.raises(TypeError, match="ties: an anchor is an operator's name"):
        pool.tune(items, tmp_path / "other", calls=3, anchors=[sigmerge.Ties(density=0.5)])  # type: ignore[list-item]
