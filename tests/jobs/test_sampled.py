"""What `migrate` counts on a sample, beside the whole results of both tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from sigmerge.checkpoints.arrays import store
from sigmerge.checkpoints.blocks import starred
from sigmerge.errors import RecipeError
from sigmerge.evaluation.suite import load_suite
from sigmerge.jobs.foreign import foreign_file
from sigmerge.jobs.migration import migration
from sigmerge.recipe import load_recipe
from tests.command_line import sigmerge
from tests.jobs.test_mergekit_parity import both
from tests.pools import PoolOnDisk, make_pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    """Of two layers, so that a sample of two has all."""
    return make_pool(tmp_path_factory.mktemp("sampled"), experts=2, layers=2)


@pytest.mark.parametrize(
    ("method", "dtype", "shared"),
    [("ties", "float16", {"density": 0.4}), ("ties", "bfloat16", {"density": 0.4}),
     ("task_arithmetic", "bfloat16", {}), ("sce", "float16", {"select_topk": 0.5}),
     ("linear", "float16", {}), ("ties", "float32", {"density": 0.4})],
)  # fmt: skip
def test_a_sample_of_all_counts_what_differs(
    pool: PoolOnDisk, tmp_path: Path, method: str, dtype: str, shared: dict[str, Any]
) -> None:
    recipe = pool.recipe(method, shared, dtype=dtype)
    if method == "linear":
        del recipe["base_model"]
    (found,) = migration(pool.write(recipe), entries=1 << 16).samples
    ours, theirs = both(pool, recipe, tmp_path)
    counts: dict[str, int] = {}
    for name, values in theirs.items():
        differing = int(np.count_nonzero(ours[name] != values))
        counts[starred(name)] = counts.get(starred(name), 0) + differing
    assert {kind.name: kind.differing for kind in found.kinds} == counts
    assert found.computed == dtype and found.coordinates == sum(v.size for v in ours.values())
    whole = sum(counts.values()) / found.coordinates
    assert found.share("differing") == pytest.approx(whole)
    assert found.share("half_precision") == pytest.approx(whole, abs=0.002)
    assert (whole > 0.01) == (dtype != "float32")


def test_draws_are_told_apart(pool: PoolOnDisk) -> None:
    recipe = pool.recipe("dare_ties", {"density": 0.5}, dtype="float32")
    (found,) = migration(pool.write(recipe), entries=256).samples
    assert found.share("draws") > 0.5 and found.share("half_precision") == 0
    assert all(kind.entries <= 512 for kind in found.kinds)


def test_ties_are_told_apart(tmp_path: Path) -> None:
    """Task vectors of two sizes: which entries of the smaller one stay is open."""
    generator = torch.Generator().manual_seed(3)
    for name in ("base", "one", "two"):
        signs = torch.randint(-1, 2, (64, 64), generator=generator).float()
        store({"w": torch.ones(64, 64) + (0.5 * signs if name != "base" else 0)}, tmp_path / name)
    recipe = {
        "merge_method": "ties", "base_model": str(tmp_path / "base"), "dtype": "float32",
        "models": [{"model": str(tmp_path / n), "parameters": {"weight": 1, "density": 0.3}}
                   for n in ("one", "two")],
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    (found,) = migration(file, entries=1 << 16).samples
    assert found.share("ties") > 0.05 and found.share("sums") == 0


def test_the_table(pool: PoolOnDisk) -> None:
    file = pool.write(pool.recipe("ties", {"density": 0.4}, dtype="bfloat16"))
    shown = sigmerge("migrate", file).out
    assert "entries that differ from mergekit's, which computes in bfloat16" in shown
    (row,) = (line for line in shown.splitlines() if "self_attn.q_proj" in line)
    (total,) = (line for line in shown.splitlines() if line.startswith("estimate for the model"))
    assert row.count("%") == total.count("%") == 3
    assert "half precision: mergekit rounds every operation to bfloat16" in shown


def test_a_method_that_mergekit_lacks_is_not_sampled(pool: PoolOnDisk) -> None:
    assert migration(pool.write(pool.recipe("tsv")), entries=64).samples == ()


GENOME = """\
genome:
  models: [{math}, {coding}]
  base_model: {reference}
  merge_method: {method}
  layer_granularity: 2
  allow_negative_weights: true
tasks:
  - name: arc-mine
    weight: 2.0
    metric: "acc_norm,none"
  - sums
limit: 200
"""


@pytest.mark.parametrize("method", ["ties", "slerp"])
def test_a_genome_becomes_a_recipe_and_a_suite(
    pool: PoolOnDisk, tmp_path: Path, method: str
) -> None:
    file = tmp_path / "genome.yml"
    folders = {"reference": pool.reference, **pool.experts}
    file.write_text(GENOME.format(method=method, **folders))
    found = foreign_file(file)
    assert found is not None
    for name, text in found.files.items():
        (tmp_path / name).write_text(text)
    suite = load_suite(str(tmp_path / "suite.yaml"))
    assert list(suite.benchmarks) == ["arc_mine", "sums"]
    told = sigmerge("migrate", file).out
    assert told.startswith("a file of mergekit-evolve; here: sigmerge ")
    assert ("sigmerge search" in told) == (method == "ties")
    for word in ("layer_granularity", "allow_negative_weights", "has no weights", "limit"):
        assert word in told
    if method == "ties":
        recipe = load_recipe(tmp_path / "recipe.yaml")
        assert recipe.search is not None and list(recipe.experts) == ["math", "coding"]


def test_a_file_of_a_mixture(pool: PoolOnDisk, tmp_path: Path) -> None:
    file = tmp_path / "moe.yml"
    file.write_text(
        f"base_model: {pool.reference}\ngate_mode: random\nexperts:\n"
        f"  - {{source_model: {pool.experts['math']}, noise_scale: 0.1}}\n"
    )
    told = sigmerge("migrate", file).out
    assert f"sigmerge moe {file} OUT" in told
    assert "rows come from another generator" in told and "noise_scale" in told


def test_a_genome_without_models(tmp_path: Path) -> None:
    file = tmp_path / "genome.yml"
    file.write_text("genome: {models: []}\n")
    with pytest.raises(RecipeError, match="names no models"):
        foreign_file(file)
