"""Seconds on a GPU: what is counted where one is, without one here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import sigmerge as package
from sigmerge.jobs.candidates import SCRATCH_CANDIDATE, measure_of
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import open_repair_pool
from sigmerge.lab.experiments.costs import _search_cost, merge_cost, on_gpu
from sigmerge.merge3.extract import Question
from sigmerge.recipe import load_recipe
from sigmerge.records import SearchRecord, Winner
from sigmerge.results import Captured
from tests.lab.experiments.test_suite import definition, rewritten, rows
from tests.pools import PoolOnDisk, make_pool


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", layers=2, dtype="bf16")


def test_who_answers_on_a_gpu(pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a suite of benchmarks, where torch has a GPU; a command may answer anywhere."""
    asked, commanded = (
        load_recipe(pool.recipe("linear") | {"repair": how})
        for how in ({"evaluate": {"suite": "nano"}}, {"command": "score {checkpoint}"})
    )
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert on_gpu(asked) is there
        assert on_gpu(commanded) is on_gpu(load_recipe(pool.recipe("linear"))) is False
    monkeypatch.setitem(sys.modules, "torch", None)
    assert on_gpu(asked) is False


def test_a_repair_counts_the_look_at_its_anchor(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the program that scores, which sleeps, answered on a GPU."""
    monkeypatch.setattr("sigmerge.lab.experiments.costs.on_gpu", lambda recipe: True)
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    nap = 0.1
    content = definition(pool, anchors=[{"name": "mean", "merge_method": "linear"}], repairs={})
    rewritten(
        tmp_path / "score.py", "import hashlib", f"import time; time.sleep({nap})\nimport hashlib"
    )
    package.suite(content, tmp_path / "out", threads=1)
    found = {row["kind"]: row for row in rows(tmp_path / "out")}
    assert found["expert"]["gpu_seconds"] is None  # nothing is built
    assert found["anchor"]["gpu_seconds"] == found["baseline"]["gpu_seconds"] == 0
    repair = found["default"]
    assert nap < repair["gpu_seconds"] < repair["wall_seconds"]
    assert repair["spent_seconds"] > repair["gpu_seconds"] + 3 * nap  # the looks at the experts


@pytest.mark.parametrize(
    ("device", "captures", "expected"),
    [
        ("cuda", [{"seconds": 2.5}, {"seconds": 1.0}], 3.5),
        ("cuda", [{"seconds": 2.5}, {}], None),  # the second was interrupted
        ("cuda", [], None),  # no GPU here, and nothing was captured
        ("cpu", [{"seconds": 2.5}], None),
    ],
)
def test_captures_on_a_gpu_are_counted(
    pool: PoolOnDisk,
    tmp_path: Path,
    device: str,
    captures: list[dict[str, float]],
    expected: float | None,
) -> None:
    recipe = pool.recipe("linear") | {"capture": {"device": device}}
    made = [
        Captured(expert="e", kind="features", exemplars=1, peak_memory_bytes=0, key="", folder="",
                 state="captured", **content)
        for content in captures
    ]  # fmt: skip
    merged = package.merge(recipe, tmp_path / "merged", threads=1)
    cost = merge_cost(load_recipe(recipe), Path(merged.out), made)
    assert cost.gpu_seconds == expected
    known = [content.get("seconds") for content in captures]
    if None in known:
        assert cost.wall_seconds is None
    else:
        whole = sum(known) + merged.provenance.wall_seconds
        assert cost.wall_seconds == pytest.approx(whole, abs=1e-3)


def searched(**more: Any) -> SearchRecord:
    given = {
        "out": "out", "winner": "out/winner", "operator": "ties", "experts": ("a", "b"),
        "settings": {}, "evaluation_calls": 240, "ability_runs": 4,
        "labelled_items": {"a": 100, "b": 50}, "items_per_call": {"a": 20, "b": 10},
        "candidates_in_flight": 4,
        "best": Winner(candidate=0, settings={}, estimates={"a": 0.5}, estimate=0.5),
        "best_by_generation": (0.5,), "test": {}, "held_out_error": {}, "replayed": 0,
        "wall_seconds": 60.0, "peak_memory_bytes": 0, "asked_seconds": 40.0,
    }  # fmt: skip
    return SearchRecord(**{**given, **more})


@pytest.mark.parametrize(
    ("asked", "gpu", "expected"),
    [
        (40.0, True, 40.0),
        (160.0, True, 60.0),  # four answered side by side: no longer than the search
        (None, True, None),  # another run began it
        (40.0, False, None),
    ],
)
def test_a_search_is_on_the_gpu_no_longer_than_it_runs(
    asked: float | None, gpu: bool, expected: float | None
) -> None:
    cost = _search_cost(searched(asked_seconds=asked), gpu)
    assert cost.gpu_seconds == expected
    assert cost.wall_seconds == (None if asked is None else 60.0)
    assert (cost.evaluation_calls, cost.labelled, cost.iterations) == (240, 150, 240)
    assert (cost.spent_calls, cost.spent_labelled) == (244, 240 * 30 + 4 * 150)


def test_a_calibrated_repair_counts_its_candidates(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one more look, beside those at the experts and at the anchor."""
    monkeypatch.setattr("sigmerge.lab.experiments.costs.on_gpu", lambda recipe: True)
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    nap, log = 0.1, tmp_path / "looked"
    content = definition(
        pool,
        anchors=[{"name": "mean", "merge_method": "linear"}],
        baselines=[],
        repairs={"ours": {"calibrated": {"scale": "calibrated"}}},
    )
    look = f"import time; time.sleep({nap})\nprint(folder.name, file=open({str(log)!r}, 'a'))\n"
    rewritten(tmp_path / "score.py", "scores = {}", f"{look}scores = {{}}")
    package.suite(content, tmp_path / "out", threads=1)
    found = {row["setting"]: row for row in rows(tmp_path / "out") if row["anchor"] == "mean"}
    default, calibrated = found["default"], found["calibrated"]
    candidates = log.read_text().split().count(SCRATCH_CANDIDATE)
    domains = len(pool.experts)
    assert candidates > 1
    assert default["spent_calls"] == (domains + 1) * domains
    assert calibrated["spent_calls"] == (domains + 1 + candidates) * domains
    assert calibrated["gpu_seconds"] > default["gpu_seconds"] + candidates * nap
    assert calibrated["gpu_seconds"] < calibrated["wall_seconds"]


class Slow:
    """Answers every question rightly, after a while."""

    name = "slow"

    def questions(self) -> list[Question]:
        marks = {"math": ("sums", 2), "coding": ("words", 3)}
        return [
            Question(f"{mark} {number}", mark, domain, "calibration")
            for domain, (mark, count) in marks.items()
            for number in range(count)
        ]

    def __call__(self, weights: object, questions: list[Question]) -> list[float]:
        time.sleep(0.05)
        return [1.0] * len(questions)


def test_a_candidate_in_memory_is_a_look_at_all_its_items(pool: PoolOnDisk, tmp_path: Path) -> None:
    how, recipe = Options(threads=1), pool.recipe("linear")
    opened = open_repair_pool(load_recipe(recipe), how)
    measure = measure_of(load_recipe(recipe), opened, tmp_path, how, scorer=Slow())
    assert measure is not None
    measure.candidate(recipe)
    measure.folder(Path(recipe["base_model"]))
    assert [look.labelled for look in measure.looks] == [5, 5]
    assert all(look.seconds and 0.05 <= look.seconds <= look.waited for look in measure.looks)
