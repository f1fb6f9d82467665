"""Programs: the canonical solutions pass evalplus's tests, mutated ones fail."""

from __future__ import annotations

import sys
from itertools import combinations
from statistics import fmean

import pytest

from sigmerge.errors import ScoreError
from sigmerge.evaluation.harnesses.code import STOPS, Code, CodeScorer, check, pass_at
from sigmerge.evaluation.sources import Data, Item
from sigmerge.evaluation.suite import load_suite
from sigmerge.sandbox.run import MODES, lacks
from tests.evaluation.data import DATA, needs_data
from tests.evaluation.harnesses.test_safety import Parrot

SUITE = load_suite("mergebench")
# HumanEval/32's own solution misses its tolerance where `sum` compensates, from Python 3.12 on.
SENSITIVE = (32,) if sys.version_info < (3, 12) else ()
SAMPLE = {"humaneval_plus": (0, *SENSITIVE, 99), "mbpp_plus": (0, 60, 377)}


def test_pass_at_k_is_the_share_of_draws_with_a_success():
    right = [True] * 3 + [False] * 7
    for k in (1, 2, 5, 10):
        draws = [any(draw) for draw in combinations(right, k)]
        assert pass_at(k, 10, 3) == pytest.approx(fmean(draws))
    assert pass_at(10, 10, 0) == 0.0
    with pytest.raises(ScoreError, match="at least 10 samples"):
        pass_at(10, 5, 5)


@needs_data
@pytest.mark.parametrize("name", SAMPLE)
def test_canonical_solutions_pass_and_mutated_ones_fail(name: str):
    mark = SUITE.benchmarks[name]
    assert isinstance(mark, Code)
    items = mark.load(name, Data(DATA), SUITE.folder)
    for index in SAMPLE[name]:
        problem = items[index].record
        solution = problem["prompt"] + problem["canonical_solution"]
        wrong = f"{solution}\ndef {problem['entry_point']}(*a, **k):\n    return 'mutated'\n"
        assert check(problem, mark.dataset, solution) == "pass", problem["task_id"]
        assert check(problem, mark.dataset, wrong) == "fail", problem["task_id"]


PROBLEM = {
    "task_id": "HumanEval/0",
    "prompt": "def double(x):\n    ",
    "entry_point": "double",
    "canonical_solution": "return 2 * x\n",
    "base_input": [[1], [2]],
    "plus_input": [[-1], [0.5]],
    "atol": 0,
}


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("return x + x", "pass"),
        ("return x * x", "fail"),
        ("return 2 * abs(x)", "fail"),
        ("while True: pass", "fail"),
        ("import os; os._exit(0)", "fail"),
        ("return 2 *", "fail"),
        ("import os; os.write(1, b'x' * (2 << 20)); return x + x", "pass"),
    ],
)
def test_own_problem(body: str, verdict: str):
    """Base and plus tests both count; a program that ends the process has not passed."""
    pytest.importorskip("evalplus")
    assert check(PROBLEM, "humaneval", PROBLEM["prompt"] + body) == verdict


def test_programs_see_fresh_inputs_and_a_fresh_module_for_each_part():
    """As in evalplus: base and plus tests do not share the program's state."""
    pytest.importorskip("evalplus")
    body = "global n\n    n += 1\n    assert n <= 2\n    return 2 * x"
    assert check(PROBLEM, "humaneval", f"n = 0\ndef double(x):\n    {body}") == "pass"


@pytest.mark.parametrize(("start", "verdict"), [(0.0, "pass"), (1.0, "fail")])
def test_a_program_that_returns_very_many_numbers(start: float, verdict: str):
    """HumanEval/130 returns ten lists of a million, integers and floats mixed."""
    pytest.importorskip("evalplus")
    solution = "return [1, 3] + [i / 2 + {start} for i in range(x)]\n"
    many = {**PROBLEM, "base_input": [[3]], "plus_input": [[300_000]]}
    many["canonical_solution"] = solution.format(start=0.0)
    assert check(many, "humaneval", many["prompt"] + solution.format(start=start)) == verdict


@needs_data
@pytest.mark.parametrize("mode", MODES)
def test_solutions_pass_in_every_mode(mode: str, monkeypatch: pytest.MonkeyPatch):
    if (lack := lacks(mode)) is not None:
        pytest.skip(lack)
    monkeypatch.setattr("sigmerge.sandbox.run.best_mode", lambda: mode)
    for name in SAMPLE:
        mark = SUITE.benchmarks[name]
        assert isinstance(mark, Code)
        problem = mark.load(name, Data(DATA), SUITE.folder)[1].record
        solution = problem["prompt"] + problem["canonical_solution"]
        assert check(problem, mark.dataset, solution) == "pass", problem["task_id"]


def test_ten_samples_make_pass_at_1_and_10():
    pytest.importorskip("evalplus")
    mark = SUITE.benchmarks["humaneval_plus"]
    assert isinstance(mark, Code)
    model = Parrot([])
    answers = ["return x + x"] * 3 + ["return x"] * 7
    model.generate = lambda prompts, sampling: ([answers], None)  # type: ignore
    record = {**PROBLEM, "prompt": "def double(x):"}
    record["canonical_solution"] = "\n    return 2 * x\n"
    results, _ = CodeScorer("he", mark, model).score([Item("all", 0, record)])
    scored = results["all/0"]
    assert scored.scores == {"pass@1": pytest.approx(0.3), "pass@10": 1.0}
    assert [row["verdict"] for row in scored.output] == ["pass"] * 3 + ["fail"] * 7


def test_stop_words_end_a_completion_at_the_next_statement():
    assert "\ndef" in STOPS["humaneval"]
    assert "\nassert" in STOPS["mbpp"]
