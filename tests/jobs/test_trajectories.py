"""The checkpoints of one run as the models of a recipe."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from sigmerge.errors import RecipeError
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.verify import VerifyJob
from sigmerge.method.trajectories import SCHEDULES, weights
from sigmerge.recipe import load_recipe

STEPS = (1000, 200, 30, 4000)


def run_of(folder: Path, steps: tuple[int, ...] = STEPS) -> dict[int, np.ndarray]:
    draw, made = np.random.default_rng(0), {}
    (folder / "run").mkdir()
    for step in steps:
        made[step] = draw.standard_normal((40, 30)).astype(np.float32)
        save_file({"net.0.weight": made[step]}, folder / "run" / f"step-{step}.safetensors")
    return made


def written(folder: Path, models: dict[str, object], method: str = "linear") -> Path:
    file = folder / "recipe.yaml"
    models = {"glob": "run/step-*", **models}
    file.write_text(yaml.safe_dump({"merge_method": method, "models": models}))
    return file


@pytest.mark.parametrize("shape", ["cosine", "1-sqrt"])
def test_a_decay_is_emulated(shape: str) -> None:
    """Oracle: the way of training from one checkpoint to the next, each part times its rate."""
    draw, count = np.random.default_rng(1), 7
    path = draw.standard_normal((count, 5))
    rates = [(1 + math.cos(math.pi * j / count)) / 2 if shape == "cosine"
             else 1 - (j / count) ** 0.5 for j in range(count)]  # fmt: skip
    wanted = path[0].copy()
    for j in range(1, count):
        wanted += rates[j] * (path[j] - path[j - 1])
    np.testing.assert_allclose(np.array(weights(shape, count)) @ path, wanted, atol=1e-12)  # type: ignore[arg-type]


def test_an_exponential_mean() -> None:
    draw = np.random.default_rng(2)
    path = draw.standard_normal((6, 5))
    mean = path[0]
    for theta in path[1:]:
        mean = 0.8 * mean + 0.2 * theta
    np.testing.assert_allclose(np.array(weights("ema", 6, 0.8)) @ path, mean, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 2, 9, 100])
def test_weights_sum_to_one(schedule: str, count: int) -> None:
    found = weights(schedule, count)  # type: ignore[arg-type]
    assert len(found) == count
    assert min(found) >= 0
    assert math.isclose(sum(found), 1, abs_tol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_is_merged_in_the_order_of_its_steps(tmp_path: Path, schedule: str) -> None:
    made = run_of(tmp_path)
    recipe = load_recipe(written(tmp_path, {"schedule": schedule, "decay": 0.7}))
    assert [model.name for model in recipe.models] == [f"step-{step}" for step in sorted(STEPS)]
    MergeJob(recipe, tmp_path / "out", Options(threads=1)).run()
    found = load_file(tmp_path / "out" / "model.safetensors")["net.0.weight"]
    given = weights(schedule, len(STEPS), 0.7)  # type: ignore[arg-type]
    wanted = sum(w * made[step].astype(float) for w, step in zip(given, sorted(STEPS), strict=True))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert all(report.ok for report in VerifyJob(tmp_path / "out", Options(), deep=True).run())


def test_the_newest_alone(tmp_path: Path) -> None:
    run_of(tmp_path)
    recipe = load_recipe(written(tmp_path, {"last": 2, "schedule": "uniform"}))
    assert [model.name for model in recipe.models] == ["step-1000", "step-4000"]


@pytest.mark.parametrize(
    ("models", "method", "told"),
    [
        ({"glob": "run/none-*"}, "linear", "matches no checkpoint"),
        ({"schedule": "ema"}, "ties", "merge_method: linear"),
        ({"schedule": "wsd"}, "linear", "schedule"),
        ({"glbo": 1}, "linear", "glbo"),
    ],
)
def test_what_is_wrong_is_told(
    tmp_path: Path, models: dict[str, object], method: str, told: str
) -> None:
    run_of(tmp_path)
    with pytest.raises(RecipeError, match=told):
        load_recipe(written(tmp_path, models, method))


def test_a_hundred_checkpoints_with_few_descriptors(tmp_path: Path) -> None:
    run_of(tmp_path, tuple(range(100)))
    recipe = written(tmp_path, {"schedule": "1-sqrt"})
    done = subprocess.run(
        [sys.executable, "-m", "sigmerge", "merge", str(recipe), str(tmp_path / "out"), "-q"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    MergeJob(load_recipe(recipe), tmp_path / "free", Options(threads=1)).run()
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "free" / name).read_bytes()
