"""guide: and calibrate: in a recipe: calls in the plan, a recipe that needs none, wrong input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import sigmerge
from sigmerge.errors import PoolError, RecipeError, ScoreError
from sigmerge.jobs.calibrate import Calibrated, CalibrateJob
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.run import RunJob
from sigmerge.method import calibration
from sigmerge.recipe import load_recipe
from sigmerge.recipe.anchors import anchors_of
from sigmerge.records import RepairPlan, read_plan
from tests.command_line import sigmerge as command
from tests.jobs.tuned import Contested
from tests.kept_entries import another_cache
from tests.merge3.stub import EACH
from tests.pools import EXPERTS, PoolOnDisk, make_pool, read_weights

pytestmark = pytest.mark.usefixtures("own_cache")
DOMAINS = EXPERTS[:3]
Score = Callable[[Path], dict[str, float]]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), dtype="bf16", tokenizer=True)


def recipe_of(pool: PoolOnDisk, method: str = "task_arithmetic", **more: Any) -> Path:
    models = [{"model": name} for name in DOMAINS]
    given = {"merge_method": method, "base_model": "reference", "models": models}
    if method in ("task_arithmetic", "dare_linear", "lines"):
        given["parameters"] = {"weight": 0.4}
    return pool.write({**given, "preset": "paper", **more}, "given.yaml")


class Scored:
    """Scores of folders by the tiny pool's stub; counts what it is asked."""

    sigmerge_key = "scored by the stub"

    def __init__(self, pool: PoolOnDisk, stop_at: int | None = None) -> None:
        self.stub, self.stop_at, self.asked = Contested(pool.root, DOMAINS), stop_at, 0

    def __call__(self, folder: Path) -> dict[str, float]:
        if self.asked == self.stop_at:
            raise KeyboardInterrupt
        self.asked += 1
        answers = self.stub(read_weights(folder), self.stub.questions())
        rows = np.reshape(answers, (3, EACH)).mean(1)
        return dict(zip(DOMAINS, rows.tolist(), strict=True))


def weight_bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def merged(recipe: Path, out: Path, score: Score | None) -> Any:
    return MergeJob(load_recipe(recipe), out, Options(threads=1), score).run()


def written(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((out / "sigmerge/recipe.yaml").read_text())
    return found


@pytest.mark.parametrize(
    "method", ["task_arithmetic", "linear", "ties", "dare_linear", "dare_ties", "lines"]
)
def test_guided_weights_are_in_the_plan_and_the_recipe(
    method: str, pool: PoolOnDisk, tmp_path: Path
) -> None:
    score = Scored(pool)
    file = recipe_of(pool, method, guide={"calls": 4})
    plan = merged(file, tmp_path / "out", score).plan
    assert score.asked == 3 + len(plan.guided) <= 7
    assert plan == read_plan(tmp_path / "out/sigmerge/plan.json")
    best = max(plan.guided, key=lambda call: call.value)
    assert best.value >= plan.guided[0].value
    recipe = written(tmp_path / "out")
    weights = [model["parameters"]["weight"] for model in recipe["models"]]
    assert weights in [list(call.weights.values()) for call in plan.guided]
    assert "guide" not in recipe
    sigmerge.merge(tmp_path / "out/sigmerge/recipe.yaml", tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "out"]


def test_the_scores_of_a_call_are_those_of_its_weights(pool: PoolOnDisk, tmp_path: Path) -> None:
    score = Scored(pool)
    plan = merged(recipe_of(pool, guide={"calls": 5}), tmp_path / "out", score).plan
    assert plan.guided[-1].value > plan.guided[0].value
    for call in plan.guided:
        models = [
            {"model": name, "parameters": {"weight": weight}}
            for name, weight in call.weights.items()
        ]
        plain = recipe_of(pool, models=models, parameters={})
        sigmerge.merge(plain, tmp_path / f"call{call.call}")
        assert score(tmp_path / f"call{call.call}") == call.scores


def test_a_guided_merge_is_what_its_records_say(pool: PoolOnDisk, tmp_path: Path) -> None:
    merged(recipe_of(pool, guide={"calls": 2}), tmp_path / "out", Scored(pool))
    (report,) = sigmerge.verify(tmp_path / "out", deep=True, blocks=None)
    assert report.ok and "recomputed" in report.checked, report.findings
    (tmp_path / "out/sigmerge/guide.jsonl").write_text("{}")
    (report,) = sigmerge.verify(tmp_path / "out")
    assert [finding.about for finding in report.findings] == ["sigmerge/guide.jsonl"]


@pytest.mark.parametrize("form", ["{}/.", "{}@main", "long"])
@pytest.mark.parametrize("section", ["models", "modules"])
def test_candidates_have_all_that_the_recipe_says(
    section: str, form: str, pool: PoolOnDisk
) -> None:
    """However it writes its models; and their template, where it lies beside the recipe."""
    (pool.root / "own.jinja").write_text("{{ messages }}")
    models = [
        {
            "model": {"model": {"path": name}} if form == "long" else form.format(name),
            "parameters": {"density": density},
        }
        for name, density in zip(DOMAINS, (0.25, 0.5, 0.75), strict=True)
    ]
    base = {"model": {"path": "reference"}, "override_architecture": "Other"}
    shared = {"normalize": False}
    more = {"base_model": base, "chat_template": "own.jinja", "guide": {}}
    of_models = {"models": models, "parameters": shared}
    more |= of_models if section == "models" else {"modules": {"text": of_models}}
    content = yaml.safe_load(recipe_of(pool, "ties", **more).read_text())
    if section == "modules":
        del content["models"]
    anchor = anchors_of(load_recipe(pool.write(content)), ["ties"])["ties"]
    made = load_recipe(anchor.recipe((1.0, 1.0, 1.0)))
    assert [model.parameters["density"] for model in made.models] == [0.25, 0.5, 0.75]
    assert made.parameters["normalize"] is False
    assert made.chat_template == "{{ messages }}" and made.architecture == "Other"


@pytest.mark.parametrize("stop_at", [1, 3, 5, 7])
def test_an_interrupted_guide_goes_on_to_the_same_bytes(
    stop_at: int, pool: PoolOnDisk, tmp_path: Path
) -> None:
    file = recipe_of(pool, guide={"calls": 5})
    with another_cache(tmp_path / "whole/cache"):
        whole = merged(file, tmp_path / "whole/out", Scored(pool)).plan
    with pytest.raises(KeyboardInterrupt):
        merged(file, tmp_path / "out", Scored(pool, stop_at))
    assert not (tmp_path / "out").exists()
    score = Scored(pool)
    assert merged(file, tmp_path / "out", score).plan.guided == whole.guided
    assert score.asked == 3 + len(whole.guided) - stop_at
    assert weight_bytes(tmp_path / "out") == weight_bytes(tmp_path / "whole/out")
    assert not list(tmp_path.glob(".*"))


def test_an_expert_that_changes_between_calls_stops_the_guide(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", dtype="bf16")
    weights, other = (pool.experts[name] / "model.safetensors" for name in DOMAINS[:2])
    score = Scored(pool)

    def exchanged(folder: Path) -> dict[str, float]:
        if score.asked == 5:
            shutil.copyfile(other, weights)
        return score(folder)

    with pytest.raises(PoolError, match=r"math/model\.safetensors: changed"):
        merged(recipe_of(pool, guide={"calls": 5}), tmp_path / "out", exchanged)
    assert not (tmp_path / "out").exists()


def test_a_guided_anchor_is_repaired_and_made_again_without_scores(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    file = recipe_of(pool, guide={"calls": 3}, repair={})
    plan = merged(file, tmp_path / "out", Scored(pool)).repair
    assert any(k for row in plan.claimed for k in row)
    recipe = written(tmp_path / "out")
    assert recipe["repair"]["shares"] == dict(plan.share)
    sigmerge.merge(tmp_path / "out/sigmerge/recipe.yaml", tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(tmp_path / "out")


def test_run_guides_calibrates_and_goes_on_without_another_call(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    file = recipe_of(pool, guide={"calls": 3}, repair={"calibrate": {"calls": 4}})
    score, out = Scored(pool), tmp_path / "run"
    RunJob(load_recipe(file), out, Options(threads=1), score).run()
    plan = read_plan(out / "repaired/sigmerge/plan.json")
    assert isinstance(plan, RepairPlan)
    assert 1 <= len(plan.candidates) <= 4 and len(read_plan_guided(out / "anchor")) == 3
    assert score.asked == 3 + 3 + 1 + len(plan.candidates) + 1  # each expert is scored once
    sigmerge.merge(out / "repaired/sigmerge/recipe.yaml", tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(out / "repaired")
    (out / "run.json").unlink()
    shutil.rmtree(out / "repaired")
    again = Scored(pool)
    RunJob(load_recipe(file), out, Options(threads=1), again).run()
    assert again.asked == 0


def read_plan_guided(folder: Path) -> Any:
    return read_plan(folder / "sigmerge/plan.json").guided


# calibrate:


@pytest.mark.parametrize("repair", [{"calibrate": {"calls": 6}}, {"scale": "calibrated"}])
def test_a_calibrated_repair_is_made_again_without_scores(
    repair: dict[str, Any], pool: PoolOnDisk, tmp_path: Path
) -> None:
    score = Scored(pool)
    plan = merged(recipe_of(pool, repair=repair), tmp_path / "out", score).repair
    first = plan.candidates[0]
    assert (first.update, first.scale, first.anchor) == ("add", 0.6, 1.0)
    assert len(plan.candidates) <= (6 if "calibrate" in repair else 12)
    best = max(plan.candidates, key=lambda candidate: candidate.mean)
    assert plan.guard is not None and plan.guard.after == pytest.approx(best.mean)
    assert (plan.update, plan.scale, plan.capacity) == (best.update, best.scale, best.capacity)
    assert score(tmp_path / "out") == best.scores
    sigmerge.merge(tmp_path / "out/sigmerge/recipe.yaml", tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "out"]


def test_the_anchors_level_is_chosen_with_the_repair(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the way to the embeddings is best, and only the anchor's level moves them."""
    monkeypatch.setattr(calibration, "CALIBRATION_PATIENCE", 40)
    tensor = "model.embed_tokens.weight"
    base = read_weights(pool.root / "reference")[tensor]
    towards = {d: (read_weights(pool.root / d)[tensor] - base).ravel() for d in DOMAINS}

    def halfway(folder: Path) -> dict[str, float]:
        if folder.name in DOMAINS:
            return {d: 0.9 if d == folder.name else 0.1 for d in DOMAINS}
        moved = (read_weights(folder)[tensor] - base).ravel()
        way = {d: float(moved @ t / (t @ t)) for d, t in towards.items()}
        return {d: 0.8 / (1 + abs(w - 0.5)) for d, w in way.items()}

    file = recipe_of(pool, parameters={"weight": 0.9}, repair={"calibrate": {"calls": 30}})
    plan = merged(file, tmp_path / "out", halfway).repair
    levels = {candidate.anchor for candidate in plan.candidates}
    assert {1.0, 0.75} <= levels
    best = max(plan.candidates, key=lambda candidate: candidate.mean)
    assert best.anchor < 1
    recipe = written(tmp_path / "out")
    weights = [model["parameters"]["weight"] for model in recipe["models"]]
    assert weights == pytest.approx([0.9 * best.anchor] * 3)
    sigmerge.merge(tmp_path / "out/sigmerge/recipe.yaml", tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(tmp_path / "out")


def test_a_stored_anchor_keeps_its_level(pool: PoolOnDisk, tmp_path: Path) -> None:
    anchor = tmp_path / "anchor"
    sigmerge.merge(recipe_of(pool, parameters={"weight": 0.9}), anchor)
    file = recipe_of(pool, repair={"calibrate": {"calls": 20}})
    plan = sigmerge.repair(file, tmp_path / "out", anchor=anchor, score=Scored(pool)).repair
    assert {candidate.anchor for candidate in plan.candidates} == {1.0}
    assert written(tmp_path / "out")["anchor"] == str(anchor)
    sigmerge.merge(tmp_path / "out/sigmerge/recipe.yaml", tmp_path / "again")
    assert weight_bytes(tmp_path / "again") == weight_bytes(tmp_path / "out")


def test_no_repair_is_a_candidate(pool: PoolOnDisk, tmp_path: Path) -> None:
    anchor = tmp_path / "anchor"
    sigmerge.merge(recipe_of(pool), anchor)
    scored = Scored(pool)
    known = {weight_bytes(anchor), *(weight_bytes(pool.root / name) for name in DOMAINS)}

    def worse(folder: Path) -> dict[str, float]:
        found = scored(folder)
        lost = 0.0 if weight_bytes(folder) in known else 0.5
        return {d: max(0.0, q - lost) for d, q in found.items()}

    file = recipe_of(pool, repair={"calibrate": {"calls": 3}})
    plan = sigmerge.repair(file, tmp_path / "out", anchor=anchor, score=worse).repair
    assert len(plan.candidates) == 3
    assert not any(k for row in plan.claimed for k in row)
    assert any("No repair beats the anchor" in warning for warning in plan.warnings)
    before, after = read_weights(anchor), read_weights(tmp_path / "out")
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize("stop_at", [4, 6, 8])
def test_an_interrupted_calibration_goes_on_to_the_same_bytes(
    stop_at: int, pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor, ended = tmp_path / "anchor", list[Calibrated]()
    calibrated = CalibrateJob.run
    monkeypatch.setattr(
        CalibrateJob, "run", lambda self: (ended.append(calibrated(self)), ended[-1])[1]
    )
    sigmerge.merge(recipe_of(pool), anchor)
    file = recipe_of(pool, repair={"calibrate": {"calls": 4}, "guard": "off"})
    with another_cache(tmp_path / "cache"):
        whole = sigmerge.repair(file, tmp_path / "whole", anchor=anchor, score=Scored(pool)).repair
    assert len(whole.candidates) == 4
    with pytest.raises(KeyboardInterrupt):
        sigmerge.repair(file, tmp_path / "out", anchor=anchor, score=Scored(pool, stop_at - 1))
    score = Scored(pool)
    plan = sigmerge.repair(file, tmp_path / "out", anchor=anchor, score=score).repair
    assert plan.candidates == whole.candidates
    before = stop_at - 1
    assert score.asked == 4 + 4 - before
    # Every candidate is a look, whoever made it; what is kept is not waited for.
    assert [len(one.looks) for one in ended] == [4, 4]
    assert all(look.seconds > 0 for look in ended[1].looks)
    assert weight_bytes(tmp_path / "out") == weight_bytes(tmp_path / "whole")


# Wrong input and dry runs


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"guide": {"calls": 1}}, "guide.calls: must be greater than or equal to 2"),
        ({"guide": {"call": 4}}, "guide.call"),
        ({"guide": {}, "search": {}}, "both choose the weights"),
        ({"guide": {}, "models": [{"model": "math"}]}, "one is listed"),
        ({"guide": {"floors": {"poetry": 0.9}}}, "unknown domain poetry"),
        ({"guide": {"command": "score"}}, "must say {checkpoint}"),
        ({"guide": {"command": "a {checkpoint}", "evaluate": {"suite": "nano"}}}, "give one of"),
        ({"guide": {}, "merge_method": "checkpoint", "anchor": "math", "parameters": {}},
         "has no weights to guide"),
        ({"repair": {"calibrate": {"calls": 0}}}, "repair.calibrate"),
        ({"repair": {"calibrate": {}, "scale": 0.8}}, "calibrating chooses scale"),
        ({"repair": {"scale": "calibrated", "update": "add"}}, "calibrating chooses update"),
        ({"repair": {"calibrate": {}, "rounds": 2}}, "a calibrated repair has no rounds"),
        ({"repair": {"calibrate": {}, "variant": "equal_share"}}, "has no variant"),
        ({"repair": {"calibrate": {"objective": "weighted"}}}, "at least one weight above 0"),
    ],
)  # fmt: skip
def test_wrong_sections_are_refused(more: dict[str, Any], told: str, pool: PoolOnDisk) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_of(pool, **more))
    assert told in str(error.value)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_weights_that_no_step_can_start_from_are_refused(
    method: str, pool: PoolOnDisk, tmp_path: Path
) -> None:
    score = Scored(pool)
    file = recipe_of(pool, method, parameters={"weight": 0}, guide={"calls": 3})
    with pytest.raises(RecipeError, match=r"all weights are 0|the weights of ties sum to 0"):
        merged(file, tmp_path / "out", score)
    assert not score.asked and not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["model_stock", "lot"])
def test_an_operator_without_weights_is_refused(method: str, pool: PoolOnDisk) -> None:
    (pool.root / "exemplars.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    models = [{"model": name, "exemplars": "exemplars.jsonl"} for name in DOMAINS]
    file = recipe_of(pool, method, models=models, guide={})
    with pytest.raises(RecipeError, match="has no weight per expert") as error:
        load_recipe(file)
    assert "fisher" in str(error.value)


def test_scores_that_are_not_there_are_told_before_anything_is_made(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    (pool.root / "scores.json").write_text("{}")
    for more in ({}, {"repair": {"scores": "scores.json"}}):
        with pytest.raises(ScoreError, match="guide: scores merges that do not exist yet"):
            sigmerge.merge(recipe_of(pool, guide={}, **more), tmp_path / "out")
    with pytest.raises(ScoreError, match="calibrate: must score checkpoints"):
        file = recipe_of(pool, repair={"calibrate": {}, "scores": "scores.json"})
        sigmerge.merge(file, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_dry_runs_count_the_calls(tmp_path: Path) -> None:
    from sigmerge.nano.files import RECIPES

    content = yaml.safe_load((RECIPES / "task_arithmetic.yaml").read_text())
    for key in ("scale", "c_min", "c_max"):
        content["repair"].pop(key)
    content |= {"guide": {"calls": 6, "floors": {"safety": 0.9}}}
    content["repair"]["calibrate"] = {"calls": 9}
    text = yaml.safe_dump(content).replace("../pool/", f"{RECIPES.parent / 'pool'}/")
    (tmp_path / "recipe.yaml").write_text(text)
    ran = command("merge", str(tmp_path / "recipe.yaml"), str(tmp_path / "out"), "--dry-run")
    assert ran.code == 0, ran
    assert "guide: the weights of task_arithmetic, 5 experts" in ran.out
    assert "at most 6 calls, 600 items each" in ran.out
    assert "safety not below 0.9 of its expert" in ran.out
    assert "score: 10 checkpoints on the calibration split" in ran.out  # nine, and the guard's
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_calibration_begins_anew_where_the_anchor_is_read_otherwise(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    """Its weights are the same, and what was scored was another model."""
    anchor, score = tmp_path / "anchor", Scored(pool)
    sigmerge.merge(recipe_of(pool), anchor)
    file = recipe_of(pool, repair={"calibrate": {"calls": 4}, "guard": "off"})
    with pytest.raises(KeyboardInterrupt):
        sigmerge.repair(file, tmp_path / "out", anchor=anchor, score=Scored(pool, 6))
    config = anchor / "config.json"
    config.write_text(config.read_text().replace("{", '{"rope_theta": 5,', 1))
    sigmerge.repair(file, tmp_path / "out", anchor=anchor, score=score)
    assert score.asked == 1 + 4  # the experts are what they were
