"""The plan of every verb: a dry run, from Python as on the command line."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import sigmerge
from sigmerge import api
from sigmerge.cli.ending import app
from sigmerge.jobs.demo import DEMO_ANCHORS
from sigmerge.jobs.steps import AnalyzeStep, Description, ScoreStep
from sigmerge.lab.experiments.store import open_read_only
from sigmerge.nano.files import POOL
from tests.command_line import sigmerge as command
from tests.command_line import tree
from tests.docs.test_python_api import displayed, rows
from tests.lab.analysis.experiment import make_store
from tests.lab.experiments.test_suite import definition, write
from tests.pools import PoolOnDisk, make_pool, read_weights


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", layers=2, dtype="bf16")


def test_the_verbs_with_a_dry_run_have_a_plan() -> None:
    """`replay` is `repair --plan`, `merge_several` is `merge` of a file of several recipes.

    `try` has no name in Python.
    """
    dry = {
        command.callback.__name__
        for command in app.commands.values()
        if command.callback and "dry_run" in inspect.signature(command.callback).parameters
    }
    planned = {name for name, verb in vars(api).items() if hasattr(verb, "plan")} - {"Verb"}
    assert dry - {"try_"} == planned - {"replay", "merge_several"}


def test_a_description_is_that_of_the_command_line(pool: PoolOnDisk) -> None:
    recipe, out = pool.write(pool.recipe("linear")), pool.root / "out"
    before = tree(pool.root)
    found = sigmerge.merge.plan(recipe, out, threads=3)
    ran = command("merge", recipe, out, "--threads", "3", "--dry-run", "--json")
    assert json.loads(json.dumps(found.as_json())) == ran.json
    assert tree(pool.root) == before
    merged = sigmerge.merge(recipe, out)
    assert found.bytes_to_write == merged.provenance.bytes_written


def test_a_callable_counts_as_a_source_of_scores(pool: PoolOnDisk, tmp_path: Path) -> None:
    calls = []

    def score(checkpoint: Path) -> dict[str, float]:
        calls.append(checkpoint)
        return dict.fromkeys(pool.experts, 0.9 if checkpoint.parent == pool.root else 0.5)

    recipe = pool.recipe("linear") | {"repair": {}}
    found = sigmerge.run.plan(recipe, tmp_path / "run", score=score)
    assert [step.name for step in found.steps] == ["merge", "score", "profile", "repair", "score"]
    assert not calls and not (tmp_path / "run").exists()
    sigmerge.run(recipe, tmp_path / "run", score=score, threads=1)
    assert found.evaluation_calls == len(calls) == len(pool.experts) + 2
    anchor = tmp_path / "run/anchor"
    repair = sigmerge.repair.plan(recipe, tmp_path / "r", anchor=anchor, score=score)
    assert repair.evaluation_calls == found.evaluation_calls


def test_an_error_ends_the_plan(pool: PoolOnDisk, tmp_path: Path) -> None:
    recipe = pool.recipe("linear")
    with pytest.raises(sigmerge.errors.RecipeError):
        sigmerge.merge.plan(recipe | {"merge_method": "liner"}, tmp_path / "out")
    assert Path(sigmerge.merge(recipe, tmp_path / "out").out).is_dir()


def test_a_demo_is_the_steps_of_its_runs(tmp_path: Path) -> None:
    found = sigmerge.demo.plan(tmp_path / "new")
    made = [step.operator for step in found.steps if step.name == "merge"]
    assert made == [*DEMO_ANCHORS] and not (tmp_path / "new").exists()
    (tmp_path / "mine.txt").write_text("mine")
    assert command("demo", tmp_path, "--dry-run").code == 4


def test_anchors_count_their_evaluations(pool: PoolOnDisk, tmp_path: Path) -> None:
    content = definition(pool)
    found = sigmerge.anchors.plan(write(tmp_path, content))
    [step] = found.steps
    assert list(step.anchors) == [each["name"] for each in content["anchors"]]
    assert found.evaluation_calls == len(pool.experts) + len(content["anchors"])
    stored = sum(2 * weight.size for weight in read_weights(pool.reference).values())
    assert found.bytes_to_write == len(content["anchors"]) * stored
    ran = command("anchors", write(tmp_path, content), "--dry-run")
    assert ran.code == 0 and "3 experts and every anchor are scored" in ran.out
    wrong: dict[str, Any] = content | {"anchors": [{"name": "a", "merge_method": "liner"}]}
    assert command("anchors", write(tmp_path, wrong), "--dry-run").code == 2


def test_an_analysis_counts_runs_and_writes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "results.sqlite")
    before = tree(tmp_path)
    ran = command("analyze", tmp_path, "--dry-run", "--json")
    [step] = ran.json["steps"]
    assert step["out"] == str(tmp_path / "analysis") and tree(tmp_path) == before
    with open_read_only(store) as opened:
        assert step["runs"] == len(opened.frames().runs) > 100
    assert command("analyze", tmp_path / "none.sqlite", "--dry-run").code == 5


def test_a_probe_file_is_drawn_and_not_written(tmp_path: Path) -> None:
    out = tmp_path / "probe.jsonl"
    how = ("probe", "build", out, "--suite", POOL, "--per-domain", "3", "--json")
    ran = command(*how, "--dry-run")
    assert ran.code == 0 and not out.exists()
    [step] = ran.json["steps"]
    done = command(*how).json
    assert step["prompts"] == done["domains"] and done["prompts"] == 15
    assert step["bytes_to_write"] == out.stat().st_size
    assert command(*how, "--dry-run").code == 2


def test_a_description_displays_its_steps() -> None:
    analyze = AnalyzeStep(
        runs=1, split="<evaluation>", out="out", bytes_to_read=2_000_000, bytes_to_write=1_000_000,
        peak_memory_bytes=3_000_000, notes=("a <note>",),
    )  # fmt: skip
    score = ScoreStep(source="file", split="x", checkpoints=1, evaluation_calls=12)
    found = Description((analyze, score), 2)
    assert rows(found) == [
        "step|reads|writes|memory at most|evaluation calls",
        "analyze|2 MB|1 MB|3 MB|0", "score|0 B|0 B|0 B|12",
        "in all|2 MB|1 MB|3 MB|12",
    ]  # fmt: skip
    assert "a <note>" in displayed(found).words
