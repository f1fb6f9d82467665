"""The whole tuning on a tiny pool: budget, resume, the winner's bytes, the guard, wrong input."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import sigmerge
from sigmerge.cli.show import tune_lines
from sigmerge.errors import OutputError, PoolError, RecipeError, ScoreError
from sigmerge.jobs.options import Options
from sigmerge.jobs.tune import TuneJob, pool_recipe
from sigmerge.pages.tuning import _scores, _steps, render
from sigmerge.recipe import load_recipe
from sigmerge.recipe.scored import TuneSection
from sigmerge.records import TuneRecord, read
from tests.command_line import sigmerge as command
from tests.forks import forked
from tests.jobs.tuned import SETTINGS, Contested
from tests.kept_entries import another_cache, kept_values
from tests.merge3.stub import EACH, TENSOR
from tests.pools import EXPERTS, PoolOnDisk, make_pool, read_weights, weight_bytes

pytestmark = pytest.mark.usefixtures("own_cache")
DOMAINS = EXPERTS[:3]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), dtype="bf16", tokenizer=True)


def recipe_of(pool: PoolOnDisk, method: str = "task_arithmetic", **more: Any) -> Path:
    models = [{"model": name} for name in DOMAINS]
    given = {"merge_method": method, "base_model": "reference", "models": models}
    parameters = {"parameters": {"weight": 0.4}} if method == "task_arithmetic" else {}
    return pool.write({**given, **parameters, **more}, f"{method}.yaml")


def run(pool: PoolOnDisk, out: Path, **more: Any) -> TuneRecord:
    recipe = load_recipe(more.pop("recipe", None) or recipe_of(pool))
    scorer = more.pop("scorer", None) or Contested(pool.root, DOMAINS)
    settings = more.pop("settings", SETTINGS)
    return TuneJob(recipe, out, Options(**{"threads": 1, **more}), settings, scorer=scorer).run()


@pytest.fixture(scope="module")
def whole(pool: PoolOnDisk, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    run(pool, out)
    return out


def recorded(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "tune.jsonl").read_text().splitlines()]


def test_calls_are_counted_to_the_one(pool: PoolOnDisk, tmp_path: Path) -> None:
    scorer = Contested(pool.root, DOMAINS)
    heard: list[tuple[str, int, int]] = []
    result = run(pool, tmp_path / "out", scorer=scorer, progress=lambda *e: heard.append(e))
    assert len(result.calls) <= SETTINGS.calls and result.expert_runs == len(DOMAINS)
    assert [len(ids) for ids in scorer.asked] == [3 * EACH] * (3 + len(result.calls))
    counted = [e[1] for e in heard if e[0] == "tuning"]
    assert counted == list(range(1, len(result.calls) + 1))
    assert any(call.repair for call in result.calls)


def test_the_log_has_every_call(whole: Path) -> None:
    header, *rest = recorded(whole)
    assert header["settings"] == SETTINGS.model_dump()
    assert [r["expert"] for r in rest[:3]] == list(DOMAINS)
    calls = rest[3:]
    assert [r["call"] for r in calls] == list(range(len(calls)))
    for record in calls:
        means = {d: np.mean(*answers) for d, answers in record["answers"].items()}
        assert record["scores"] == pytest.approx(means)
    result = read(TuneRecord, whole / "tune.json")
    assert [c.scores for c in result.calls] == [r["scores"] for r in calls]
    assert [c.error for c in result.calls] == [r["error"] for r in calls]
    assert result.best.value == max(call.value for call in result.calls) == result.calls[-1].best


class Partly(Contested):
    """Answers are worth any number from 0 to 1."""

    def __call__(self, weights: Any, items: Any) -> list[float]:
        right = super().__call__(weights, items)
        moved = float(np.abs(weights[TENSOR].ravel() - self.reference).mean())
        return [r * (0.5 + 0.5 * abs(np.sin(i + 9 * moved))) for i, r in enumerate(right)]


def test_a_tuning_is_verified_by_its_winner(whole: Path, tmp_path: Path) -> None:
    [report] = sigmerge.verify(whole, deep=True, blocks=None)
    assert report.ok and "recomputed" in report.checked
    folder = shutil.copytree(whole, tmp_path / "copy")
    (folder / "tune.json").write_text((whole / "tune.json").read_text().replace("0.", "0.1", 1))
    assert [f.check for f in sigmerge.verify(folder)[0].findings] == ["record"]
    (folder / "tune.json").unlink()
    ended, winner = sigmerge.verify(folder)
    assert "did not end" in ended.findings[0].problem and winner.ok


def test_answers_may_be_worth_a_part(pool: PoolOnDisk, tmp_path: Path) -> None:
    settings = TuneSection(calls=5, anchors=["task_arithmetic"])
    result = run(pool, tmp_path / "out", scorer=Partly(pool.root, DOMAINS), settings=settings)
    calls = [r for r in recorded(tmp_path / "out") if "call" in r]
    worth = np.array([[r["answers"][d][0] for d in DOMAINS] for r in calls])
    assert ((worth > 0) & (worth < 1)).any()
    assert [list(c.scores.values()) for c in result.calls] == pytest.approx(worth.mean(2))
    values = worth.mean((1, 2))
    for i, call in enumerate(result.calls[1:], start=1):
        differences = worth[i] - worth[values[:i].argmax()]
        assert call.error == pytest.approx(np.sqrt(differences.var(1).sum() / EACH) / len(DOMAINS))
    assert result.calibration.gain.difference == pytest.approx(values[result.chosen] - values[0])


def test_the_winner_is_made_again_without_any_evaluation(whole: Path, tmp_path: Path) -> None:
    sigmerge.merge(whole / "winner/sigmerge/recipe.yaml", tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(whole / "winner")


def test_what_was_scored_is_what_is_stored(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Weights in memory are those of the folder, to the last bit, for dense and repaired ones."""

    class Keeping(Contested):
        kept: list[Mapping[str, Any]]

        def __call__(self, weights: Any, items: Any) -> list[int]:
            self.kept = [*getattr(self, "kept", []), {n: v.copy() for n, v in weights.items()}]
            return super().__call__(weights, items)

    scorer = Keeping(pool.root, DOMAINS)
    out = tmp_path / "out"
    run(pool, out, scorer=scorer)
    _, *rest = recorded(out)
    repaired = next(i for i, r in enumerate(rest) if "call" in r and r["candidate"]["repair"])
    result = read(TuneRecord, out / "tune.json")
    for place, recipe in (
        (3 + result.chosen, out / "winner/sigmerge/recipe.yaml"),
        (repaired, written(pool, rest[repaired]["candidate"])),
    ):
        made = tmp_path / f"made{place}"
        sigmerge.merge(recipe, made)
        stored = read_weights(made)
        assert all((scorer.kept[place][name] == stored[name]).all() for name in stored)


def written(pool: PoolOnDisk, candidate: Mapping[str, Any]) -> Path:
    """The recipe of a candidate in the journal."""
    job = TuneJob(load_recipe(recipe_of(pool)), pool.root / "out", Options(), SETTINGS)
    anchor = job.anchors[candidate["anchor"]]
    return pool.write(anchor.recipe(candidate["weights"], candidate["repair"]), "again.yaml")


@pytest.mark.parametrize("die_at", [1, 15, pytest.param(4, marks=pytest.mark.campaign)])
def test_a_killed_tuning_goes_on_to_the_same_bytes(
    die_at: int, pool: PoolOnDisk, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    dying = Contested(pool.root, DOMAINS, die_at)
    assert forked(lambda: run(pool, out, scorer=dying)).code == -signal.SIGKILL
    calls = len(kept_values("candidate"))
    assert len(kept_values("score")) + calls == die_at
    scorer = Contested(pool.root, DOMAINS)
    result = run(pool, out, scorer=scorer)
    assert recorded(out) == recorded(whole)
    assert len(scorer.asked) == len(recorded(whole)) - 1 - die_at
    assert result.replayed == calls
    assert weight_bytes(out / "winner") == weight_bytes(whole / "winner")
    assert not list(out.glob(".winner*"))


def test_threads_do_not_change_the_log(pool: PoolOnDisk, whole: Path, tmp_path: Path) -> None:
    run(pool, tmp_path / "out", threads=3)
    assert recorded(tmp_path / "out") == recorded(whole)


def test_a_callable_scores_stored_folders(pool: PoolOnDisk, whole: Path, tmp_path: Path) -> None:
    """The same answers through folders lead to the same candidates."""
    stub = Contested(pool.root, DOMAINS)

    def score(folder: Path) -> dict[str, float]:
        answers = stub(read_weights(folder), stub.questions())
        rows = np.reshape(answers, (3, EACH)).mean(1)
        return dict(zip(DOMAINS, rows.tolist(), strict=True))

    settings = {"calls": SETTINGS.calls, "anchors": SETTINGS.anchors}
    result = sigmerge.tune(recipe_of(pool), tmp_path / "out", score=score, **settings, threads=1)
    same = read(TuneRecord, whole / "tune.json")
    count = 9  # later ones may differ: without items the error of a difference is not known
    assert [c.weights for c in result.calls[:count]] == [c.weights for c in same.calls[:count]]
    assert result.evaluation is None and result.calibration.gain is None
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.suffix != ".lock") == [
        "report.html", "tune.json", "tune.jsonl", "winner",
    ]  # fmt: skip


class Falling(Contested):
    """Every merge but the first one fails all items."""

    def __call__(self, weights: Any, items: Any) -> list[int]:
        answers = super().__call__(weights, items)
        return answers if len(self.asked) <= 4 else [0] * len(items)


def test_the_plain_anchor_is_returned_if_nothing_is_better(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    result = run(pool, tmp_path / "out", scorer=Falling(pool.root, DOMAINS))
    assert result.chosen == result.plain == 0 and result.best.repair is None
    sigmerge.merge(recipe_of(pool), tmp_path / "plain")
    assert read_weights(tmp_path / "plain").keys() == read_weights(tmp_path / "out/winner").keys()
    plain, kept = read_weights(tmp_path / "plain"), read_weights(tmp_path / "out/winner")
    assert all((plain[name] == kept[name]).all() for name in plain)


@pytest.mark.parametrize("method", ["random", "merge3"])
def test_methods_to_compare_with_keep_the_budget(
    method: str, pool: PoolOnDisk, tmp_path: Path
) -> None:
    settings = SETTINGS.changed(method=method)
    result = run(pool, tmp_path / "out", settings=settings)
    assert SETTINGS.calls - 3 <= len(result.calls) <= SETTINGS.calls
    assert result.best.value == max(call.value for call in result.calls)
    assert result.best.value >= result.calls[result.plain].value
    again = run(pool, tmp_path / "again", settings=settings)
    assert again.calls == result.calls


@pytest.mark.parametrize("method", ["random", pytest.param("merge3", marks=pytest.mark.campaign)])
def test_a_search_stays_in_its_box_and_fills_it(
    method: str, pool: PoolOnDisk, tmp_path: Path
) -> None:
    """Task arithmetic at 0.4: a box of 4 ends at 1.6, the usual one at 1."""
    for box, most in ((None, 1.0), (4.0, 1.6)):
        settings = TuneSection(calls=24, anchors=["task_arithmetic"], method=method, box=box)
        record = run(pool, tmp_path / str(box), settings=settings)
        weights = [weight for call in record.calls for weight in call.weights.values()]
        assert 0.8 * most < max(weights) <= most
    with pytest.raises(RecipeError, match="guided has no box"):
        settings.changed(method="guided")


def test_a_generation_is_as_large_as_the_population(pool: PoolOnDisk, tmp_path: Path) -> None:
    """20 calls: the plain anchor and two generations of nine, not of those four that fill them."""
    settings = TuneSection(
        calls=20, anchors=["task_arithmetic"], method="merge3", population=9
    )  # fmt: skip
    record = run(pool, tmp_path / "out", settings=settings)
    assert record.stopped == "2 generations of 9 are over" and len(record.calls) == 19
    with pytest.raises(RecipeError, match="a population of 9 needs at least 19 evaluation calls"):
        run(pool, tmp_path / "no", settings=settings.changed(calls=18))
    with pytest.raises(RecipeError, match="random has no population"):
        settings.changed(method="random")


def test_the_best_repair_is_told_whether_it_is_taken_or_not(
    pool: PoolOnDisk, whole: Path, tmp_path: Path
) -> None:
    """Its difference to the best candidate without one, from the journal."""
    calls = [r for r in recorded(whole) if "call" in r]
    values = {True: [0.0], False: [0.0]}
    for each in calls:
        values[each["candidate"]["repair"] is not None].append(
            np.mean(list(each["scores"].values()))
        )
    result = read(TuneRecord, whole / "tune.json")
    [told] = [line for line in tune_lines(result) if line.startswith("repair: ")]
    gain = 100 * (max(values[True]) - max(values[False]))
    assert f"{gain:+.2f} beside the best without one, 95 % interval" in told
    assert ("none is taken" in told) == (result.best.repair is None)
    short = TuneSection(calls=3, anchors=["task_arithmetic"])
    without = run(pool, tmp_path / "out", settings=short)
    assert "repair: none was tried" in tune_lines(without)


def test_adamerging_learns_without_calls_and_takes_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the embedded pool; few steps and items, so that it does not take long."""
    from sigmerge.nano.files import POOL, PROBE, REFERENCE
    from sigmerge.probing import adamerging

    learn = partial(adamerging.learnt_weights, steps=2, rate=0.05)
    monkeypatch.setattr(adamerging, "learnt_weights", learn)
    given = yaml.safe_load(pool_recipe(POOL).text)
    given["repair"]["evaluate"] |= {"limit": 4}
    settings = TuneSection(calls=2, anchors=["task_arithmetic"], method="adamerging")
    job = TuneJob(load_recipe(given), tmp_path / "out", Options(threads=1), settings)
    result = job.run()
    assert result.stopped == "the entropy was minimised"
    plain, learnt = (tuple(call.weights.values()) for call in result.calls)
    experts = {name: POOL / name for name in result.calls[0].weights}
    start = dict.fromkeys(experts, 0.4)
    assert plain == (0.4,) * 5
    assert learnt == learn(POOL / REFERENCE, experts, start, POOL / PROBE) != plain
    assert result.best.value == max(call.value for call in result.calls)
    assert result.items_per_call == dict.fromkeys(experts, 4)
    given["repair"].pop("probe")
    for change, content in (({}, given), ({"anchors": ["linear"]}, pool_recipe(POOL).text)):
        recipe = load_recipe(content if isinstance(content, dict) else yaml.safe_load(content))
        wrong = TuneJob(recipe, tmp_path / "no", Options(), settings.changed(**change))
        with pytest.raises(RecipeError, match="name that anchor, and give probe"):
            wrong.run()
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        pytest.param("linear", {"weight": 1.0}, marks=pytest.mark.campaign),
        ("ties", {"weight": 1.0, "density": 0.5}),
        ("dare_linear", {"weight": 0.4, "density": 0.5}),
        pytest.param("cabs", {"weight": 0.4}, marks=pytest.mark.campaign),
        ("lines", {"weight": 0.4, "on": "task_arithmetic"}),
    ],
)
def test_the_recipes_own_operator_is_guided(
    method: str, parameters: dict[str, Any], pool: PoolOnDisk, tmp_path: Path
) -> None:
    recipe = recipe_of(pool, method, preset="paper", parameters=parameters)
    settings = TuneSection(calls=3, anchors=[method])
    result = run(pool, tmp_path / "out", recipe=recipe, settings=settings)
    assert {call.anchor for call in result.calls} == {method} and len(result.calls) == 3
    assert len({tuple(call.weights.values()) for call in result.calls}) == 3
    sigmerge.merge(recipe, tmp_path / "plain")
    first = TuneJob(load_recipe(recipe), tmp_path / "x", Options(), settings).anchors[method]
    again = pool.write(first.recipe(tuple(first.weights.values())), "plain.yaml")
    sigmerge.merge(again, tmp_path / "again")
    plain, made = read_weights(tmp_path / "plain"), read_weights(tmp_path / "again")
    assert all((plain[name] == made[name]).all() for name in plain)


def test_the_worst_domain_is_shown_as_its_deficit(pool: PoolOnDisk, tmp_path: Path) -> None:
    """In the progress, on the page and in the last lines; deficits are taken from the journal."""
    heard: list[tuple[str, int]] = []
    settings, out = SETTINGS.changed(objective="worst"), tmp_path / "out"
    result = run(
        pool, out, settings=settings, progress=lambda stage, done, _: heard.append((stage, done))
    )
    _, *rest = recorded(out)
    target = {d: max(r["scores"][d] for r in rest[:3]) for d in DOMAINS}
    deficits = [max(target[d] - r["scores"][d] for d in DOMAINS) for r in rest[3:]]
    assert [-call.value for call in result.calls] == pytest.approx(deficits)
    shown = [done for stage, done in heard if stage == "best largest deficit, percent"]
    assert shown == [round(100 * d) for d in np.minimum.accumulate(deficits)]
    assert not any("objective" in stage for stage, _ in heard)
    plain, last = min(deficits[:3]), min(deficits)
    steps = _steps(result).grid
    assert steps.head == ("step", "calls", "largest deficit", "brought")
    assert steps.rows[0] == ("plain anchors", "3", f"{100 * plain:.2f}", "")
    assert steps.rows[-1][2] == f"{100 * last:.2f}" and last < plain
    assert f"largest deficit {100 * deficits[result.chosen]:.2f};" in "\n".join(tune_lines(result))


def test_a_step_below_the_floors_is_not_the_best(whole: Path) -> None:
    made = read(TuneRecord, whole / "tune.json")
    first = made.calls[0]
    calls = (
        first.model_copy(update={"value": 0.7, "below": 0.02}),
        first.model_copy(update={"value": 0.6, "below": 0.01, "call": 1}),
        first.model_copy(update={"value": 0.9, "below": 0.03, "call": 2}),
    )
    settings = {**made.settings, "floors": {DOMAINS[0]: 0.9}}
    record = made.model_copy(update={"calls": calls, "settings": settings, "chosen": 1})
    steps = _steps(record).grid
    assert steps.head == ("step", "calls", "objective", "below floors", "brought")
    assert steps.rows == [
        ("plain anchors", "1", "70.00", "2.00", ""),
        ("guided weights", "2", "60.00", "1.00", "−10.00"),
    ]
    best = [row[3] for row in _scores(record).grid.rows]
    means = [f"{100 * np.mean(list(call.scores.values())):.2f}" for call in calls]
    assert best == [means[0], means[1], means[1]]


def test_an_expert_that_is_left_out_is_said_first(whole: Path) -> None:
    made = read(TuneRecord, whole / "tune.json")
    best = made.best.model_copy(update={"weights": {**made.best.weights, DOMAINS[0]: 0.0}})
    calls = tuple(best if call == made.best else call for call in made.calls)
    record = made.model_copy(update={"calls": calls})
    lines = list(tune_lines(record))
    assert lines[0].startswith(f"{DOMAINS[0]} is left out")
    row = next(line for line in lines if line.startswith(f"{DOMAINS[0]} ") and "%" not in line
               and "left" not in line)  # fmt: skip
    assert row.endswith(" 0.000")
    assert f"Nothing of {DOMAINS[0]} is in it" in render(record)
    assert "Nothing of" not in render(made) or not all(made.best.weights.values())


def test_the_page_has_the_winner_and_the_command_that_repeats_it(whole: Path) -> None:
    made = read(TuneRecord, whole / "tune.json")
    page = render(made)
    assert f"sigmerge merge {made.winner}/sigmerge/recipe.yaml again/" in page
    assert "from 0" not in page and "fractions of the largest" not in page


def test_floors_and_objectives_reach_the_choice(pool: PoolOnDisk, tmp_path: Path) -> None:
    floors = {DOMAINS[2]: 1.0}
    kept = run(pool, tmp_path / "kept", settings=SETTINGS.changed(floors=floors))
    assert kept.best.below <= min(call.below for call in kept.calls)


def sliced(pool: PoolOnDisk, ranges: list[list[int]], **more: Any) -> Path:
    """A recipe with a slice for each range of layers."""
    content = yaml.safe_load(recipe_of(pool).read_text())
    del content["models"]
    slices = [
        {"sources": [{"model": name, "layer_range": each} for name in (*DOMAINS, "reference")]}
        for each in ranges
    ]
    return pool.write({**content, "slices": slices, **more}, "sliced.yaml")


def test_a_slice_of_whole_models_is_tuned_as_they_are(pool: PoolOnDisk, tmp_path: Path) -> None:
    settings = TuneSection(calls=2, anchors=["task_arithmetic"])
    whole = run(pool, tmp_path / "whole", settings=settings)
    found = run(pool, tmp_path / "out", recipe=sliced(pool, [[0, 2]]), settings=settings)
    assert found.calls == whole.calls


def test_wrong_input_is_refused_before_anything_is_written(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    one = pool.write(
        {
            "merge_method": "task_arithmetic",
            "base_model": "reference",
            "models": [{"model": "math"}],
        },
        "one.yaml",
    )
    with pytest.raises(RecipeError, match="one expert only"):
        run(pool, out, recipe=one)
    with pytest.raises(RecipeError, match="at least 4 evaluation calls, not 3"):
        run(pool, out, settings=SETTINGS.changed(calls=3))
    with pytest.raises(RecipeError, match="merge3 needs at least 9 evaluation calls"):
        run(pool, out, settings=SETTINGS.changed(calls=8, method="merge3"))
    with pytest.raises(RecipeError, match="merge3 searches weights, and model_stock has none"):
        searched = TuneSection(calls=24, method="merge3")
        run(pool, out, recipe=recipe_of(pool, "model_stock"), settings=searched)
    with pytest.raises(RecipeError, match="is no anchor") as wrong:
        run(pool, out, settings=SETTINGS.changed(anchors=["lot"]))
    assert wrong.value.problems[0].count("task_arithmetic") == 1
    with pytest.raises(RecipeError, match="unknown domain poetry"):
        run(pool, out, settings=SETTINGS.changed(floors={"poetry": 0.9}))
    with pytest.raises(ScoreError, match="nothing scores it"):
        run(pool, out, scorer=Contested(pool.root, DOMAINS[:2]))
    with pytest.raises(ScoreError, match="give command: or evaluate:"):
        TuneJob(load_recipe(recipe_of(pool)), out, Options(), SETTINGS).run()
    content = {**yaml.safe_load(recipe_of(pool).read_text()), "parameters": {"weight": [0.1, 0.9]}}
    layered = pool.write(content, "layered.yaml")
    with pytest.raises(RecipeError, match="one weight per expert"):
        run(pool, out, recipe=layered)
    unscored = Contested(pool.root, DOMAINS)
    for method, parameters, problem in (
        ("task_arithmetic", {"weight": 0}, "all weights are 0"),
        ("task_arithmetic", {"weight": -0.4}, "math: the weight -0.4 is not 0 or more"),
        ("ties", {"weight": 0, "density": 0.5}, "the weights of ties sum to 0"),
        ("ties", {"lambda": [0.5, 1.0], "density": 0.5}, "lambda: differs between layers"),
    ):
        file = recipe_of(pool, method, parameters=parameters)
        alone = TuneSection(calls=4, anchors=[method])
        with pytest.raises(RecipeError) as refused:
            run(pool, out, recipe=file, settings=alone, scorer=unscored)
        assert problem in str(refused.value)
    assert not unscored.asked
    for ranges in ([[0, 1]], [[0, 2], [1, 2]]):
        with pytest.raises(RecipeError, match="weights of whole models are tuned, not of layers"):
            run(pool, out, recipe=sliced(pool, ranges))
    assert not out.exists()


def test_what_the_repair_section_says_is_refused_or_noted(pool: PoolOnDisk, tmp_path: Path) -> None:
    extra = {"variant": "equal_share", "rounds": 2, "admit": 1, "drop": 0.5}
    with pytest.raises(RecipeError, match="cannot be run") as wrong:
        run(pool, tmp_path / "out", recipe=recipe_of(pool, repair=extra))
    assert list(wrong.value.problems) == [
        f"repair.{key}: a tuned repair has none; leave it out" for key in extra
    ]
    assert not (tmp_path / "out").exists()
    recipe = recipe_of(pool, repair={"scale": 0.6, "guard": "off"}, guide={"calls": 2})
    settings = TuneSection(calls=2, anchors=["task_arithmetic"])
    result = run(pool, tmp_path / "out", recipe=recipe, settings=settings)
    noted = (
        "The tuning decides, not the recipe: guide, repair.scale.",
        "guard: off is not used: a tuning never ends below the plain anchor.",
    )
    assert result.warnings == noted
    job = TuneJob(load_recipe(recipe), tmp_path / "no", Options(), settings,
                  scorer=Contested(pool.root, DOMAINS))  # fmt: skip
    assert job.describe().steps[-1].notes == noted


def test_a_foreign_or_finished_folder_is_kept(
    pool: PoolOnDisk, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="finished tuning"):
        run(pool, whole)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="no tuning wrote"):
        run(pool, foreign)


FEW = TuneSection(calls=8, anchors=["task_arithmetic"], method="random")


def test_a_finished_tuning_is_extended_at_the_price_of_the_new_calls(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    out, longer = tmp_path / "out", FEW.changed(calls=24)
    run(pool, out, settings=FEW)
    short, scorer = recorded(out), Contested(pool.root, DOMAINS)
    result = run(pool, out, settings=longer, scorer=scorer)
    assert len(scorer.asked) == 16 and result.replayed == 8
    assert recorded(out)[1 : len(short)] == short[1:]
    with another_cache(tmp_path / "cache"):
        anew = run(pool, tmp_path / "anew", settings=longer)
    assert anew.calls == result.calls and anew.replayed == 0
    assert weight_bytes(out / "winner") == weight_bytes(tmp_path / "anew/winner")


def test_a_guided_tuning_of_more_calls_takes_what_is_known(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    scorer = Contested(pool.root, DOMAINS)
    short = run(pool, tmp_path / "out", settings=SETTINGS.changed(calls=8), scorer=scorer)
    asked = len(scorer.asked)
    result = run(pool, tmp_path / "out", settings=SETTINGS, scorer=scorer)
    assert result.replayed >= 3
    assert len(scorer.asked) - asked == len(result.calls) - result.replayed
    assert len(short.calls) <= 8 < len(result.calls)


def test_two_callables_do_not_share_their_scores(pool: PoolOnDisk, tmp_path: Path) -> None:
    """A tuning that was interrupted goes on with the other one's scores alone."""

    class Flat:
        def __init__(self, value: float, stop_at: int) -> None:
            self.value, self.stop_at, self.asked = value, stop_at, 0

        @property
        def sigmerge_key(self) -> str:
            return f"flat {self.value}"

        def __call__(self, folder: Path) -> dict[str, float]:
            self.asked += 1
            if self.asked > self.stop_at:
                raise KeyboardInterrupt
            return dict.fromkeys(DOMAINS, self.value)

    recipe, out = load_recipe(recipe_of(pool)), tmp_path / "out"
    first, second = Flat(0.25, stop_at=5), Flat(0.75, stop_at=99)
    with pytest.raises(KeyboardInterrupt):
        TuneJob(recipe, out, Options(threads=1), FEW, score=first).run()
    found = TuneJob(recipe, out, Options(threads=1), FEW, score=second).run()
    scores = [*found.experts.values(), *(call.scores for call in found.calls)]
    assert all(set(each.values()) == {0.75} for each in scores)
    assert second.asked == 3 + len(found.calls)
    with pytest.raises(OutputError, match="holds a finished tuning that differs in scores;"):
        TuneJob(recipe, out, Options(threads=1), FEW.changed(calls=9), score=first).run()


def test_another_tuning_is_not_extended(pool: PoolOnDisk, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(pool, out, settings=FEW)
    before = sorted(out.iterdir()), recorded(out)
    for change, message in (
        ({}, "pass --overwrite to replace it, or more evaluation calls to extend it"),
        ({"calls": 7}, "pass --overwrite"),
        ({"calls": 12, "objective": "worst"}, "differs in settings; choose a new folder"),
    ):
        with pytest.raises(OutputError, match=message):
            run(pool, out, settings=FEW.changed(**change))
    with pytest.raises(OutputError, match="differs in recipe;"):
        other = recipe_of(pool, parameters={"weight": 0.3})
        run(pool, out, settings=FEW.changed(calls=12), recipe=other)
    assert (sorted(out.iterdir()), recorded(out)) == before


def test_a_changed_probe_is_named(pool: PoolOnDisk, tmp_path: Path) -> None:
    out, settings = tmp_path / "out", TuneSection(calls=2, anchors=["task_arithmetic"])
    for name, second, message in (
        ("probe", "b c", None),
        ("moved", "b c", "pass --overwrite to replace it, or more"),
        ("moved", "c b", "that differs in probe;"),
    ):
        probe = pool.root / f"{name}.jsonl"
        probe.write_text(f'{{"prompt": "a b"}}\n{{"prompt": "{second}"}}\n')
        recipe = recipe_of(pool, repair={"probe": str(probe)})
        if message is None:
            run(pool, out, recipe=recipe, settings=settings)
            continue
        with pytest.raises(OutputError, match=message):
            run(pool, out, recipe=recipe, settings=settings)


def test_an_expert_that_changes_between_calls_stops_the_tuning(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", dtype="bf16")
    other = make_pool(tmp_path / "other", dtype="bf16", seed=5)
    weights = pool.experts["math"] / "model.safetensors"

    def exchanged(stage: str, done: int, _: int) -> None:
        if (stage, done) == ("tuning", 2):
            shutil.copyfile(other.experts["math"] / weights.name, weights)

    settings = TuneSection(calls=3, anchors=["task_arithmetic"], method="random")
    with pytest.raises(PoolError, match=r"math/model\.safetensors: changed"):
        run(pool, tmp_path / "out", settings=settings, progress=exchanged)
    assert not (tmp_path / "out/winner").exists()


def test_the_recipe_section_is_read_and_checked(pool: PoolOnDisk) -> None:
    tune = {"calls": 9, "anchors": ["linear"], "floors": {"math": 0.9}}
    assert load_recipe(recipe_of(pool, tune=tune)).tune == TuneSection(**tune)
    with pytest.raises(RecipeError, match=r"tune\.call"):
        load_recipe(recipe_of(pool, tune={"call": 9}))


def test_shares_and_capacity_stand_for_scores_and_profile(pool: PoolOnDisk, tmp_path: Path) -> None:
    shares = {DOMAINS[0]: 0.75, DOMAINS[1]: 0.25}
    decided = {"shares": shares, "capacity": 0.4, "scale": 1.0}
    plan = sigmerge.merge(recipe_of(pool, repair=decided), tmp_path / "out").repair
    assert plan.scores is None and plan.views == {}
    assert plan.order[:2] == DOMAINS[:2] and plan.capacity == (0.4, 0.4)
    for row, size in zip(plan.quota, plan.coordinates, strict=True):
        assert row == (int(np.ceil(0.3 * size - 1e-6)), int(np.ceil(0.1 * size - 1e-6)), 0)
    full = dict(zip(DOMAINS, (0.5, 0.3, 0.2), strict=True))  # each quota is rounded up
    wrong = [
        ({"shares": shares}, "go together"),
        ({**decided, "shares": {"poetry": 1.0}}, "is no expert"),
        ({**decided, "shares": {DOMAINS[0]: 0.9, DOMAINS[1]: 0.9}}, "sum to 1.8"),
        ({**decided, "scores": "scores.json"}, "leave nothing for scores"),
        ({**decided, "capacity": [0.4]}, "1 numbers for 2 layers"),
        ({**decided, "capacity": 1.0, "shares": full}, "do not fit"),
    ]
    for repair, message in wrong:
        with pytest.raises(RecipeError, match=message):
            sigmerge.merge(recipe_of(pool, repair=repair), tmp_path / "wrong")
        assert not (tmp_path / ".wrong.anchor").exists()


def test_the_command_and_its_dry_run(pool: PoolOnDisk, tmp_path: Path) -> None:
    """On the embedded suite of a pool folder nothing is scored by a dry run."""
    from sigmerge.nano.files import POOL

    ran = command("tune", str(POOL), str(tmp_path / "out"), "--dry-run", "--floor", "safety=0.95")
    assert ran.code == 0, ran
    assert "at most 24 calls, 600 items each, method guided" in ran.out
    assert "safety not below 0.95 of its expert" in ran.out
    assert not (tmp_path / "out").exists()
    for arguments, message in (
        (["--calls", "3"], "at least 4 evaluation calls"),
        (["--floor", "safety"], "expected DOMAIN=NUMBER"),
    ):
        failed = command("tune", str(POOL), str(tmp_path / "out"), *arguments)
        assert failed.code == 2 and message in failed.err
    nothing = command("tune", str(tmp_path), str(tmp_path / "out"))
    assert nothing.code == 2 and "is no pool" in nothing.err


def test_the_seed_of_the_command_is_that_of_a_pool_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sigmerge.nano.files import POOL

    seeds, describe = [], TuneJob.describe
    monkeypatch.setattr(
        TuneJob, "describe", lambda job: (seeds.append(job.recipe.seed), describe(job))[1]
    )
    for given in ([], ["--seed", "7"]):
        assert command("tune", str(POOL), str(tmp_path / "out"), "--dry-run", *given).code == 0
    assert seeds == [0, 7]


def test_the_page_shows_the_path(whole: Path) -> None:
    page = (whole / "report.html").read_text()
    assert sigmerge.report(whole).read_text() == page
    for words in ("Score against calls", "Weights of", "What each step brought", "plain anchor"):
        assert words in page
    assert yaml.safe_load((whole / "winner/sigmerge/recipe.yaml").read_text())["models"]


def test_any_weighted_operators_are_anchors_side_by_side(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Each begins with its own level, and the leader's weights are guided."""
    section = TuneSection(calls=6, anchors=["iso_c", "tsv", "wudi"])
    result = run(pool, tmp_path / "out", settings=section)
    assert [call.anchor for call in result.calls[:3]] == ["iso_c", "tsv", "wudi"]
    plain = [dict(recorded(tmp_path / "out")[1 + 3 + i])["candidate"] for i in range(3)]
    assert [set(each["weights"]) for each in plain] == [{1.0}] * 3
    guided = [call for call in result.calls[3:] if not call.repair]
    assert guided and all(len(set(call.weights)) > 1 for call in guided)
    winner = yaml.safe_load((tmp_path / "out/winner/sigmerge/recipe.yaml").read_text())
    assert winner["merge_method"] in ("iso_c", "tsv", "wudi")
