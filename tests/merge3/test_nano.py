"""The search on the embedded pool: what is answered in memory is what the stored winner answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sigmerge.cli.ending import app
from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import nano_scores
from sigmerge.evaluation.suite import nano_suite
from sigmerge.jobs.options import Options
from sigmerge.jobs.search import plan_search
from sigmerge.merge3.candidate import stored_weights
from sigmerge.merge3.scoring import SuiteScorer
from sigmerge.nano.facts import CALIBRATION, NANO_DOMAINS
from sigmerge.nano.files import POOL, RECIPES
from sigmerge.recipe import load_recipe
from sigmerge.recipe.scored import SearchSection
from tests.nano.measure import answers as stored_answers

RECIPE = str(RECIPES / "dare_ties.yaml")


def test_the_dry_run_tells_the_budget_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(app, ["search", RECIPE, str(out), "--dry-run", "--json"])
    [plan] = json.loads(ran.output)["steps"]
    assert (plan["evaluation_calls"], plan["population"], plan["generations"]) == (240, 24, 10)
    assert (plan["genes"], plan["ability_runs"]) == (10, 15)
    assert plan["labelled_items"] == dict.fromkeys(NANO_DOMAINS, CALIBRATION)
    assert plan["items_per_call"] == dict.fromkeys(NANO_DOMAINS, 20)
    text = CliRunner().invoke(app, ["search", RECIPE, str(out), "--dry-run"]).output
    assert "240 calls = 24 × 10, 100 items each, estimator gmp-irt" in text
    assert "15 respondents answer all 600 labelled items" in text
    assert not out.exists()
    (tmp_path / "thesis.txt").write_text("years of work")
    refused = CliRunner().invoke(app, ["search", RECIPE, str(tmp_path), "--dry-run"])
    assert "holds thesis.txt, which no search wrote" in str(refused.exception)


def test_items_come_from_the_calibration_split_alone() -> None:
    job = plan_search(load_recipe(RECIPES / "dare_ties.yaml"), Options(), SearchSection())
    assert isinstance(job.scorer, SuiteScorer)
    ids = {item.record["id"] for each in job.scorer.records.values() for item in each.values()}
    assert len(ids) == len(job.scorer.questions())
    assert len(ids) == len(NANO_DOMAINS) * CALIBRATION
    evaluation = {
        json.loads(line)["id"]
        for domain in NANO_DOMAINS
        for line in (POOL / "splits/evaluation" / f"{domain}.jsonl").read_text().splitlines()
    }
    assert evaluation and not ids & evaluation


@pytest.mark.parametrize("member", ["reference", "coding"])
def test_a_member_answers_in_memory_as_from_its_folder(member: str) -> None:
    """One model object serves them all: nothing of the last one is left in it."""
    job = plan_search(load_recipe(RECIPES / "dare_ties.yaml"), Options(), SearchSection())
    scorer = SuiteScorer(POOL / "safety", nano_suite(), How())
    items = [item for each in job.questions.values() for item in each[:25]]
    scorer(stored_weights(job.base.pool.members["math"]), items)
    answers = scorer(stored_weights(job.base.pool.members[member]), items)
    expected = stored_answers(POOL / member, "calibration", limit=25)
    assert list(map(bool, answers)) == [right for _, right in expected.values()]
    assert 0 < sum(answers) < len(answers)


@pytest.mark.campaign
def test_a_search_through_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = ["--population", "3", "--generations", "2", "--items", "8", "--estimator", "mean"]
    ran = CliRunner().invoke(app, ["search", RECIPE, str(out), *small])
    assert ran.exit_code == 0, ran.output
    assert "of 6 calls (0 replayed), 0 ability runs" in ran.output
    result = json.loads((out / "search.json").read_text())
    winner = nano_scores(out / "winner", "calibration")
    for domain in NANO_DOMAINS:
        seen, unseen = (
            8 * result["best"]["estimates"][domain],
            112 * result["test"][domain],
        )
        assert (seen + unseen) / CALIBRATION == pytest.approx(winner[domain])
