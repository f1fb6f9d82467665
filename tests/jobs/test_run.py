"""The whole chain on a miniature pool trained from scratch, and the demo on the shipped one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import sigmerge
from sigmerge.cli.ending import app
from sigmerge.errors import MissingExtra, OutputError, RecipeError, ScoreError
from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import nano_scores
from sigmerge.jobs import demo as demo_module
from sigmerge.jobs import dense
from sigmerge.jobs.anchor import is_current, make_anchor
from sigmerge.jobs.options import Options
from sigmerge.jobs.search import plan_search
from sigmerge.jobs.tune import pool_recipe
from sigmerge.nano.facts import NANO_DOMAINS
from sigmerge.nano.files import POOL, RECIPES
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.records import Provenance, read
from tests.kept_entries import kept_values
from tests.pools import few_facts, make_pool, weight_bytes


@pytest.fixture(scope="module")
def pool(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: a repair remembers its profile beside the reference."""
    return shutil.copytree(mini, tmp_path_factory.mktemp("run") / "pool")


FEW = 8
"""Items of a domain that score a checkpoint."""


def recipe(pool: Path, **repair: Any) -> dict[str, Any]:
    return {
        "merge_method": "task_arithmetic",
        "base_model": str(pool / "reference"),
        "models": [
            {"model": str(pool / name), "parameters": {"weight": 0.4}} for name in NANO_DOMAINS
        ],
        "repair": {
            "probe": str(pool / "probe.jsonl"),
            "evaluate": {"suite": "nano", "pool": str(pool), "limit": FEW},
            **repair,
        },
    }


def test_the_chain_end_to_end(pool: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = sigmerge.run(recipe(pool), out)
    assert {file.name for file in out.iterdir()} == {
        "anchor", "repaired", "calibration.json", "evaluation.json", "report.html", "run.json",
    }  # fmt: skip
    evaluation = json.loads((out / "evaluation.json").read_text())
    for name, folder in (("anchor", out / "anchor"), ("repaired", out / "repaired")):
        again = nano_scores(folder, "evaluation", pool, How(limit=FEW))
        assert evaluation[name] == pytest.approx(again)
    plan = json.loads((out / "repaired/sigmerge/plan.json").read_text())
    assert list(plan["views"]) == ["representation", "direction", "sign"]
    best = {d: max(row[d] for row in plan["scores"]["experts"].values()) for d in NANO_DOMAINS}
    for domain in NANO_DOMAINS:
        gap = max(0.0, best[domain] - plan["scores"]["anchor"][domain])
        assert plan["deficit"][domain] == pytest.approx(gap)
    assert plan["guard"]["verdict"] in ("better", "level", "worse")
    assert plan["claimed"] == plan["quota"]
    assert result.as_json()["evaluation"] == evaluation
    page = (out / "report.html").read_text()
    assert "Task arithmetic" in page
    assert page == (out / "repaired/sigmerge/report.html").read_text()
    two_steps = tmp_path / "two"
    sigmerge.repair(recipe(pool), two_steps, anchor=out / "anchor")
    weights = "model.safetensors"
    assert (two_steps / weights).read_bytes() == (out / "repaired" / weights).read_bytes()


def test_an_interrupted_run_goes_on_and_a_finished_one_is_safe(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    sigmerge.run(recipe(pool), out)
    with pytest.raises(OutputError, match="finished run"):
        sigmerge.run(recipe(pool), out)
    whole = weight_bytes(out / "repaired")
    (out / "run.json").unlink()
    shutil.rmtree(out / "repaired")
    before = (out / "anchor/model.safetensors").stat().st_mtime_ns

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a checkpoint was scored again")

    monkeypatch.setattr("sigmerge.nano.suite.answer", refuse)
    sigmerge.run(recipe(pool), out)
    assert (out / "anchor/model.safetensors").stat().st_mtime_ns == before
    assert weight_bytes(out / "repaired") == whole


@pytest.mark.parametrize(
    ("library", "verb", "left_out"),
    [
        ("transformers", "run", "probe"),
        ("transformers", "merge", "evaluate"),
        ("transformers", "tune", "probe"),
        ("jinja2", "run", None),
        ("jinja2", "tune", None),
    ],
)
def test_a_library_that_is_missing_is_told_before_anything_is_made(
    library: str, verb: str, left_out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is the last step: hours would be lost."""
    given = recipe(POOL)
    if left_out is not None:
        del given["repair"][left_out]
    if left_out == "evaluate":
        row = dict.fromkeys(NANO_DOMAINS, 0.5)
        table = {"experts": dict.fromkeys(NANO_DOMAINS, row), "anchor": row}
        (tmp_path / "scores.json").write_text(json.dumps(table))
        given["repair"]["scores"] = str(tmp_path / "scores.json")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=rf"needs {library}, .*pip install 'sigmerge-llm"):
        getattr(sigmerge, verb)(given, tmp_path / "results/out")
    assert not (tmp_path / "results").exists()


def test_a_run_writes_into_no_foreign_folder(pool: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match=r"holds thesis\.txt, which no run wrote"):
        sigmerge.run(recipe(pool), tmp_path / "mine", overwrite=True)
    for name in (".env", "repaired/thesis.txt", "anchor/config.json"):
        out = tmp_path / name.replace("/", "-")
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("years of work")
        (out / "run.json").write_text("{}")
        with pytest.raises(OutputError, match=f"holds {name.split('/')[0]}, which no run wrote"):
            sigmerge.run(recipe(pool), out, overwrite=True)
        assert (out / name).exists()
    with pytest.raises(OutputError, match="holds an input"):
        sigmerge.run(recipe(pool), pool, overwrite=True)
    plain = recipe(pool)
    del plain["repair"]
    with pytest.raises(RecipeError, match="no repair: section"):
        sigmerge.run(plain, tmp_path / "run")


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def searched(pool: Path, **section: Any) -> dict[str, Any]:
    suite = few_facts(pool.parent, each=6)  # the winner is asked all of them
    small = {"population": 2, "calls": 4, "items": 5, "estimator": "mean", "suite": str(suite)}
    return {**recipe(pool), "merge_method": "task_arithmetic", "search": {**small, **section}}


def test_a_search_is_an_anchor(pool: Path, tmp_path: Path) -> None:
    """Repaired by `run` and by `merge`; the anchor is the search's winner, to the last bit."""
    out = tmp_path / "run"
    result = sigmerge.run(searched(pool), out)
    assert result.as_json()["title"] == "MERGE³ over Task arithmetic"
    sigmerge.search(searched(pool), tmp_path / "search")
    winner = weights(tmp_path / "search/winner")
    assert weights(out / "anchor") == winner
    kept = (out / "anchor/sigmerge/search.jsonl").read_bytes()
    assert kept == (tmp_path / "search/search.jsonl").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "search"]
    plan = json.loads((out / "repaired/sigmerge/plan.json").read_text())
    assert sum(map(sum, plan["claimed"])) > 0
    sigmerge.merge(searched(pool), tmp_path / "repaired")
    assert weights(tmp_path / "repaired") == weights(out / "repaired")
    plain = searched(pool)
    del plain["repair"]
    sigmerge.merge(plain, tmp_path / "plain")
    assert weights(tmp_path / "plain") == winner
    sigmerge.merge(tmp_path / "plain/sigmerge/recipe.yaml", tmp_path / "again")
    assert weights(tmp_path / "again") == winner


def test_an_anchor_of_other_code_or_libraries_is_not_current(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade of sigmerge or of NumPy in between; a partial result is not continued either."""
    content = load_recipe(recipe(pool))
    anchor = tmp_path / "anchor"
    make_anchor(content, anchor, Options())
    assert is_current(content, anchor, Options())
    assert read(Provenance, anchor / "sigmerge/provenance.json").job
    for name in ("code_digest", "versions"):
        with monkeypatch.context() as patch:
            patch.setattr(dense, name, lambda *_: "of another version")
            assert not is_current(content, anchor, Options())
    assert is_current(content, anchor, Options())
    assert not is_current(content, anchor, Options(allow_nonfinite=True))


def test_a_searched_anchor_is_never_current(pool: Path, tmp_path: Path) -> None:
    content = searched(pool)
    del content["repair"]
    loaded = load_recipe(content)
    sigmerge.merge(loaded, tmp_path / "out")
    assert not is_current(loaded, tmp_path / "out", Options())


@pytest.mark.usefixtures("own_cache")
@pytest.mark.campaign
def test_an_interrupted_run_does_not_search_again(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, content = tmp_path / "run", searched(pool)

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("searching", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sigmerge.run(content, out, progress=stop, threads=1)
    assert (before := kept_values("search"))
    heard: list[tuple[str, int]] = []
    sigmerge.run(content, out)
    assert kept_values("search")[: len(before)] == before  # and nothing of it was made again
    (out / "run.json").unlink()
    made = weights(out / "anchor")
    sigmerge.run(content, out)
    assert weights(out / "anchor") == made
    (out / "run.json").unlink()
    other = {**content, "seed": 1}
    sigmerge.run(other, out, progress=lambda stage, done, total: heard.append((stage, done)))
    assert [done for stage, done in heard if stage == "searching"] == list(range(1, 5))


@pytest.mark.usefixtures("own_cache")
def test_what_a_killed_search_left_beside_a_merge_is_made_again(pool: Path, tmp_path: Path) -> None:
    content = searched(pool)
    del content["repair"]
    work = tmp_path / ".out.search"
    sigmerge.search(content, work)
    wanted, asked = weights(work / "winner"), kept_values("search")
    (work / "winner/sigmerge/.search.json.1-1.partial").write_text("{")
    (work / "winner/model.safetensors").write_bytes(b"damaged")
    sigmerge.merge(content, tmp_path / "out")
    assert weights(tmp_path / "out") == wanted and kept_values("search") == asked
    (report,) = sigmerge.verify(tmp_path / "out", deep=True)
    assert report.ok and "recomputed" in report.checked, report.findings
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"search": {"population": 25}}, "search: A budget of 240 .* generations of 25"),
        ({"search": {"population": 5, "calls": 10, "generations": 2}}, "not both"),
        ({"search": {"estimator": "irt"}}, "search.estimator: must be 'mean'"),
        ({"search": {"popluation": 4}}, "did you mean 'population'"),
        ({"search": {}, "merge_method": "cabs"}, "cabs cannot be searched; the search knows"),
    ],
)
def test_search_sections_that_cannot_be_run(
    pool: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe({**recipe(pool), **change})


def test_a_dry_run_of_a_searched_merge(pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(searched(pool)))
    ran = CliRunner().invoke(app, ["merge", str(file), str(tmp_path / "out"), "--dry-run"])
    assert "4 calls = 2 × 2, 10 items each" in ran.output and "candidates at a time" in ran.output
    assert not (tmp_path / "out").exists()


def limited(pool: Path) -> Recipe:
    """The recipe that tunes a pool, on as many items."""
    content = yaml.safe_load(pool_recipe(pool).text)
    content["repair"]["evaluate"]["limit"] = 120
    return load_recipe(content)


def test_the_demo_on_the_shipped_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every item calibrates; a quarter of the others evaluates."""
    shipped = (RECIPES / "linear.yaml").read_text()
    assert shipped.count("{suite: nano}") == 1
    few = shipped.replace("{suite: nano}", "{suite: nano, limit: 120}")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/linear.yaml").write_text(few.replace("../pool/", f"{POOL}/"))
    monkeypatch.setattr(demo_module, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(demo_module, "DEMO_ANCHORS", ("linear",))
    monkeypatch.setattr(demo_module, "pool_recipe", limited)
    result = sigmerge.demo(tmp_path / "demo", calls=5)
    [row] = result.rows
    assert row.name == "Linear soup"
    assert row.domains == 5
    assert row.gain > 0
    assert Path(result.page).read_text().count("Linear soup") > 0
    assert result.tuned is not None and result.tuned.calls == 5
    assert result.tuned.tuned > result.tuned.plain > row.anchor
    assert (tmp_path / "demo/tuned/winner/model.safetensors").is_file()
    before = (tmp_path / "demo/tuned/tune.json").read_bytes()
    (tmp_path / "demo" / "report.html").unlink()  # as if it had been interrupted before its page
    assert sigmerge.demo(tmp_path / "demo", calls=5).tuned == result.tuned
    assert (tmp_path / "demo/tuned/tune.json").read_bytes() == before
    with pytest.raises(OutputError, match="finished demo"):
        sigmerge.demo(tmp_path / "demo")


def test_every_shipped_recipe_is_sound() -> None:
    from sigmerge.jobs.dense import plan_dense

    files = sorted(RECIPES.glob("*.yaml"))
    assert {file.stem for file in files} >= set(demo_module.DEMO_ANCHORS)
    for file in files:
        loaded = load_recipe(file)
        assert list(loaded.experts) == list(NANO_DOMAINS)
        assert yaml.safe_load(loaded.text)["repair"]["evaluate"] == {"suite": "nano"}
        if loaded.search is None:
            assert plan_dense(loaded, Options()).pool.stack.depth == 6
        else:
            job = plan_search(loaded, Options())
            assert (job.settings.evaluation_calls, job.base.pool.stack.depth) == (240, 6)


ONES = """
import json, sys
for line in open(sys.argv[1]):
    print(json.dumps({"id": json.loads(line)["id"], "right": 1}))
"""


def test_plan_and_page_name_the_benchmarks_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ruling 24. The domain is scored by what is there, and what is not there is named."""
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    pool = make_pool(tmp_path / "pool", experts=2, layers=2)
    (pool.root / "ones.py").write_text(ONES)
    rows = [json.dumps({"prompt": f"p{i}", "answer": ""}) for i in range(10)]
    (pool.root / "q.jsonl").write_text("\n".join(rows))
    command = f"{sys.executable} ones.py {{items}}"
    here = {
        "harness": "command",
        "files": "q.jsonl",
        "command": command,
        "metrics": {"acc": "right"},
    }
    lost = {"harness": "jsonl", "files": "lost.jsonl"}
    domains = {"math": {"m": here, "lost": lost}, "coding": {"c": here, "gone": lost, "off": lost}}
    (pool.root / "own.yaml").write_text(yaml.safe_dump({"name": "own", "domains": domains}))
    recipe = pool.write(pool.recipe("linear", repair={"evaluate": {"suite": "own.yaml"}}))
    done = sigmerge.run(recipe, tmp_path / "run", threads=1)
    plan = json.loads((tmp_path / "run/repaired/sigmerge/plan.json").read_text())
    named = {
        "math: scored without lost, which has no data here",
        "coding: scored without gone, off, which have no data here",
    }
    assert {note for note in plan["warnings"] if "no data" in note} == named
    assert named <= set(done.warnings)
    page = (tmp_path / "run/report.html").read_text()
    assert all(note in page for note in named)
    assert plan["scores"]["missing"] == {"math": ["lost"], "coding": ["gone", "off"]}
    with pytest.raises(ScoreError, match="--strict wants all"):
        sigmerge.run(recipe, tmp_path / "strict", strict=True)
