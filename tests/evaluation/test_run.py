"""Evaluations: resumed after a kill, reused by content, aggregated, and called from a recipe."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from sigmerge.commands.aggregate import aggregate
from sigmerge.commands.evaluate import evaluate
from sigmerge.commands.scores import suite_scorer
from sigmerge.errors import ScoreError, SigmergeError
from sigmerge.evaluation.aggregate import residual_gaps, summarise
from sigmerge.evaluation.store import Scored
from sigmerge.evaluation.suite import load_suite
from tests.evaluation.tiny import write_tiny

LENGTH = """
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    print(json.dumps({"id": row["id"], "even": 1 - len(row["prompt"]) % 2}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint and a suite of two domains, one of them scored by a program."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_tiny(folder / "tiny")
    rows = [{"prompt": f"{'x' * i} is {i}", "answer": str(i)} for i in range(120)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "length.py").write_text(LENGTH)
    command = f"{sys.executable} length.py {{items}}"
    suite = {
        "name": "own",
        "calibration_items": 20,
        "domains": {
            "words": {
                "said": {
                    "harness": "jsonl",
                    "files": "words.jsonl",
                    "matcher": "regex",
                    "answer": "answer",
                    "max_new_tokens": 3,
                }
            },
            "length": {
                "even": {
                    "harness": "command",
                    "files": "words.jsonl",
                    "command": command,
                    "metrics": {"odd": {"key": "even", "better": "lower"}},
                }
            },
        },
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(suite))
    return folder


def test_an_evaluation_and_its_reuse(place: Path, tmp_path: Path):
    how = {"store": tmp_path / "r.sqlite", "out": tmp_path / "out.json"}
    first = evaluate(place / "tiny", str(place / "own.yaml"), "calibration", **how)
    assert first["items"] == {"said": 20, "even": 20}
    assert first["macro"] == pytest.approx(sum(first["domains"].values()) / 2)
    assert first["usage_of_run"]["generated_tokens"] > 0
    assert json.loads((tmp_path / "out.json").read_text()) == first
    again = evaluate(place / "tiny", str(place / "own.yaml"), "calibration", **how)
    assert again["reused_items"] == 40
    assert again["usage_of_run"]["calls"] == 0
    assert again["usage_of_results"] == first["usage_of_results"]
    assert (again["domains"], again["benchmarks"]) == (first["domains"], first["benchmarks"])


def test_the_splits_of_an_evaluation_are_disjoint(place: Path, tmp_path: Path):
    items = {}
    for split in ("calibration", "evaluation", "all"):
        store = tmp_path / f"{split}.sqlite"
        evaluate(place / "tiny", str(place / "own.yaml"), split, store=store, only=("even",))
        items[split] = set(_rows(store))
    assert [len(ids) for ids in items.values()] == [20, 96, 120]
    assert not items["calibration"] & items["evaluation"]
    assert items["calibration"] | items["evaluation"] < items["all"]


def _rows(store: Path) -> dict[str, tuple[str, str]]:
    with sqlite3.connect(store) as db:
        return {
            item: (s, o) for item, s, o in db.execute("SELECT item, scores, output FROM results")
        }


def test_killed_and_resumed_equals_uninterrupted(place: Path, tmp_path: Path):
    """SIGKILL half-way; the same command then scores only what is missing."""
    store = tmp_path / "killed.sqlite"
    command = [
        sys.executable, "-m", "sigmerge.cli", "evaluate", str(place / "tiny"), "--suite",
        str(place / "own.yaml"), "--split", "all", "--benchmark", "said", "--store", str(store),
        "--json",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    while child.poll() is None and _count(store) < 16:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = _rows(store)
    assert 16 <= len(before) < 120
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    resumed = json.loads(done.stdout)
    assert resumed["reused_items"] == len(before)
    whole = tmp_path / "whole.sqlite"
    expected = evaluate(place / "tiny", str(place / "own.yaml"), "all", store=whole, only=("said",))
    assert _rows(store) == _rows(whole)
    assert resumed["benchmarks"] == expected["benchmarks"]
    for key in ("calls", "prompt_tokens", "generated_tokens"):
        assert resumed["usage_of_results"][key] == expected["usage_of_results"][key]


def _count(store: Path) -> int:
    try:
        with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM results").fetchone()[0])
    except sqlite3.Error:
        return 0


def test_programs_need_permission(tmp_path: Path):
    problem = {"task_id": "x", "prompt": "def f():", "entry_point": "f"}
    (tmp_path / "p.jsonl").write_text((json.dumps(problem) + "\n") * 5)
    mark = {"harness": "code", "dataset": "humaneval", "files": "p.jsonl",
            "metrics": {"pass@1": "pass@1"}}  # fmt: skip
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"name": "s", "domains": {"c": {"p": mark}}}))
    with pytest.raises(SigmergeError, match="--allow-code-execution"):
        evaluate(tmp_path, str(tmp_path / "s.yaml"), "all", store=tmp_path / "r.sqlite")


def test_domain_and_macro_are_unweighted_means():
    """Two benchmarks of different sizes weigh the same, and so do domains; lists are pooled."""
    suite = load_suite("mergebench")
    results = {
        "ifeval": [
            Scored({m.key: v for m in suite.benchmarks["ifeval"].metrics.values()})
            for v in ([1.0, 1.0, 0.0], [0.0])
        ],
        "m_arc": [Scored({"acc_norm,none": 1.0})] * 3,
        "m_mmlu": [Scored({"acc,none": 0.0})],
        "harmbench": [Scored({"harm": 1.0}, judge="keyword"), Scored({"harm": 0.0})],
    }
    found = summarise(suite, results)
    assert found["domains"] == {"instruction": 0.5, "multilingual": 0.5, "safety": 0.5}
    assert found["macro"] == 0.5
    assert found["judges"] == ["keyword"]
    assert "gsm8k" in found["missing"]


def test_residual_gaps_are_to_the_strongest_expert():
    experts = {"a": {"x": 0.5, "y": 0.9}, "b": {"x": 0.7, "y": 0.1}}
    gaps = residual_gaps(experts, {"x": 0.6, "y": 0.95})
    assert gaps == {"x": pytest.approx(0.1), "y": 0.0}


def test_aggregate_refuses_what_cannot_be_compared(place: Path, tmp_path: Path):
    files = []
    for split in ("calibration", "all"):
        out = tmp_path / f"{split}.json"
        evaluate(place / "tiny", str(place / "own.yaml"), split, store=tmp_path / "r.sqlite",
                 out=out, only=("even",))  # fmt: skip
        files.append(out)
    rows = aggregate(files[:1], {"words": files[0]})["rows"]
    assert rows[0]["residual_gaps"] == {"length": 0.0}
    assert rows[0]["submetrics"] == {"even.odd": rows[0]["domains"]["length"]}
    with pytest.raises(ScoreError, match="different items"):
        aggregate(files)


def test_a_recipe_measures_with_a_suite(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path))
    scorer = suite_scorer({"suite": "own.yaml", "limit": 5}, "calibration", place)
    assert set(scorer(place / "tiny")) == {"words", "length"}
    other = suite_scorer({"suite": "own.yaml", "limit": 5}, "evaluation", place)
    assert other.name != scorer.name
    with pytest.raises(ScoreError, match="limits: is not known"):
        suite_scorer({"suite": "own.yaml", "limits": 5}, "calibration", place)
