"""Suites: what is shipped says what the paper says, and wrong ones are refused in words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sigmerge.errors import RecipeError, ScoreError
from sigmerge.evaluation import splits
from sigmerge.evaluation.sources import SHIPPED_BENCHMARKS, Data
from sigmerge.evaluation.suite import load_suite, suite_on


def test_mergebench_is_the_papers_suite():
    suite = load_suite("mergebench")
    assert list(suite.domains) == ["math", "instruction", "coding", "multilingual", "safety"]
    assert [len(marks) for marks in suite.domains.values()] == [1, 1, 2, 3, 4]
    assert len(list(suite.submetrics)) == 17
    assert sum(mark.records or 0 for mark in suite.benchmarks.values()) == 98_940
    assert suite.benchmarks["gsm8k"].score == "flexible"
    assert suite.benchmarks["ifeval"].score == "prompt_strict"
    assert suite.benchmarks["m_arc"].languages == ["fr", "es", "de", "ru"]
    assert suite.benchmarks["harmbench"].metrics["safe"].better == "lower"


@pytest.mark.parametrize("name", [file.stem for file in SHIPPED_BENCHMARKS.glob("*.yaml")])
def test_shipped_suites_load(name: str):
    assert load_suite(name).name == name


def test_a_users_suite(tmp_path: Path):
    own = {
        "name": "own",
        "domains": {
            "law": {"bar": {"harness": "jsonl", "files": "bar.jsonl", "matcher": "choice"}},
            "sums": {
                "add": {"harness": "command", "command": "score", "metrics": {"right": "right"}},
                "gsm": {"harness": "lm_eval", "task": "gsm8k", "metrics": {"em": "exact_match,x"}},
            },
        },
    }
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(own))
    suite = load_suite(file)
    assert suite.folder == tmp_path.resolve()
    assert list(suite.benchmarks) == ["bar", "add", "gsm"]
    assert suite.domain_of("gsm") == "sums"


def test_the_suite_of_the_page_on_scores_can_be_used():
    page = (Path(__file__).parents[2] / "docs/how-to/score.md").read_text(encoding="utf-8")
    text = page.partition("```yml\n")[2].partition("```")[0]
    suite = load_suite(yaml.safe_load(text))
    assert list(suite.domains) == ["reasoning", "law"]
    assert list(suite.benchmarks) == ["arc", "rules", "bar", "briefs", "cases"]


def _one(**mark: Any) -> dict[str, Any]:
    return {"domains": {"a": {"b": mark}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"domans": {}}, "domans: is no key here; did you mean 'domains'?"),
        ({"domains": {"a": {"b": {"harness": "lm_evl"}}}}, "domains.a.b: harness: must be one of"),
        (
            {"domains": {"a": {"b": {"harness": "jsonl", "matchr": "exact"}}}},
            "domains.a.b.matchr: is no key here; did you mean 'matcher'?",
        ),
        (
            {"domains": {"a": {"b": {"harness": "jsonl", "files": [{"pth": "x"}]}}}},
            "domains.a.b.files.0.pth: is no key here; did you mean 'path'?",
        ),
        (
            {"domains": {x: {"b": {"harness": "jsonl"}} for x in "ac"}},
            "the benchmark 'b' is in two domains",
        ),
        ({"domains": {"a": {}}}, "the domain 'a' has no benchmark"),
        ({"domains": {"a": {"b": {"harness": "code", "dataset": "mbpp"}}}}, "metrics: field req"),
        (
            _one(harness="code", dataset="mbpp", metrics={"p": "pass_at_1"}),
            "domains.a.b: metrics.p: 'pass_at_1' is no metric of programs",
        ),
        (
            _one(harness="code", dataset="mbpp", samples=3, metrics={"p": "pass@10"}),
            "metrics.p: 'pass@10' needs at least 10 samples, not 3",
        ),
        (
            _one(harness="safety", measure="harm", unparsed=1, metrics={"s": "compliance"}),
            "metrics.s: 'compliance' is not measured; its measure is harm",
        ),
        (_one(harness="jsonl", metrics={"m": "exact"}), "'exact' is no metric of a matcher"),
        (_one(harness="nano", domain="math", metrics={"m": "x"}), "'x' is no metric of the pool"),
        (_one(harness="jsonl", prompt="{prompt.x}"), "b.prompt: {prompt.x} names no column"),
        (_one(harness="jsonl", prompt="{}"), "b.prompt: {} names no column"),
        (_one(harness="jsonl", prompt="{prompt"), "b.prompt: expected '}'"),
        (_one(harness="command", command=" ", metrics={"m": "m"}), "b.command: is empty"),
        (_one(harness="command", command="a 'b", metrics={"m": "m"}), "b.command: no closing"),
    ],
)
def test_wrong_suites_say_where(change: dict, words: str):
    with pytest.raises(RecipeError) as error:
        load_suite({"name": "own", "domains": {"a": {"b": {"harness": "jsonl"}}}, **change})
    assert words in str(error.value)


def test_an_unknown_name_is_guessed():
    with pytest.raises(RecipeError, match="did you mean 'mergebench'"):
        load_suite("mergebnech")


def test_a_benchmark_given_twice_is_refused(tmp_path: Path):
    mark = "b: {harness: jsonl, files: x.jsonl}"
    (tmp_path / "s.yaml").write_text(f"name: s\ndomains:\n  d:\n    {mark}\n    {mark}\n")
    with pytest.raises(RecipeError, match=r"line 5, 'domains.d.b': is given twice"):
        load_suite(tmp_path / "s.yaml")


def test_the_nano_suite_on_a_pools_data_has_the_pools_items(mini: Path, tmp_path: Path):
    """`--suite nano --data POOL` and `--suite POOL` score that pool; no other folder is taken."""
    pool = tmp_path / "pool"
    shutil.copytree(mini / "splits", pool / "splits")
    for file in (pool / "splits").rglob("*.jsonl"):
        file.write_text(file.read_text().replace('"answer": "', '"answer": "an own '))
    for suite in (suite_on("nano", Data.default(pool)), suite_on(pool, Data())):
        items, _ = splits.load_available(suite, Data())
        answers = [item.record["answer"] for each in items.values() for item in each]
        assert answers and all(answer.startswith("an own ") for answer in answers)
    with pytest.raises(ScoreError, match="a nano pool is expected"):
        suite_on("nano", Data.default(tmp_path))


def test_the_folder_of_the_environment_is_for_other_suites(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("SIGMERGE_DATA", str(tmp_path))
    assert suite_on("nano", Data.default()) == load_suite("nano")
