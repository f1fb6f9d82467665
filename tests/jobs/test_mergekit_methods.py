"""mergekit's other methods: the same recipe through sigmerge and mergekit 0.1.5, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge.errors import RecipeError
from tests.jobs.test_mergekit_parity import agree, both
from tests.pools import PoolOnDisk, make_pool, read_weights

BREADCRUMBS = {"density": (0.9, 0.5, 0.2), "gamma": (0.01, 0.1, 0.02)}
BY_DEPTH = [{"filter": "self_attn", "value": [0, 0.5, 0.3, 1]}, {"value": [1, 0.5]}]
CASES: dict[str, dict[str, Any]] = {
    "slerp": {"experts": 1, "parameters": {"t": 0.3}, "ulps": 2},
    "slerp by depth": {"method": "slerp", "experts": 1, "parameters": {"t": BY_DEPTH}, "ulps": 3},
    "nuslerp": {"experts": 2, "ulps": 1},
    "nuslerp, rows": {"method": "nuslerp", "experts": 2, "parameters": {"nuslerp_flatten": False}},
    "nuslerp, columns": {
        "method": "nuslerp",
        "experts": 2,
        "parameters": {"nuslerp_flatten": False, "nuslerp_row_wise": True},
    },
    "nuslerp without a base": {"method": "nuslerp", "experts": 2, "base": False, "ulps": 4},
    "multislerp": {},
    "multislerp, raw weights": {
        "method": "multislerp", "parameters": {"normalize_weights": False, "eps": 1e-6},
    },
    "multislerp without a base": {"method": "multislerp", "base": False, "ulps": 4},
    "karcher": {"ulps": 4},
    "karcher without a base": {
        "method": "karcher", "base": False, "parameters": {"max_iter": 3, "tol": 1e-6}, "ulps": 16,
    },
    "model_stock": {},
    "model_stock, rows": {
        "method": "model_stock", "parameters": {"filter_wise": True}, "ulps": 16,
    },
    "breadcrumbs": {"each": BREADCRUMBS, "ulps": 0},
    "breadcrumbs, rescaled": {
        "method": "breadcrumbs", "each": BREADCRUMBS, "parameters": {"rescale": True},
    },
    "breadcrumbs_ties": {"each": BREADCRUMBS, "parameters": {"lambda": 0.8}, "ulps": 0},
    "della, nothing dropped": {"method": "della", "parameters": {"lambda": 1.1}, "ulps": 1},
    "della_linear, nothing dropped": {
        "method": "della_linear", "parameters": {"normalize": True, "density": 1}, "ulps": 1,
    },
    "della, all dropped": {"method": "della", "parameters": {"density": 0}, "ulps": 0},
    "sce": {},
    "sce, the half": {"method": "sce", "parameters": {"select_topk": 0.5, "int8_mask": True}},
    "nearswap": {"experts": 1, "parameters": {"t": 0.01}, "ulps": 1},
    "ram": {"parameters": {"epsilon": 0.01}, "ulps": 1},
    "ramplus_tl": {"parameters": {"epsilon": 0.01, "r": 0.3, "alpha": 0.4}, "ulps": 1},
    "passthrough": {"experts": 1, "base": False, "each": {"scale": (0.7,)}, "ulps": 0},
    "passthrough by filter": {
        "method": "passthrough",
        "experts": 1,
        "base": False,
        "parameters": {"scale": [{"filter": "o_proj", "value": 0.0}, {"value": 1.0}]},
        "ulps": 0,
    },
}  # fmt: skip
"""ulps: units in the last place of a tensor's largest value by which the two may differ."""


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[int, PoolOnDisk]:
    root = tmp_path_factory.mktemp("methods")
    return {n: make_pool(root / str(n), experts=n, layers=4) for n in (1, 2, 3)}


def recipe_of(case: str, pools: dict[int, PoolOnDisk]) -> tuple[PoolOnDisk, dict[str, Any]]:
    given = CASES[case]
    pool = pools[given.get("experts", 3)]
    method = given.get("method", case)
    recipe = pool.recipe(method, given.get("parameters"), each=given.get("each"), dtype="float32")
    if not given.get("base", True):
        del recipe["base_model"]
    return pool, recipe


@pytest.mark.parametrize("case", CASES)
def test_a_method(pools: dict[int, PoolOnDisk], tmp_path: Path, case: str) -> None:
    agree(*both(*recipe_of(case, pools), tmp_path), ulps=CASES[case].get("ulps", 2))


def test_arcee_fusion_is_mergekits_in_float64(pools: dict[int, PoolOnDisk], tmp_path: Path) -> None:
    """mergekit's own float32 rounds divergences; a score at the threshold can then turn over."""
    recipe = pools[1].recipe("arcee_fusion", dtype="float64", out_dtype="float32")
    in_float32 = {**recipe, "dtype": "float32"}
    sigmerge.merge(in_float32, tmp_path / "ours")
    exact = theirs_only(recipe, tmp_path / "exact")
    rounded = theirs_only(in_float32, tmp_path / "rounded")
    ours = read_weights(tmp_path / "ours")
    agree(ours, exact, ulps=1)
    apart = sum(int((ours[n] != v).sum()) for n, v in rounded.items())
    assert apart <= 3


def theirs_only(recipe: dict[str, Any], out: Path) -> Any:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(recipe), str(out), options)
    return read_weights(out)


@pytest.mark.parametrize(("method", "epsilon"), [("della", 0.3), ("della_linear", -0.3)])
def test_della_drops_as_much_as_mergekit(tmp_path: Path, method: str, epsilon: float) -> None:
    """Other draws, the same odds: the share that stays, and its mass, agree."""
    pool = make_pool(tmp_path / "pool", experts=1, layers=8)
    given = {"rescale": False, "normalize": False, "epsilon": epsilon, "density": 0.6}
    ours, theirs = both(pool, pool.recipe(method, given, weight=(1.0,)), tmp_path)
    base, expert = read_weights(pool.reference), read_weights(pool.experts["math"])
    names = [n for n in base if n.endswith("proj.weight")]
    full = np.concatenate([(expert[n] - base[n]).ravel() for n in names])
    for merged in (ours, theirs):
        tau = np.concatenate([(merged[n] - base[n]).ravel() for n in names])
        assert abs((tau != 0).mean() - 0.6) < 0.02
        large = np.abs(full) > np.quantile(np.abs(full), 0.9)
        assert abs((tau[large] != 0).mean() - (0.6 + 0.9 * epsilon)) < 0.03


@pytest.mark.parametrize(
    ("method", "experts", "parameters", "words"),
    [
        ("slerp", 1, {}, "t is missing; give it a value without a filter"),
        ("slerp", 1, {"t": [{"filter": "mlp", "value": 1}]}, "t is missing for 27 tensors"),
        ("slerp", 3, {"t": 0.5}, r"slerp takes at most 1 beside the base model, and 3 are listed"),
        ("nuslerp", 3, {}, "nuslerp takes at most 2"),
        ("model_stock", 1, {}, "model_stock takes at least 2"),
        ("della", 3, {"density": 0.9}, r"density 0.9 and epsilon 0.15 .* density ± epsilon must"),
        ("della", 3, {"density": 0.75, "epsilon": 0.25}, "density ± epsilon must"),
        ("della", 3, {"density": 0.25, "epsilon": 0.25}, "density ± epsilon must"),
        ("della", 3, {"density": 0.25, "epsilon": -0.3}, "density ± epsilon must"),
    ],
)
def test_what_mergekit_refuses_too(
    pools: dict[int, PoolOnDisk],
    tmp_path: Path,
    method: str,
    experts: int,
    parameters: dict[str, Any],
    words: str,
) -> None:
    recipe = pools[experts].recipe(method, parameters)
    with pytest.raises((RuntimeError, ValueError)):
        theirs_only(recipe, tmp_path / "theirs")
    with pytest.raises(RecipeError, match=words):
        sigmerge.merge(recipe, tmp_path / "ours")


def test_a_stock_can_be_repaired(pools: dict[int, PoolOnDisk], tmp_path: Path) -> None:
    repair = {"shares": {"math": 0.7, "coding": 0.3}, "capacity": 0.1}
    recipe = pools[3].recipe("model_stock", repair=repair)
    repaired = sigmerge.merge(recipe, tmp_path / "repaired")
    plain = sigmerge.merge({k: v for k, v in recipe.items() if k != "repair"}, tmp_path / "plain")
    before, after = read_weights(Path(plain.out)), read_weights(Path(repaired.out))
    inside = [n for n in before if ".layers." in n]
    changed = np.mean(np.concatenate([(before[n] != after[n]).ravel() for n in inside]))
    assert 0.09 < changed < 0.11
