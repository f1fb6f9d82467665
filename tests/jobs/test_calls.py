"""Evaluation calls: what is asked, in which order, what counts as best, and what is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sigmerge.errors import ScoreError
from sigmerge.jobs.calls import Calls, decided_section, experts_of, target_of
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import MeasuredScores
from sigmerge.method.calibration import RepairProposal
from sigmerge.method.objective import Objective
from sigmerge.method.tuning import Proposal

DOMAINS = ("math", "code")
ITEMS = 20


class Measured:
    """Scores candidates by a table from their first weight, and counts what it is asked."""

    name, items, side_by_side = "a table", dict.fromkeys(DOMAINS, ITEMS), True

    def __init__(self, table: Mapping[float, tuple[float, float]], kept: Sequence[float] = ()):
        self.table, self.kept = table, {*kept}
        self.asked: list[float] = []

    def candidate(self, recipe: Mapping[str, Any]) -> MeasuredScores:
        weight = recipe["models"][0]["parameters"]["weight"]
        self.asked.append(weight)
        return self._measured(self.table[weight], weight in self.kept)

    def folder(self, folder: Path) -> MeasuredScores:
        return self._measured(self.table[float(folder.name)], False)

    def _measured(self, scores: tuple[float, float], found: bool) -> MeasuredScores:
        items = {d: [[1.0] * round(ITEMS * q) + [0.0] * round(ITEMS * (1 - q))]
                 for d, q in zip(DOMAINS, scores, strict=True)}  # fmt: skip
        return MeasuredScores(dict(zip(DOMAINS, scores, strict=True)), items, 1.0, found=found)


def recipe_of(proposal: Proposal) -> dict[str, Any]:
    models = [{"model": d, "parameters": {"weight": w}}
              for d, w in zip(DOMAINS, proposal.weights, strict=True)]  # fmt: skip
    section = decided_section(proposal, DOMAINS, 7)
    repair = {} if section is None else {"repair": section}
    return {"merge_method": proposal.anchor, "models": models, **repair}


def calls_of(measured: Measured, **given: Any) -> Calls:
    told: list[tuple[str, int, int]] = []
    how = {"target": {"math": 0.9, "code": 0.8}, "objective": Objective(), "budget": 4, **given}
    options = Options(threads=2, progress=lambda *each: told.append(each))
    calls = Calls(measured, recipe_of=recipe_of, options=options, stage="tuning", **how)  # type: ignore[arg-type]
    calls.told = told  # type: ignore[attr-defined]
    return calls


def plain(*weights: float) -> list[Proposal]:
    return [Proposal("linear", (weight, 0.5)) for weight in weights]


TABLE = {0.1: (0.3, 0.3), 0.2: (0.6, 0.4), 0.3: (0.4, 0.6), 0.4: (0.1, 0.1), 2.0: (0.9, 1.2)}


def test_calls_are_counted_and_the_best_is_the_first_of_equals() -> None:
    calls = calls_of(Measured(TABLE, kept=[0.2]))
    first = calls.ask(plain(0.1, 0.2))
    second = calls.ask(plain(0.3, 0.4))
    assert [a.scores["math"] for a in (*first, *second)] == [0.3, 0.6, 0.4, 0.1]
    assert [call.call for call in calls.made] == [0, 1, 2, 3]
    assert [call.value for call in calls.made] == pytest.approx([0.3, 0.5, 0.5, 0.1])
    assert [call.best for call in calls.made] == pytest.approx([0.3, 0.5, 0.5, 0.5])
    assert calls.best == 1 and calls.replayed == 1
    assert calls.best_of([3, 2]) == 2
    assert calls.recipe(2) == recipe_of(*plain(0.3))
    assert ("tuning", 4, 4) in calls.told  # type: ignore[attr-defined]


def test_an_error_is_that_of_the_difference_to_the_best_before_the_question() -> None:
    """Candidates of one question do not know each other."""
    calls, objective = calls_of(Measured(TABLE)), Objective()
    one, two = calls.ask(plain(0.1, 0.2))
    assert [call.error for call in calls.made] == [0.0, 0.0]
    (three,) = calls.ask(plain(0.3))
    assert calls.made[2].error == objective.error(three, two) > 0
    assert calls.made[2].error != objective.error(three, one)


def test_a_floor_goes_before_a_value() -> None:
    calls = calls_of(Measured(TABLE), objective=Objective(floors={"code": 0.7}))
    calls.ask(plain(0.2, 0.3))
    assert calls.best == 1 and [call.below > 0 for call in calls.made] == [True, False]


def test_no_more_calls_are_made_than_there_are() -> None:
    measured = Measured(TABLE)
    calls = calls_of(measured, budget=2)
    calls.ask(plain(0.1))
    with pytest.raises(AssertionError, match="more calls than there are"):
        calls.ask(plain(0.2, 0.3))
    assert measured.asked == [0.1]


def test_scores_of_no_use_are_named_by_their_call() -> None:
    calls = calls_of(Measured(TABLE))
    calls.ask(plain(0.1))
    with pytest.raises(ScoreError, match=r"call 1: code: 1\.2 looks like percent"):
        calls.ask(plain(2.0))
    assert len(calls.made) == 1


def test_experts_are_checked_all_at_once() -> None:
    measured = Measured({0.1: (0.9, 0.2), 0.2: (0.3, 0.8), 0.3: (1.5, 0.8), 0.4: (-1.0, 0.0)})

    def scored(math: str, code: str) -> dict[str, MeasuredScores]:
        folders = {"math": Path(math), "code": Path(code)}
        return experts_of(folders, measured, "own", Options(threads=1))  # type: ignore[arg-type]

    assert scored("0.1", "0.2")["code"].scores == {"math": 0.3, "code": 0.8}
    with pytest.raises(ScoreError) as told:
        scored("0.4", "0.3")
    assert "experts.math.math: -1 is below 0" in str(told.value)
    assert "experts.code.math: 1.5 looks like percent" in str(told.value)


def test_a_target_is_the_experts_own_or_the_strongest() -> None:
    table = {"math": {"math": 0.5, "code": 0.9}, "code": {"math": 0.7, "code": 0.6}}
    assert target_of(table, DOMAINS, "own") == {"math": 0.5, "code": 0.6}
    assert target_of(table, DOMAINS, "strongest") == {"math": 0.7, "code": 0.9}


def test_a_log_has_a_line_for_each_expert_and_call(tmp_path: Path) -> None:
    calls = calls_of(Measured(TABLE))
    repair = RepairProposal("add", 0.6, (0.1, 0.2), (0.75, 0.25), 1.0)
    calls.ask(plain(0.1))
    calls.ask([Proposal("linear", (0.2, 0.5), repair)])
    calls.write(tmp_path / "log", {"seed": 7}, {"math": MeasuredScores({"math": 1.0})})
    about, expert, first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert about == {"seed": 7}
    assert expert == {"expert": "math", "scores": {"math": 1.0}, "answers": {}}
    assert first["call"] == 0 and first["candidate"]["repair"] is None
    assert second["candidate"]["weights"] == [0.2, 0.5] and second["error"] > 0
    assert second["candidate"]["repair"] == decided_section(calls.proposals[1], DOMAINS, 7)
    assert calls.made[1].repair is not None
    assert calls.made[1].repair.shares == {"math": 0.75, "code": 0.25}
    assert calls.made[0].repair is None and decided_section(calls.proposals[0], DOMAINS, 7) is None
