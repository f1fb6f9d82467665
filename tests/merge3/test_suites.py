"""A search on a suite of the user's own: asked in memory as the stored checkpoint is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmerge.api import search
from sigmerge.errors import ScoreError, SigmergeError
from sigmerge.evaluation.run import How, evaluate
from sigmerge.evaluation.suite import load_suite
from sigmerge.jobs.options import Options
from sigmerge.jobs.search import plan_search
from sigmerge.merge3.candidate import stored_weights
from sigmerge.merge3.scoring import SuiteScorer
from sigmerge.nano.files import POOL, load_items
from sigmerge.recipe import load_recipe
from sigmerge.recipe.scored import SearchSection

DOMAINS = ("math", "safety")
EACH = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Facts of the embedded pool as JSONL files, a suite over them, and a recipe with a search."""
    for domain in DOMAINS:
        facts = load_items("calibration", domain)[:EACH]
        lines = [json.dumps({"prompt": f.prompt, "answer": f.answer}) for f in facts]
        (tmp_path / f"{domain}.jsonl").write_text("\n".join(lines))
    write_suite(tmp_path)
    return tmp_path


def write_suite(folder: Path, **more: Any) -> None:
    marks = {
        domain: {f"{domain}-facts": {"harness": "jsonl", "files": [f"{domain}.jsonl"],
                                     "max_new_tokens": 6}}
        for domain in DOMAINS
    }  # fmt: skip
    marks["math"] |= more
    suite = {"name": "own", "calibration_items": None, "domains": marks}
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))


def recipe(folder: Path, **search: Any) -> Path:
    content = {
        "merge_method": "task_arithmetic",
        "base_model": str(POOL / "reference"),
        "models": [{"model": str(POOL / domain), "name": domain} for domain in DOMAINS],
        "search": {"population": 2, "generations": 2, "items": 4, "estimator": "mean",
                   "suite": "suite.yaml", **search},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder / "recipe.yaml"


def test_a_member_answers_in_memory_as_from_its_folder(folder: Path) -> None:
    job = plan_search(load_recipe(recipe(folder)), Options(), SearchSection())
    items = job.scorer.questions()
    assert len(items) == 2 * (EACH // 5)
    for member in ("safety", "reference"):
        answers = job.scorer(stored_weights(job.base.pool.members[member]), items)
        how = How(batch_size=8)
        found = evaluate(POOL / member, load_suite(folder / "suite.yaml"), "calibration", how)
        for domain in DOMAINS:
            own = [a for a, item in zip(answers, items, strict=True) if item.domain == domain]
            assert sum(own) / len(own) == pytest.approx(found.domains[domain])


def test_a_task_of_lm_eval_is_asked_in_memory_too(folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    (folder / "tasks").mkdir()
    task = {
        "task": "facts", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(folder / "safety.jsonl")}},
        "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "target_delimiter": " ", "generation_kwargs": {"max_gen_toks": 6, "until": ["\\n"]},
        "metric_list": [{"metric": "exact_match", "ignore_case": False}],
    }  # fmt: skip
    (folder / "tasks/facts.yaml").write_text(yaml.safe_dump(task))
    mark = {"harness": "lm_eval", "task": "facts", "include_path": "tasks",
            "metrics": {"right": "exact_match,none"}}  # fmt: skip
    write_suite(folder, harnessed=mark)
    job = plan_search(load_recipe(recipe(folder)), Options(), SearchSection())
    items = [item for item in job.scorer.questions() if item.id.startswith("harnessed/")]
    job.scorer(stored_weights(job.base.pool.members["math"]), items)
    answers = job.scorer(stored_weights(job.base.pool.members["safety"]), items)
    how = How(batch_size=8, only=("harnessed",))
    found = evaluate(POOL / "safety", load_suite(folder / "suite.yaml"), "calibration", how)
    assert sum(answers) / len(answers) == found.benchmarks["harnessed"]["right"] > 0


def test_threads_do_not_change_a_search(folder: Path, tmp_path: Path) -> None:
    journals = []
    for threads in (1, 2):
        out = tmp_path / f"found-{threads}"
        search(recipe(folder), out, threads=threads)
        journals.append((out / "search.jsonl").read_text())
        assert (out / "winner/model.safetensors").exists()
    assert journals[0] == journals[1]


def test_with_every_item_answered_the_estimate_is_the_evaluation(
    folder: Path, tmp_path: Path
) -> None:
    """A domain of two benchmarks, one of 6 items and one of 20, on which scores differ."""
    facts = load_items("calibration", "instruction")[:100]
    lines = [json.dumps({"prompt": f.prompt, "answer": f.answer}) for f in facts]
    (folder / "more.jsonl").write_text("\n".join(lines))
    more = {"harness": "jsonl", "files": ["more.jsonl"], "max_new_tokens": 6}
    write_suite(folder, more=more)
    out = tmp_path / "found"
    result = search(recipe(folder, items=1000, generations=1), out, threads=1)
    how = How(batch_size=8)
    found = evaluate(out / "winner", load_suite(folder / "suite.yaml"), "calibration", how)
    assert found.items == {"math-facts": 6, "more": 20, "safety-facts": 6}
    assert abs(found.benchmarks["more"]["match"] - found.benchmarks["math-facts"]["match"]) > 0.1
    assert result.as_json()["best"]["estimates"] == pytest.approx(found.domains)
    assert result.as_json()["best"]["estimate"] == pytest.approx(found.macro)


def test_strict_wants_every_benchmark(folder: Path) -> None:
    write_suite(folder, lost={"harness": "jsonl", "files": ["lost.jsonl"]})
    suite = load_suite(folder / "suite.yaml")
    assert list(SuiteScorer(POOL / "math", suite, How()).absent) == ["lost"]
    with pytest.raises(ScoreError, match=r"strict wants all .*(?s:.)*lost: its records are not"):
        SuiteScorer(POOL / "math", suite, How(strict=True))


def test_a_command_cannot_be_asked(folder: Path) -> None:
    mark = {"harness": "command", "command": "score.py {checkpoint} {items}",
            "metrics": {"right": "right"}, "files": ["math.jsonl"]}  # fmt: skip
    write_suite(folder, told=mark)
    with pytest.raises(ScoreError, match="told: is scored by a command"):
        plan_search(load_recipe(recipe(folder)), Options(), SearchSection())


def test_generated_code_needs_permission(folder: Path) -> None:
    mark = {"harness": "code", "dataset": "humaneval", "files": ["math.jsonl"],
            "metrics": {"pass@1": "pass@1"}}  # fmt: skip
    write_suite(folder, programs=mark)
    with pytest.raises(SigmergeError, match="code that the model wrote"):
        plan_search(load_recipe(recipe(folder)), Options(), SearchSection())
    with pytest.raises(ScoreError, match="has no 'task_id'"):
        plan_search(
            load_recipe(recipe(folder, allow_code_execution=True)), Options(), SearchSection()
        )
    problem = {"task_id": "x", "prompt": "def f():", "entry_point": "f", "base_input": [],
               "plus_input": [], "canonical_solution": " return 1", "atol": 0}  # fmt: skip
    (folder / "problems.jsonl").write_text((json.dumps(problem) + "\n") * 5)
    write_suite(folder, programs={**mark, "files": ["problems.jsonl"]})
    with pytest.raises(SigmergeError, match="code that the model wrote"):
        plan_search(load_recipe(recipe(folder)), Options(), SearchSection())
    plan_search(load_recipe(recipe(folder, allow_code_execution=True)), Options(), SearchSection())


def test_an_unknown_suite_is_told(folder: Path) -> None:
    with pytest.raises(SigmergeError, match=r"nowhere\.yaml"):
        plan_search(load_recipe(recipe(folder, suite="nowhere.yaml")), Options(), SearchSection())
