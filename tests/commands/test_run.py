"""The whole chain on a miniature pool trained from scratch, and the demo on the shipped one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import sigmerge
from sigmerge.commands import demo as demo_module
from sigmerge.commands.nano import study
from sigmerge.commands.options import Options
from sigmerge.errors import OutputError, RecipeError
from sigmerge.experiments.grid import Setting, read_cells, run_grid
from sigmerge.experiments.summary import gains, markdown
from sigmerge.nano.facts import DOMAINS
from sigmerge.nano.suite import score
from sigmerge.nano.train import train
from tests.pools import weight_bytes


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("mini") / "pool", size="mini")


def recipe(pool: Path, **repair: Any) -> dict[str, Any]:
    return {
        "merge_method": "task_arithmetic",
        "base_model": str(pool / "reference"),
        "models": [{"model": str(pool / name), "parameters": {"weight": 0.4}} for name in DOMAINS],
        "repair": {
            "probe": str(pool / "probe.jsonl"),
            "evaluate": {"suite": "nano", "pool": str(pool), "limit": 20},
            **repair,
        },
    }


def test_the_chain_end_to_end(pool: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = sigmerge.run(recipe(pool), out)
    assert {file.name for file in out.iterdir()} == {
        "anchor", "repaired", "calibration.json", "evaluation.json", "report.html", "run.json",
    }  # fmt: skip
    evaluation = json.loads((out / "evaluation.json").read_text())
    for name, folder in (("anchor", out / "anchor"), ("repaired", out / "repaired")):
        again = score(folder, "evaluation", pool=pool, limit=20).domains
        assert evaluation[name] == pytest.approx(again)
    plan = json.loads((out / "repaired/sigmerge/plan.json").read_text())
    assert list(plan["views"]) == ["representation", "direction", "sign"]
    best = {d: max(row[d] for row in plan["scores"]["experts"].values()) for d in DOMAINS}
    for domain in DOMAINS:
        gap = max(0.0, best[domain] - plan["scores"]["anchor"][domain])
        assert plan["deficit"][domain] == pytest.approx(gap)
    assert plan["guard"]["verdict"] in ("better", "level", "worse")
    assert plan["claimed"] == plan["quota"]
    assert result["evaluation"] == evaluation
    page = (out / "report.html").read_text()
    assert "Task arithmetic" in page
    assert page == (out / "repaired/sigmerge/report.html").read_text()
    two_steps = tmp_path / "two"
    sigmerge.repair(recipe(pool), two_steps, anchor=out / "anchor")
    weights = "model.safetensors"
    assert (two_steps / weights).read_bytes() == (out / "repaired" / weights).read_bytes()


def test_an_interrupted_run_goes_on_and_a_finished_one_is_safe(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    sigmerge.run(recipe(pool), out)
    with pytest.raises(OutputError, match="finished run"):
        sigmerge.run(recipe(pool), out)
    whole = weight_bytes(out / "repaired")
    (out / "run.json").unlink()
    shutil.rmtree(out / "repaired")
    before = (out / "anchor/model.safetensors").stat().st_mtime_ns

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a checkpoint was scored again")

    monkeypatch.setattr("sigmerge.nano.suite.score", refuse)
    sigmerge.run(recipe(pool), out)
    assert (out / "anchor/model.safetensors").stat().st_mtime_ns == before
    assert weight_bytes(out / "repaired") == whole


def test_a_run_writes_into_no_foreign_folder(pool: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match=r"holds thesis\.txt, which no run wrote"):
        sigmerge.run(recipe(pool), tmp_path / "mine", overwrite=True)
    plain = recipe(pool)
    del plain["repair"]
    with pytest.raises(RecipeError, match="no repair: section"):
        sigmerge.run(plain, tmp_path / "run")


def test_a_grid_fills_its_store_once(pool: Path, tmp_path: Path) -> None:
    settings = [(Setting("default", {}), 0), (Setting("mask", {"variant": "random_mask"}), 1)]
    store = tmp_path / "cells.jsonl"

    def made(anchor: str) -> dict[str, Any]:
        return {**recipe(pool), "merge_method": anchor}

    cells = run_grid({"mini": made}, ["linear", "ties"], settings, store, Options())
    assert [cell.key for cell in cells] == [
        ("mini", anchor, setting.name, seed)
        for anchor in ("linear", "ties")
        for setting, seed in settings
    ]
    lines = store.read_text().splitlines()
    store.write_text("\n".join(lines[:3]) + "\n")
    again = run_grid({"mini": made}, ["linear", "ties"], settings, store, Options())
    assert again == cells
    assert store.read_text().splitlines() == lines
    assert gains(cells)["mini", "linear"] == pytest.approx(100 * cells[0].gain)
    table = markdown(cells)
    better = sum(cell.gain > 0 for cell in cells if cell.setting == "default")
    assert f"improves {better} of 2 pairs" in table
    assert read_cells(tmp_path / "nothing") == []


def test_a_study_wants_nano_pools(tmp_path: Path) -> None:
    with pytest.raises(sigmerge.errors.PoolError, match="no nano pool"):
        study([tmp_path], ["linear"], tmp_path / "out", 1, Options())


def test_the_demo_on_the_shipped_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "ANCHORS", ("linear",))
    result = sigmerge.demo(tmp_path / "demo")
    [row] = result["rows"]
    assert row.name == "Linear soup"
    assert row.domains == 5
    assert row.gain > 0
    assert Path(result["page"]).read_text().count("Linear soup") > 0
    with pytest.raises(OutputError, match="finished demo"):
        sigmerge.demo(tmp_path / "demo")


def test_every_shipped_recipe_is_sound() -> None:
    from sigmerge.commands.merge import plan_merge
    from sigmerge.nano.files import RECIPES

    files = sorted(RECIPES.glob("*.yaml"))
    assert {file.stem for file in files} >= set(demo_module.ANCHORS)
    for file in files:
        loaded = sigmerge.load_recipe(file)
        assert list(loaded.experts) == list(DOMAINS)
        assert yaml.safe_load(loaded.text)["repair"]["evaluate"] == {"suite": "nano"}
        assert plan_merge(loaded, Options()).pool.stack.depth == 6
