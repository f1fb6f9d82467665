"""One table: whatever way a recipe is merged, its tensors have the bytes of a merge on one thread.

Rows are recipes, columns are ways. Ways that need a machine or a program of their own are tested
where these are: a GPU in engine/test_gpu.py, a cluster in cluster/test_ray.py, kills in
jobs/test_resume.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

import sigmerge
from sigmerge import _native
from sigmerge.checkpoints.writer import Output
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, Weights, make_pool, read_weights
from tests.test_recipe_forms import piped

DENSE: dict[str, dict[str, Any]] = {
    "linear": {},
    "ties": {"density": 0.3},
    "dare_ties": {"density": 0.5},
    "breadcrumbs": {"density": 0.8, "gamma": 0.05},
    "slerp": {"t": 0.4},
}
REPAIR = {"shares": {"math": 0.75, "coding": 0.25}, "capacity": 0.4, "scale": 0.6}
RECIPES = (*DENSE, "repaired")


class Case(NamedTuple):
    """A recipe, as a file too, and the folder of its merge on one thread."""

    content: dict[str, Any]
    file: Path
    made: Path


def _threads(case: Case, out: Path) -> Weights:
    sigmerge.merge(case.content, out, threads=3)
    return read_weights(out)


def _command(case: Case, out: Path) -> Weights:
    ran = command("merge", case.file, out, "--threads", "2")
    assert ran.code == 0, ran.err
    return read_weights(out)


def _pipe(case: Case, out: Path) -> Weights:
    text = case.file.read_text()
    with piped(text) as pipe:
        ran = command("merge", pipe, out)
    assert ran.code == 0, ran.err
    assert (out / "sigmerge/recipe.yaml").read_text() == text
    return read_weights(out)


def _recorded(case: Case, out: Path) -> Weights:
    sigmerge.merge(case.made / "sigmerge/recipe.yaml", out)
    return read_weights(out)


def _written_again(case: Case, out: Path) -> Weights:
    plan = sigmerge.Recipe.from_yaml(case.file).plan()
    out.with_suffix(".yaml").write_text(plan.to_yaml())
    sigmerge.Recipe.from_yaml(out.with_suffix(".yaml")).plan().save(out)
    return read_weights(out)


def _arrays(case: Case, _: Path) -> Weights:
    return dict(sigmerge.Recipe.from_yaml(case.file).plan().tensors())


def _torch(case: Case, _: Path) -> Weights:
    found = sigmerge.Recipe.from_yaml(case.file).plan().state_dict()
    return {name: values.float().numpy() for name, values in found.items()}


def _shards(case: Case, out: Path) -> Weights:
    sigmerge.merge(case.content, out, max_shard_size="6kB")
    assert len(list(out.glob("*.safetensors"))) > 2
    return read_weights(out)


def _interrupted(case: Case, out: Path) -> Weights:
    finish, done = Output.finish, 0

    def stop(self: Output, *given: Any, **more: Any) -> None:
        nonlocal done
        finish(self, *given, **more)
        done += 1
        if done == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            sigmerge.merge(case.content, out, threads=1)
    assert not out.exists()
    again = sigmerge.merge(case.content, out)
    assert "repair" in case.content or len(again.provenance.blocks_resumed) == 2
    return read_weights(out)


def _plain_instructions(case: Case, out: Path) -> Weights:
    before = _native.isa()
    _native.use_isa(_native.isas()[0])
    try:
        return _threads(case, out)
    finally:
        _native.use_isa(before)


WAYS: dict[str, Callable[[Case, Path], Weights]] = {
    "three threads": _threads,
    "the oldest instruction set": _plain_instructions,
    "the command line": _command,
    "a pipe": _pipe,
    "the recorded recipe": _recorded,
    "a plan's own YAML": _written_again,
    "arrays in memory": _arrays,
    "torch tensors in memory": _torch,
    "several shards": _shards,
    "interrupted and resumed": _interrupted,
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    root = tmp_path_factory.mktemp("ways")
    return make_pool(root, layers=3, dtype="bf16", shards=(1, 2, 1, 3), tokenizer=True)


@pytest.fixture(scope="module")
def cases(pool: PoolOnDisk) -> dict[str, Case]:
    found = {}
    for name in RECIPES:
        method = name if name in DENSE else "task_arithmetic"
        content = pool.recipe(method, DENSE.get(name), dtype="bfloat16", seed=3)
        if name == "slerp":
            content["models"] = [{"model": model["model"]} for model in content["models"][:1]]
        if name == "repaired":
            content["repair"] = REPAIR
        file = pool.write(content, f"{name}.yaml")
        sigmerge.merge(content, pool.root / name, threads=1)
        found[name] = Case(yaml.safe_load(file.read_text()), file, pool.root / name)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_way_gives_the_same_bytes(
    recipe: str, way: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases[recipe]
    wanted, found = read_weights(case.made), WAYS[way](case, tmp_path / "out")
    assert found.keys() == wanted.keys()
    other = [n for n, v in wanted.items() if np.asarray(found[n]).tobytes() != v.tobytes()]
    assert other == []


def test_the_recipes_differ(cases: dict[str, Case]) -> None:
    """So none of the comparisons holds because nothing was merged."""
    made = {b"".join(v.tobytes() for v in read_weights(c.made).values()) for c in cases.values()}
    assert len(made) == len(RECIPES)
