"""A sample of the corpus of recipes through both tools; benchmarks/recipes.py runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.recipes import Case, cases, make_models, outcome

from sigmerge.operators.table import MERGEKIT

CASES = list(cases())
SAMPLE = [CASES[i] for i in range(5, len(CASES), 9)]


def test_the_corpus_has_every_method_and_a_hundred_recipes() -> None:
    assert {case.method for case in CASES} == set(MERGEKIT)
    assert len(CASES) >= 100
    assert len({(case.method, case.name) for case in CASES}) == len(CASES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case.method}: {case.name}")
def test_both_tools_agree(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.chdir(models)
    found = outcome(case, tmp_path)
    assert (found.theirs, found.ours) == ("", "")
    assert found.agrees, found
