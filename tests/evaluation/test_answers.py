"""Answers are kept by all that decides them, and by nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sigmerge import kept
from sigmerge.errors import ScoreError
from sigmerge.evaluation import run as evaluation_run
from sigmerge.evaluation.answers import KeptAnswers, Scored, settings_key
from sigmerge.evaluation.command_line import command_words
from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import Evaluation
from sigmerge.evaluation.sources import Item
from sigmerge.evaluation.suite import load_suite
from sigmerge.kept import Derivation, Inputs, look_at_parts, parts
from sigmerge.probing import generate
from sigmerge.probing.generate import Usage
from tests.command_line import sigmerge
from tests.evaluation.scored import evaluate
from tests.evaluation.tiny import write_tiny
from tests.forks import Fork

ITEMS = [Item("all", i, {"q": i}) for i in range(3)]


def _wanted(key: str = "settings") -> Derivation:
    return Derivation("answer", settings_key, Inputs({}), {"key": key})


def test_results_come_back():
    first, second = Scored({"right": 1.0, "each": [1.0, 0.0]}, ["out"], "j"), Scored({"right": 0.0})
    with parts(_wanted()) as entry:
        KeptAnswers(entry).write([(ITEMS[0], first)], Usage(1, 10, 5, 0.5))
        KeptAnswers(entry).write([(ITEMS[1], second)], Usage(2, 20, 7, 0.25))
    answers = KeptAnswers(look_at_parts(_wanted()))
    changed = Item("all", 1, {"q": "another"})
    assert answers.read([ITEMS[0], changed, ITEMS[2]]) == {"all/0": first}
    assert answers.usage(ITEMS) == Usage(3, 30, 12, 0.75)
    assert answers.usage([ITEMS[1], changed]) == Usage(2, 20, 7, 0.25)
    assert KeptAnswers(look_at_parts(_wanted("other"))).read(ITEMS) == {}


def test_a_batch_that_cannot_be_written_down_leaves_nothing():
    with parts(_wanted()) as entry:
        bad = [(ITEMS[0], Scored({"right": 1.0})), (ITEMS[1], Scored({("a", "b"): 1.0}))]  # type: ignore[dict-item]
        with pytest.raises(TypeError):
            KeptAnswers(entry).write(bad, Usage())
    assert KeptAnswers(look_at_parts(_wanted())).read(ITEMS) == {}


def test_settings_key_ignores_order():
    assert settings_key({"a": 1, "b": 2}) == settings_key({"b": 2, "a": 1})
    assert settings_key({"a": 1}) != settings_key({"a": 2})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model, and a suite whose benchmark is scored by it."""
    write_tiny(tmp_path / "tiny")
    rows = [{"prompt": f"w{i}", "answer": "w1"} for i in range(12)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mark = {"harness": "jsonl", "files": "words.jsonl", "max_new_tokens": 2}
    suite = {"name": "own", "domains": {"words": {"said": mark}}}
    (tmp_path / "own.yaml").write_text(json.dumps(suite))
    return tmp_path


def _key(place: Path, **how: Any) -> str:
    return _evaluation(place, **how).derivation("said").full


def _evaluation(place: Path, **how: Any) -> Evaluation:
    return Evaluation(place / "tiny", load_suite(place / "own.yaml"), How(**how))


def _libraries(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        known = kept._version
        patch.setattr(kept, "_version", lambda lib: "another" if lib == name else known(lib))

    return change


def test_auto_is_what_it_means_here(place: Path, monkeypatch):
    monkeypatch.setattr(generate, "model_device", lambda: "cpu")
    assert _key(place) == _key(place, dtype="float32") != _key(place, dtype="bfloat16")


def test_outdated_answers_are_named_and_taken_only_where_that_is_asked(place: Path, monkeypatch):
    first = evaluate(place / "tiny", str(place / "own.yaml"), "all")
    _libraries("transformers")(monkeypatch)
    words = ("evaluate", place / "tiny", "--suite", place / "own.yaml", "--split", "all", "--json")
    again = sigmerge(*words, "--reuse").json
    assert (again["reused_items"], again["macro"]) == (12, first["macro"])
    told = sigmerge(*words, "--dry-run")
    assert told.json["steps"][0]["items_to_score"] == 12
    assert "12 answers of said" in told.err and "not used without --reuse" in told.err
    anew = evaluate(place / "tiny", str(place / "own.yaml"), "all")
    assert anew["reused_items"] == 0


def test_two_evaluations_of_one_benchmark_score_each_item_once(place: Path, tmp_path: Path):
    """One scores, and the other waits for it and finds what it has scored."""

    def work() -> None:
        found = evaluate(place / "tiny", str(place / "own.yaml"), "all")
        print(json.dumps([found["usage_of_run"]["calls"], found["macro"]]))

    forks = [Fork(work), Fork(work)]
    found = [json.loads(fork.ended().out.splitlines()[-1]) for fork in forks]
    assert sum(calls > 0 for calls, _ in found) == 1
    assert found[0][1] == found[1][1]


def test_a_checkpoint_is_identified_once_however_many_groups_are_scored(place: Path, monkeypatch):
    asked = []
    listed = evaluation_run.checkpoint_files
    monkeypatch.setattr(evaluation_run, "checkpoint_files", lambda c: asked.append(c) or listed(c))
    monkeypatch.setattr(type(load_suite(place / "own.yaml").benchmarks["said"]), "group", 2)
    evaluate(place / "tiny", str(place / "own.yaml"), "all")
    assert len(asked) <= 2  # for the key, and for what is shown


@pytest.mark.parametrize("command", ["", "  ", "score 'half"])
def test_a_wrong_command_line_is_told(command: str):
    with pytest.raises(ScoreError, match=r"own\.command: "):
        command_words(command, "own.command")
