"""Looking at checkpoints before a merge, and the first recipe of a pool."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import PoolError
from sigmerge.recipe import load_recipe
from tests.command_line import refused
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, make_pool, read_weights, write_member


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    root = tmp_path_factory.mktemp("look") / "two words"
    return make_pool(root, experts=2, layers=2, dtype="bf16", tokenizer=True)


def test_what_a_checkpoint_is(pool: PoolOnDisk) -> None:
    found = sigmerge.inspect(pool.experts["math"])
    weights = read_weights(pool.experts["math"])
    assert found.parameters == sum(w.size for w in weights.values())
    assert found.dtypes == {"bfloat16": found.parameters} and found.bytes == 2 * found.parameters
    assert (found.layers, found.tensors, found.tokens) == (2, len(weights), 48)
    assert found.architecture == "LlamaForCausalLM" and not found.tied
    words = command("inspect", pool.experts["math"]).out
    assert "2 layers (model.layers.0 …)" in words and f"{found.parameters:,} bfloat16" in words


def test_how_far_two_checkpoints_are_apart(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sigmerge.jobs.inspect.COMPARED_AT_ONCE", 100
    )  # pieces that end inside tensors
    weights = read_weights(pool.reference)
    changed = {n: w.astype(np.float64) for n, w in read_weights(pool.experts["math"]).items()}
    found = sigmerge.diff(pool.reference, pool.experts["math"], threads=2)
    by_name = {part.name: part for part in found.parts}
    assert list(by_name)[:2] == ["layer 0", "layer 1"] and found.config == {}
    for part, start in (("layer 1", "model.layers.1."), ("lm_head.weight", "lm_head.weight")):
        names = [name for name in weights if name.startswith(start)]
        gaps = np.concatenate([(changed[n] - weights[n]).ravel() for n in names])
        own = np.concatenate([weights[n].ravel() for n in names])
        assert by_name[part].coordinates == gaps.size
        assert by_name[part].changed == np.count_nonzero(gaps)
        assert by_name[part].distance == pytest.approx(np.linalg.norm(gaps))
        assert by_name[part].norm == pytest.approx(np.linalg.norm(own))
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = weights["lm_head.weight"][:40]
    other = write_member(tmp_path / "other", weights, dtype="f32")
    ran = command("diff", pool.reference, other)
    assert "lm_head.weight: [48, 16] and [40, 16]" in ran.out
    assert "model.norm.weight: [16] and none" in ran.out
    assert "config.json: torch_dtype: bfloat16 and float32" in ran.out
    (other / "config.json").unlink()
    with pytest.raises(PoolError, match=r"no config\.json"):
        sigmerge.diff(pool.reference, other)


def test_tensors_without_a_distance_are_compared_too(pool: PoolOnDisk, tmp_path: Path) -> None:
    for number in (0, 1):
        folder = shutil.copytree(pool.reference, tmp_path / str(number))
        file = folder / "model.safetensors"
        steps = {"steps": torch.tensor([number, 7]), "same": torch.tensor([7])}
        save_file({**load_file(file), **steps}, file, {"format": "pt"})
    found = sigmerge.diff(tmp_path / "0", tmp_path / "1")
    assert found.unlike == ("steps",) and not any(part.changed for part in found.parts)
    assert "steps: other values" in command("diff", tmp_path / "0", tmp_path / "1").out


def test_the_first_recipe_of_a_pool_runs(pool: PoolOnDisk, tmp_path: Path) -> None:
    for method in ("task_arithmetic", "ties", "slerp"):
        file = tmp_path / f"{method}.yaml"
        ran = command("init", pool.root, file, "--method", method, "--json")
        assert json.loads(ran.out)["text"] == file.read_text() and "# repair:" in file.read_text()
        if method != "slerp":  # which takes one model beside the base
            assert command("merge", file, tmp_path / method).code == 0
    words = refused(4, "init", pool.root, tmp_path / "ties.yaml", beside=tmp_path)
    assert "pass --overwrite to replace it" in words
    assert "is no pool" in refused(2, "init", pool.reference, tmp_path / "x", beside=tmp_path)
    told = refused(2, "init", pool.root, tmp_path / "x", "--method", "tise", beside=tmp_path)
    assert "did you mean 'ties'?" in told


def test_names_that_yaml_takes_for_something_else(pool: PoolOnDisk, tmp_path: Path) -> None:
    names = ["-x", ".inf", "1.5", "1_0", "2024-01-01", "12", "no", "x, y", "😀"]
    for name in names:
        shutil.copytree(pool.experts["math"], tmp_path / "pool" / name)
    shutil.copytree(pool.reference, tmp_path / "pool/reference")
    for file in (tmp_path / "pool/recipe.yaml", tmp_path / "recipe.yaml"):
        assert command("init", tmp_path / "pool", file).code == 0
        found = load_recipe(file)
        assert {model.name: Path(model.path).name for model in found.models} == dict(
            zip(names, names, strict=True)
        )


def test_what_a_first_recipe_never_replaces(pool: PoolOnDisk, tmp_path: Path) -> None:
    weights = pool.experts["math"] / "model.safetensors"
    for file in (weights, tmp_path):
        words = refused(4, "init", pool.root, file, "--overwrite", beside=tmp_path)
        assert "--overwrite only replaces those" in words
    (tmp_path / "r.yaml").write_text("older")
    assert command("init", pool.root, tmp_path / "r.yaml", "--overwrite").code == 0


def test_the_first_recipe_of_a_trained_pool_knows_what_scores_it(tmp_path: Path) -> None:
    from sigmerge.nano.files import POOL

    file = tmp_path / "recipe.yaml"
    assert command("init", POOL, file).code == 0
    ran = command("run", file, tmp_path / "out", "--dry-run", "--json")
    assert ran.json["evaluation_calls"] == 14, ran.err


def test_names_stay_texts_in_what_is_written(tmp_path: Path) -> None:
    """In the first recipe, and in the card, which others read, too."""
    names = ["no", "2024", "1.5", "a: b", "😀"]
    pool = make_pool(tmp_path / "pool", experts=1, layers=2, dtype="bf16", tokenizer=True)
    for name in names:
        shutil.copytree(pool.experts["math"], pool.root / name)
    assert command("init", pool.root, tmp_path / "recipe.yaml").code == 0
    given = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["models"]
    assert {model["name"] for model in given} == {"math", *names}
    sigmerge.merge(tmp_path / "recipe.yaml", tmp_path / "out")
    front = (tmp_path / "out/README.md").read_text().split("---\n")[1]
    assert set(yaml.safe_load(front)) == {"library_name", "tags"}  # local folders have no ids


def test_a_model_in_the_hubs_cache_is_inspected(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "hub/models--owner--tuned"
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text("abc123")
    shutil.copytree(pool.experts["math"], home / "snapshots/abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    ran = command("inspect", "owner/tuned")
    assert ran.code == 0 and "2 layers" in ran.out
    both = command("inspect", "owner/tuned", pool.reference, "--json").json
    assert [Path(each["folder"]).name for each in (both, *both["others"])] == [
        "abc123",
        "reference",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        said = refused(2, "inspect", "owner/other", beside=pool.root)
    assert "the hub's cache does not have it whole" in said
    assert open_checkpoint(home / "snapshots/abc123").title == "owner/tuned"
