"""Anchors that read exemplars, tuned: RegMean by default, captures made once, wrong input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import sigmerge
from sigmerge.errors import RecipeError
from sigmerge.jobs.options import Options
from sigmerge.jobs.tune import SHOWN_CALLS, TuneJob, pool_recipe
from sigmerge.recipe import load_recipe
from sigmerge.recipe.scored import TuneSection
from sigmerge.records import TuneRecord
from tests.command_line import sigmerge as command
from tests.jobs.tuned import Contested
from tests.kept_entries import another_cache
from tests.pools import read_weights, weight_bytes
from tests.probing import models

DOMAINS = ("coding", "math", "safety")
USUAL = ["task_arithmetic", "iso_c", "tsv"]
READING = TuneSection(calls=11, anchors=["regmean", "fisher", "linear"])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pool")
    models.write_expert(root / "reference")
    (root / "exemplars").mkdir()
    for seed, name in enumerate(DOMAINS, start=1):
        models.write_expert(root / name, seed=seed, near=root / "reference")
        models.write_exemplars(root / f"exemplars/{name}.jsonl", seed, count=5)
    return root


class Watched(Contested):
    """Keeps what was scored, and stops the tuning in the call `stop_at`."""

    def __init__(self, root: Path, stop_at: int | None = None) -> None:
        super().__init__(root, DOMAINS)
        self.stop_at, self.kept = stop_at, list[Mapping[str, Any]]()

    def __call__(self, weights: Any, items: Any) -> list[int]:
        if len(self.kept) == self.stop_at:
            raise KeyboardInterrupt
        self.kept.append({name: value.copy() for name, value in weights.items()})
        return super().__call__(weights, items)


def job(pool: Path, out: Path, settings: TuneSection, **more: Any) -> TuneJob:
    scorer = more.pop("scorer", None) or Watched(pool)
    recipe = more.pop("recipe", None) or pool_recipe(pool)
    return TuneJob(recipe, out, Options(**{"threads": 1, **more}), settings, scorer=scorer)


@pytest.fixture(scope="module")
def whole(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TuneRecord, Watched]:
    scorer, place = Watched(pool), tmp_path_factory.mktemp("whole")
    with another_cache(place / "cache"):
        return place / "out", job(pool, place / "out", READING, scorer=scorer).run(), scorer


def test_what_reads_exemplars_is_tried_where_every_expert_has_some(
    pool: Path, tmp_path: Path
) -> None:
    def tried(recipe: Any = None, **settings: Any) -> list[str]:
        section = TuneSection(calls=SHOWN_CALLS).changed(**settings)
        return list(job(pool, tmp_path / "out", section, recipe=recipe).anchors)

    assert tried() == tried(method="random") == [*USUAL, "regmean", "blend"]
    assert tried(calls=SHOWN_CALLS - 1) == USUAL
    assert tried(method="merge3") == tried(method="adamerging") == USUAL
    given = yaml.safe_load(pool_recipe(pool).text)
    del given["models"][1]["exemplars"]
    assert tried(load_recipe(given)) == USUAL


def test_calls_are_counted_and_captures_come_first(pool: Path, tmp_path: Path) -> None:
    """From a recipe whose own folder keeps the captures: every one is made, and only once."""
    heard: list[str] = []
    given = yaml.safe_load(pool_recipe(pool).text)
    given["capture"] = {"folder": str(tmp_path / "captures"), "limit": 4}
    given["tune"] = {"calls": 6, "anchors": ["regmean", "fisher"]}
    recipe = load_recipe(given)
    assert recipe.tune is not None
    scorer = Watched(pool)
    record = job(
        pool, tmp_path / "out", recipe.tune, recipe=recipe, scorer=scorer,
        progress=lambda stage, done, total: heard.append(stage),
    ).run()  # fmt: skip
    assert len(record.calls) == 6 and len(scorer.kept) == len(DOMAINS) + 6
    assert {call.anchor for call in record.calls} == {"regmean", "fisher"}
    kinds = sorted(file.parts[-3] for file in (tmp_path / "captures").rglob("*.json"))
    assert kinds == ["features"] * 3 + ["fisher"] * 3
    capturing = [i for i, stage in enumerate(heard) if stage.startswith("capturing")]
    assert {heard[i] for i in capturing} == {f"capturing {name}" for name in DOMAINS}
    assert max(capturing) < heard.index("tuning")


@pytest.mark.usefixtures("own_cache")
def test_what_was_scored_is_stored_and_made_again(
    pool: Path, whole: tuple[Path, TuneRecord, Watched], tmp_path: Path
) -> None:
    """Weights in memory, of the folder, and of its recipe, which names the exemplars."""
    out, record, scorer = whole
    assert len(record.calls) == READING.calls
    alone = TuneSection(calls=5, anchors=["regmean"])
    found = job(pool, tmp_path / "alone", alone, scorer=(watched := Watched(pool))).run()
    assert len({tuple(call.weights.values()) for call in found.calls}) > 2
    for folder, made, kept in ((out, record, scorer), (tmp_path / "alone", found, watched)):
        stored = read_weights(folder / "winner")
        scored = kept.kept[len(DOMAINS) + made.chosen]
        assert all((scored[name] == stored[name]).all() for name in stored)
    recipe = tmp_path / "alone/winner/sigmerge/recipe.yaml"
    shown = [model["exemplars"] for model in yaml.safe_load(recipe.read_text())["models"]]
    assert shown == [str(pool / f"exemplars/{name}.jsonl") for name in DOMAINS]
    weights = list(found.calls[found.chosen].weights.values())
    level = yaml.safe_load(recipe.read_text())["parameters"]["lambda"]
    assert level == pytest.approx(sum(weights) / len(weights)) != 1
    sigmerge.merge(recipe, tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(tmp_path / "alone/winner")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("stop_at", [3, pytest.param(7, marks=pytest.mark.campaign)])
def test_an_interrupted_tuning_goes_on_to_the_same_bytes(
    stop_at: int, pool: Path, whole: tuple[Path, TuneRecord, Watched], tmp_path: Path
) -> None:
    out, there = tmp_path / "out", whole[0]
    with pytest.raises(KeyboardInterrupt):
        job(pool, out, READING, scorer=Watched(pool, stop_at)).run()
    scorer = Watched(pool)
    job(pool, out, READING, scorer=scorer).run()
    assert (out / "tune.jsonl").read_text() == (there / "tune.jsonl").read_text()
    assert len(scorer.kept) == len(whole[2].kept) - stop_at
    assert weight_bytes(out / "winner") == weight_bytes(there / "winner")


def test_experts_without_exemplars_are_named(pool: Path, tmp_path: Path) -> None:
    given = yaml.safe_load(pool_recipe(pool).text)
    del given["models"][1]["exemplars"]
    out = tmp_path / "out"
    for name in ("regmean", "fisher"):
        with pytest.raises(RecipeError, match="there are none of math;") as wrong:
            job(pool, out, TuneSection(anchors=[name]), recipe=load_recipe(given)).run()
        (problem,) = wrong.value.problems
        assert problem.startswith(f"anchors: {name} reads every expert's exemplars")
    for model in given["models"]:
        model.pop("exemplars", None)
    file = tmp_path / "bare.yaml"
    file.write_text(yaml.safe_dump(given))
    failed = command("tune", str(file), str(out), "--anchor", "regmean")
    assert failed.code == 2 and "there are none of coding, math, safety" in failed.err
    assert not out.exists()


def test_a_folder_of_captures_is_that_beside_the_recipe(pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    given = {**yaml.safe_load(pool_recipe(pool).text), "capture": {"folder": "kept"}}
    file.write_text(yaml.safe_dump(given))
    tuned = job(pool, tmp_path / "out", READING, recipe=load_recipe(file))
    assert tuned.anchors["regmean"].common["capture"] == {"folder": str(tmp_path / "kept")}
