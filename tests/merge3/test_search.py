"""The whole search on a tiny pool: history, resume, the winner's bytes, errors, the command."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

import sigmerge
from sigmerge.cli.ending import app
from sigmerge.errors import MissingExtra, OutputError, PoolError, RecipeError, ScoreError
from sigmerge.jobs.options import Options
from sigmerge.jobs.search import ASKED_HOW, RESPONDENTS, SearchRun, plan_search
from sigmerge.merge3 import irt
from sigmerge.merge3.candidate import Weights
from sigmerge.merge3.evolve import ScoredGenotype, evolve
from sigmerge.merge3.extract import Question
from sigmerge.recipe import load_recipe
from sigmerge.recipe.scored import SearchSection
from sigmerge.recipe.space import SPACES, Genotype
from sigmerge.recipe.template import candidate_seed
from sigmerge.records import SearchRecord
from tests.forks import forked
from tests.kept_entries import another_cache, kept_values
from tests.merge3.stub import EACH, SETTINGS, TENSOR, StubScorer
from tests.pools import EXPERTS, PoolOnDisk, make_pool, read_weights, weight_bytes

pytestmark = pytest.mark.usefixtures("own_cache")
DOMAINS = EXPERTS[:3]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), dtype="bf16", tokenizer=True)


def recipe_of(pool: PoolOnDisk, method: str = "dare_ties", **more: Any) -> Path:
    models = [{"model": name} for name in DOMAINS]
    content = {"merge_method": method, "base_model": "reference", "models": models, **more}
    return pool.write(content, f"{method}.yaml")


def run(
    pool: PoolOnDisk, out: Path, settings: SearchSection = SETTINGS, **more: Any
) -> SearchRecord:
    given = {"recipe": recipe_of(pool), "scorer": StubScorer(pool.root, DOMAINS), **more}
    loaded = load_recipe(given.pop("recipe"), seed=given.pop("seed", None))
    scorer = given.pop("scorer")
    options = Options(**{"threads": 1, **given})
    return SearchRun(loaded, out, options, settings, scorer=scorer).run()


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "search.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(pool: PoolOnDisk, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    run(pool, out)
    return out


def test_calls_are_counted_to_the_one(pool: PoolOnDisk, tmp_path: Path) -> None:
    scorer = StubScorer(pool.root, DOMAINS)
    heard: list[tuple[str, int, int]] = []
    result = run(pool, tmp_path / "out", scorer=scorer, progress=lambda *e: heard.append(e))
    abilities, calls = result.as_json()["ability_runs"], result.as_json()["evaluation_calls"]
    assert (abilities, calls) == (len(DOMAINS) + 1 + len(RESPONDENTS), 12)
    asked = [len(ids) for ids in scorer.asked]
    assert asked == [3 * EACH] * abilities + [3 * 6] * calls + [3 * (EACH - 6)]
    subset, unseen = set(scorer.asked[-2]), set(scorer.asked[-1])
    assert not subset & unseen and len(subset | unseen) == 3 * EACH
    assert [e[1:] for e in heard if e[0] == "searching"] == [(i + 1, 12) for i in range(12)]
    assert result.as_json()["replayed"] == 0


def test_the_log_has_everything(pool: PoolOnDisk, whole: Path) -> None:
    header, *rest = records(whole)
    assert header["settings"] == SETTINGS.model_dump(exclude=ASKED_HOW) | {"seed": 0}
    assert {d: len(ids) for d, ids in header["items"].items()} == dict.fromkeys(DOMAINS, EACH)
    candidates = [record for record in rest if "candidate" in record]
    assert [record["candidate"] for record in candidates] == list(range(12))
    for record in candidates:
        assert len(record["genotype"]) == 6
        assert {d: len(a) for d, a in record["answers"].items()} == dict.fromkeys(DOMAINS, 6)
        assert record["estimate"] == pytest.approx(np.mean(list(record["estimates"].values())))
    result = json.loads((whole / "search.json").read_text())
    assert result["best"]["estimate"] == max(record["estimate"] for record in candidates)
    assert result["best_by_generation"] == sorted(result["best_by_generation"])
    assert set(result["held_out_error"]) == set(DOMAINS)


def test_the_winner_is_a_plain_merge_that_can_be_made_again(whole: Path, tmp_path: Path) -> None:
    made = whole / "winner" / "sigmerge" / "recipe.yaml"
    sigmerge.merge(made, tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(whole / "winner")
    recipe, result = (
        yaml.safe_load(made.read_text()),
        json.loads((whole / "search.json").read_text()),
    )
    assert recipe["seed"] == candidate_seed(0, result["best"]["candidate"])
    settings = {model["name"]: model["parameters"] for model in recipe["models"]}
    assert settings == result["best"]["settings"]


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=pytest.mark.campaign) for name in ("linear", "task_arithmetic")]
    + ["ties", "dare_ties"],
)
def test_what_was_scored_is_what_is_stored(method: str, pool: PoolOnDisk, tmp_path: Path) -> None:
    """The weights in memory are those of the folder, to the last bit, for every operator."""

    class Keeping(StubScorer):
        kept: list[Any]

        def __call__(self, weights: Any, items: Any) -> list[int]:
            self.kept = [*getattr(self, "kept", []), {n: v.copy() for n, v in weights.items()}]
            return super().__call__(weights, items)

    scorer = Keeping(pool.root, DOMAINS)
    settings = SETTINGS.changed(estimator="mean", generations=1)
    recipe = recipe_of(pool, method, preset="paper", parameters={"outside": "reference"})
    result = run(pool, tmp_path / "out", settings, recipe=recipe, scorer=scorer)
    scored = scorer.kept[result.as_json()["best"]["candidate"]]
    stored = read_weights(tmp_path / "out" / "winner")
    assert scored.keys() == stored.keys()
    assert all(np.array_equal(scored[name], stored[name]) for name in stored)


def test_the_seed_decides_everything(pool: PoolOnDisk, whole: Path, tmp_path: Path) -> None:
    run(pool, tmp_path / "same", threads=2)
    assert records(tmp_path / "same") == records(whole)
    run(pool, tmp_path / "other", seed=1)
    ours, theirs = records(whole), records(tmp_path / "other")
    assert [r["genotype"] for r in ours if "candidate" in r] != [
        r["genotype"] for r in theirs if "candidate" in r
    ]


@pytest.mark.parametrize(("die_at", "threads"), [(3, 1), (20, 1), (20, 3)])
def test_killed_and_run_again(
    die_at: int, threads: int, pool: PoolOnDisk, whole: Path, tmp_path: Path
) -> None:
    """Killed among the abilities, and in the middle of the search: not a bit is different."""
    out, dying = tmp_path / "out", StubScorer(pool.root, DOMAINS, die_at)
    killed = forked(lambda: run(pool, out, scorer=dying, threads=threads))
    assert killed.code == -signal.SIGKILL, killed
    left = len(kept_values("search"))
    assert not (out / "search.json").exists()
    assert left == die_at if threads == 1 else die_at - threads <= left <= die_at
    scorer = StubScorer(pool.root, DOMAINS)
    result = run(pool, out, scorer=scorer, threads=threads)
    assert len(scorer.asked) == 13 + 12 + 1 - left
    assert result.as_json()["replayed"] == max(0, left - 13)
    assert records(out) == records(whole)
    assert weight_bytes(out / "winner") == weight_bytes(whole / "winner")


class Crowd(StubScorer):
    """Knows how many ask it at the same time; with `together`, nobody is answered alone."""

    def __init__(self, root: Path, domains: Sequence[str], together: int = 1) -> None:
        super().__init__(root, domains)
        self.gate, self.lock = threading.Barrier(together), threading.Lock()
        self.here = self.most = 0

    def __call__(self, weights: Weights, items: Sequence[Question]) -> list[int]:
        with self.lock:
            self.here += 1
            self.most = max(self.most, self.here)
        if len(items) == 3 * 6:  # a candidate, not the winner on its unseen items
            self.gate.wait(timeout=60)
        try:
            return super().__call__(weights, items)
        finally:
            with self.lock:
                self.here -= 1


def test_candidates_are_scored_side_by_side(pool: PoolOnDisk, tmp_path: Path) -> None:
    settings = SETTINGS.changed(estimator="mean")
    crowd = Crowd(pool.root, DOMAINS, together=2)
    result = run(pool, tmp_path / "two", settings, scorer=crowd, threads=2)
    assert (crowd.most, result.as_json()["candidates_in_flight"]) == (2, 2)
    run(pool, tmp_path / "one", settings)
    assert records(tmp_path / "two") == records(tmp_path / "one")
    assert weight_bytes(tmp_path / "two/winner") == weight_bytes(tmp_path / "one/winner")


def test_no_more_candidates_at_a_time_than_fit(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmerge.jobs.search.free_memory", lambda: 1)
    crowd = Crowd(pool.root, DOMAINS)
    result = run(pool, tmp_path / "out", scorer=crowd, threads=4)
    assert (crowd.most, result.as_json()["candidates_in_flight"]) == (1, 1)


def test_a_finished_search_is_extended_at_the_price_of_the_new_calls(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    out, short = tmp_path / "out", SETTINGS.changed(generations=2)
    run(pool, out, short)
    before, scorer = records(out), StubScorer(pool.root, DOMAINS)
    result = run(pool, out, SETTINGS, scorer=scorer)
    new = [ids for ids in scorer.asked if len(ids) == 3 * 6]
    assert len(new) == 4 and result.replayed == 8 and len(scorer.asked) <= 5
    assert records(out)[1 : len(before)] == before[1:]
    with another_cache(tmp_path / "cache"):
        run(pool, tmp_path / "anew", SETTINGS)
    assert records(tmp_path / "anew") == records(out)
    assert weight_bytes(out / "winner") == weight_bytes(tmp_path / "anew/winner")


def test_the_search_finds_more_than_the_first_generation(pool: PoolOnDisk, tmp_path: Path) -> None:
    settings = SearchSection(population=10, generations=6, items=10, estimator="mean")
    result = run(pool, tmp_path / "out", settings, recipe=recipe_of(pool, "task_arithmetic"))
    first, *_, last = result.as_json()["best_by_generation"]
    assert last > first
    assert result.as_json()["ability_runs"] == 0 and result.as_json()["held_out_error"] == {}


ESTIMATORS = ("mean", "p-irt", "gp-irt", "mp-irt", "gmp-irt")
EACH_ONCE = {("uniform", name) for name in ESTIMATORS} | {("clusters", "mean")}


@pytest.mark.parametrize(
    ("extraction", "estimator"),
    [
        pytest.param(*way, marks=[] if way in EACH_ONCE else pytest.mark.campaign)
        for way in itertools.product(("uniform", "clusters"), ESTIMATORS)
    ],
)
def test_every_estimator_and_extraction(
    estimator: str, extraction: str, pool: PoolOnDisk, tmp_path: Path
) -> None:
    settings = SearchSection(
        population=4,
        generations=1,
        items=5,
        estimator=estimator,
        extraction=extraction,
        dimension=2,
    )
    result = run(pool, tmp_path / "out", settings)
    assert 0 <= result.as_json()["best"]["estimate"] <= 1
    assert (result.as_json()["ability_runs"] > 0) == (
        (estimator, extraction) != ("mean", "uniform")
    )


def test_domains_as_objectives(pool: PoolOnDisk, tmp_path: Path) -> None:
    settings = SETTINGS.changed(estimator="mean", objective="domains")
    result = run(pool, tmp_path / "out", settings, threads=2)
    kept = [r for r in records(tmp_path / "out") if "candidate" in r]
    assert len(kept) == 12 and result.as_json()["best"]["estimate"] == max(
        r["estimate"] for r in kept
    )
    run(pool, tmp_path / "mean", settings.changed(objective="mean"))
    other = [r["genotype"] for r in records(tmp_path / "mean") if "candidate" in r]
    assert other[:4] == [r["genotype"] for r in kept[:4]] and other != [r["genotype"] for r in kept]


def test_trust_weighs_answers_against_the_model(pool: PoolOnDisk, tmp_path: Path) -> None:
    """At 1 gmp-IRT is the plain mean; auto takes the formula's c from the model's own bias."""
    one = SETTINGS.changed(generations=1, trust=1.0)
    run(pool, tmp_path / "one", one)
    run(pool, tmp_path / "mean", one.changed(estimator="mean", trust=0.5))
    first = [r["estimate"] for r in records(tmp_path / "one") if "candidate" in r]
    assert first == [r["estimate"] for r in records(tmp_path / "mean") if "candidate" in r]

    def estimates(trust: Any) -> list[dict[str, float]]:
        run(pool, tmp_path / f"{trust}", one.changed(trust=trust))
        return [r["estimates"] for r in records(tmp_path / f"{trust}") if "candidate" in r]

    result = run(pool, tmp_path / "auto-1", one.changed(trust="auto"))
    answers = [r["answers"] for r in records(tmp_path / "auto-1") if "respondent" in r]
    plain, model, auto = estimates(1.0), estimates(0.0), estimates("auto")
    for domain in DOMAINS:
        variance = float(np.var([each[domain] for each in answers]))
        bias = result.as_json()["held_out_error"][domain]["bias"]
        c = bias**2 / (variance / (4 * 6) + bias**2)
        wanted = [c * a[domain] + (1 - c) * b[domain] for a, b in zip(plain, model, strict=True)]
        assert [e[domain] for e in auto] == pytest.approx(wanted)


def test_estimates_follow_from_the_log(pool: PoolOnDisk, whole: Path) -> None:
    """Every estimate again from the recorded answers: the reference and the experts are mixed."""
    lines = records(whole)[1:]
    answers = {r["respondent"]: r["answers"] for r in lines if "respondent" in r}
    members = ["reference", *DOMAINS]
    rows = [list(answers).index(name) for name in members]
    for candidate in (r for r in lines if "candidate" in r):
        for domain in DOMAINS:
            fitted = irt.fit(np.array([each[domain] for each in answers.values()]))
            rng = np.random.default_rng([0, *f"subset {domain}".encode()])
            seen = np.sort(rng.choice(EACH, SETTINGS.items, replace=False))
            right, endpoints = np.array(candidate["answers"][domain]), fitted.abilities[rows]
            mixed = irt.mixture(fitted.items[seen], right, endpoints) @ endpoints
            unseen = np.setdiff1d(range(EACH), seen)
            rest = fitted.items[unseen].probability(mixed).mean()
            model = (right.sum() + len(unseen) * rest) / EACH
            expected = (right.mean() + model) / 2
            assert candidate["estimates"][domain] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", [0, 7])
def test_the_seed_of_the_recipe_is_the_evolutions(
    seed: int, pool: PoolOnDisk, tmp_path: Path
) -> None:
    """The genotypes are those of an evolution with this seed that has the same estimates."""
    settings = SETTINGS.changed(estimator="mean")
    run(pool, tmp_path / "out", settings, seed=seed)
    made = [r for r in records(tmp_path / "out") if "candidate" in r]

    def replay(first: int, genotypes: Sequence[Genotype]) -> list[ScoredGenotype]:
        return [
            ScoredGenotype(i, genotype, {}, made[i]["estimates"], made[i]["estimate"])
            for i, genotype in enumerate(genotypes, first)
        ]

    history = evolve(SPACES["dare_ties"], len(DOMAINS), replay, 4, 3, seed)
    assert [list(each.genotype) for each in history] == [r["genotype"] for r in made]


def test_all_items_make_the_estimate_the_score(pool: PoolOnDisk, tmp_path: Path) -> None:
    result = run(pool, tmp_path / "out", SETTINGS.changed(items=EACH, generations=1))
    winner = read_weights(tmp_path / "out" / "winner")
    scorer = StubScorer(pool.root, DOMAINS)
    assert result.as_json()["best"]["estimate"] == pytest.approx(
        np.mean(scorer(winner, scorer.questions()))
    )
    assert result.as_json()["test"] == {}


def test_a_soup_without_a_reference(pool: PoolOnDisk, tmp_path: Path) -> None:
    file = pool.write(
        {"merge_method": "linear", "models": [{"model": n} for n in DOMAINS]}, "s.yaml"
    )
    result = run(pool, tmp_path / "out", SETTINGS.changed(generations=1), recipe=file)
    assert result.as_json()["ability_runs"] == len(DOMAINS) + 1
    sigmerge.merge(tmp_path / "out/winner/sigmerge/recipe.yaml", tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(tmp_path / "out" / "winner")


def test_a_finished_search_is_not_overwritten_by_chance(pool: PoolOnDisk, tmp_path: Path) -> None:
    settings = SETTINGS.changed(generations=1, estimator="mean")
    run(pool, tmp_path / "out", settings)
    with pytest.raises(OutputError, match="finished search; pass --overwrite"):
        run(pool, tmp_path / "out", settings)
    with pytest.raises(OutputError, match="finished search that differs in seed"):
        run(pool, tmp_path / "out", settings.changed(generations=2), seed=3)
    result = run(pool, tmp_path / "out", settings, seed=3, overwrite=True)
    assert result.as_json()["replayed"] == 0 and result.settings["seed"] == 3


def test_folders_that_are_not_ours(pool: PoolOnDisk, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("")
    with pytest.raises(OutputError, match=r"holds note\.txt, which no search wrote"):
        run(pool, tmp_path)
    with pytest.raises(OutputError, match="is a file"):
        run(pool, tmp_path / "note.txt")


@pytest.mark.parametrize("name", [".env", ".git/HEAD", "winner/thesis.txt", ".winner.txt"])
def test_overwrite_touches_nothing_but_the_search(
    name: str, pool: PoolOnDisk, whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    if name.startswith("winner"):
        shutil.rmtree(out / "winner")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("years of work")
    before = sorted(out.rglob("*"))
    with pytest.raises(OutputError, match=rf"holds {name.split('/')[0]}, which no search wrote"):
        run(pool, out, overwrite=True)
    assert sorted(out.rglob("*")) == before


def test_overwrite_clears_away_what_an_interrupted_search_left(
    pool: PoolOnDisk, whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / ".winner.partial/sigmerge").mkdir(parents=True)
    (out / ".search.json.12-34.partial").write_text("{")
    run(pool, out, SETTINGS.changed(generations=1, estimator="mean"), overwrite=True)
    assert {file.name for file in out.iterdir()} == {"search.jsonl", "search.json", "winner"}


def test_a_search_goes_into_no_link_no_input_and_no_checkpoint_of_others(
    pool: PoolOnDisk, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(whole)
    with pytest.raises(OutputError, match="is a link"):
        run(pool, tmp_path / "link", overwrite=True)
    for folder in (pool.root, pool.reference):
        with pytest.raises(OutputError, match="holds an input"):
            run(pool, folder, overwrite=True)
    shutil.copytree(whole / "winner", tmp_path / "out/winner")
    with pytest.raises(OutputError, match="holds winner, which no search wrote"):
        run(pool, tmp_path / "out")


def test_settings_are_checked_together(pool: PoolOnDisk) -> None:
    wrong = {"population": 1, "generations": 0, "items": 0, "estimator": "irt",
             "extraction": "random", "dimension": 0, "objective": "best"}  # fmt: skip
    with pytest.raises(RecipeError) as caught:
        SearchSection().changed(**wrong)
    assert len(caught.value.problems) == 7


def test_recipes_that_cannot_be_searched(pool: PoolOnDisk, tmp_path: Path) -> None:
    scorer = StubScorer(pool.root, DOMAINS)
    with pytest.raises(RecipeError, match="cabs cannot be searched"):
        plan_search(load_recipe(recipe_of(pool, "cabs")), Options(), SETTINGS, scorer=scorer)
    one = pool.write({"merge_method": "linear", "models": [{"model": DOMAINS[0]}]}, "one.yaml")
    with pytest.raises(RecipeError, match="gmp-irt mixes the abilities of endpoints"):
        plan_search(load_recipe(one), Options(), SETTINGS, scorer=scorer)


@pytest.mark.parametrize(
    ("library", "extra"), [("pymoo", "tune"), ("scipy", "tune"), ("torch", "models")]
)
def test_missing_extras(
    library: str, extra: str, pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=rf"{library}.*sigmerge-llm\[{extra}\]'"):
        plan_search(load_recipe(recipe_of(pool)), Options(), SETTINGS)


def test_the_embedded_suite_is_for_the_embedded_words(pool: PoolOnDisk, tmp_path: Path) -> None:
    with pytest.raises(ScoreError, match=r"is not that of the embedded pool.*Give a suite"):
        SearchRun(load_recipe(recipe_of(pool)), tmp_path / "out", Options(), SETTINGS).run()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "modeling_own.py"])
def test_answers_are_of_the_very_model(file: str, tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", dtype="bf16", tokenizer=True)
    (pool.reference / "modeling_own.py").write_text("")
    settings = SETTINGS.changed(estimator="mean", generations=1)
    scorer = StubScorer(pool.root, DOMAINS)
    run(pool, tmp_path / "first", settings, scorer=scorer)
    asked = len(scorer.asked)
    assert run(pool, tmp_path / "same", settings, scorer=scorer).replayed == 4
    assert len(scorer.asked) == asked
    (pool.reference / file).write_text((pool.reference / file).read_text() + "\n")
    assert run(pool, tmp_path / "other", settings, scorer=scorer).replayed == 0
    assert len(scorer.asked) == 2 * asked


def test_an_expert_that_changes_between_calls_stops_the_search(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", dtype="bf16")
    weights, other = (pool.experts[name] / "model.safetensors" for name in DOMAINS[:2])

    def exchanged(stage: str, done: int, _: int) -> None:
        if (stage, done) == ("searching", 5):
            shutil.copyfile(other, weights)

    with pytest.raises(PoolError, match=r"math/model\.safetensors: changed"):
        run(pool, tmp_path / "out", progress=exchanged)
    assert not (tmp_path / "out/winner").exists()


def test_every_candidate_has_drops_of_its_own() -> None:
    seeds = {candidate_seed(seed, index) for seed in range(3) for index in range(20)}
    assert len(seeds) == 60


def test_a_suite_that_is_none(pool: PoolOnDisk, tmp_path: Path) -> None:
    with pytest.raises(ScoreError, match="no splits/calibration in it"):
        plan_search(load_recipe(recipe_of(pool)), Options(), SETTINGS, suite=str(tmp_path))


def test_command_errors(pool: PoolOnDisk, tmp_path: Path) -> None:
    arguments = ["search", str(recipe_of(pool)), str(tmp_path / "out")]
    both = CliRunner().invoke(app, [*arguments, "--calls", "240", "--generations", "10"])
    assert isinstance(both.exception, RecipeError) and "not both" in str(both.exception)
    uneven = CliRunner().invoke(app, [*arguments, "--population", "25"])
    assert isinstance(uneven.exception, RecipeError)
    assert "240 evaluation calls cannot be divided into generations of 25" in str(uneven.exception)
    assert not (tmp_path / "out").exists()


def test_the_stub_reads_a_tensor_that_exists(pool: PoolOnDisk) -> None:
    assert TENSOR in read_weights(pool.reference)
