"""The demo: interrupted, it goes on; what it did not make itself, it leaves alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import sigmerge
from sigmerge.errors import OutputError, RecipeError
from sigmerge.jobs import demo as demo_module
from sigmerge.nano.files import RECIPES
from sigmerge.recipe.scored import TuneSection
from sigmerge.records import TunedScores, TuneRecord

ANCHORS = ("linear", "ties")


@pytest.fixture(scope="module")
def recipes(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped recipes, on a miniature pool and few items."""
    home = tmp_path_factory.mktemp("demo")
    shutil.copytree(mini, home / "pool")
    (home / "recipes").mkdir()
    few = f"{{suite: nano, pool: {home / 'pool'}, limit: 6}}"
    for name in ANCHORS:
        text = (RECIPES / f"{name}.yaml").read_text()
        assert text.count("{suite: nano}") == 1
        (home / f"recipes/{name}.yaml").write_text(text.replace("{suite: nano}", few))
    return home / "recipes"


@pytest.fixture(autouse=True)
def _two_anchors(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "DEMO_ANCHORS", ANCHORS)
    monkeypatch.setattr(demo_module, "RECIPES", recipes)


class Interrupt:
    """Ctrl-C while the second anchor's scores on the evaluation items are taken."""

    def __init__(self) -> None:
        self.started = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.started += stage == "evaluating" and done == 0
        if self.started == len(ANCHORS):
            raise KeyboardInterrupt


@pytest.mark.campaign
def test_an_interrupted_demo_goes_on(tmp_path: Path) -> None:
    out, whole = tmp_path / "stopped", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        sigmerge.demo(out, calls=0, progress=Interrupt())
    assert (out / "linear/run.json").exists()
    assert not (out / "ties/run.json").exists()
    left = sigmerge.demo.plan(out, calls=0)
    assert [step.operator for step in left.steps if step.name == "merge"] == ["ties"]
    went_on, expected = sigmerge.demo(out, calls=0), sigmerge.demo(whole, calls=0)
    assert went_on.rows == expected.rows
    for name in ANCHORS:
        for weights in ("anchor/model.safetensors", "repaired/model.safetensors"):
            expected_bytes = (whole / name / weights).read_bytes()
            assert (out / name / weights).read_bytes() == expected_bytes
    with pytest.raises(OutputError, match="finished demo"):
        sigmerge.demo(out)


def test_a_run_of_the_users_own_is_not_replaced(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_module, "DEMO_ANCHORS", ("linear",))
    sigmerge.run(recipes / "linear.yaml", tmp_path / "linear")
    before = (tmp_path / "linear/run.json").read_bytes()
    sigmerge.demo(tmp_path, calls=0)
    assert (tmp_path / "linear/run.json").read_bytes() == before


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match=r"holds thesis\.tex, which no demo wrote"):
        sigmerge.demo(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_too_few_calls_are_refused_before_anything_is_merged(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="at least 4 evaluation calls, not 3"):
        sigmerge.demo(tmp_path / "out", calls=3)
    assert not (tmp_path / "out").exists()


def test_a_tuning_with_other_calls_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """An interrupted demo finished its tuning with seven calls."""
    scores = TunedScores(plain={}, tuned={}, gain=None)
    settings = TuneSection(calls=7).model_dump()
    record = TuneRecord(
        out="", winner="", settings=settings, anchors=(), experts={}, calls=(), expert_runs=0,
        items_per_call={}, stopped="", plain=0, chosen=0, calibration=scores, replayed=0,
        wall_seconds=0.0, peak_memory_bytes=0,
    )  # fmt: skip
    (tmp_path / "tuned").mkdir()
    record.write(tmp_path / "tuned/tune.json")
    (tmp_path / "tuned/tune.jsonl").touch()
    left = sigmerge.demo.plan(tmp_path, calls=7)
    assert "tune" not in [step.name for step in left.steps]
    with pytest.raises(OutputError, match="holds a finished tuning"):
        sigmerge.demo.plan(tmp_path, calls=8)
