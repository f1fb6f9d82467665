"""`analyze` and `anchors` on what a suite stored, and the paper's own tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sigmerge as package
from sigmerge.lab.analysis import charts
from sigmerge.lab.analysis.claims import claims
from sigmerge.lab.experiments.analyze import rules
from tests.command_line import refused, sigmerge
from tests.lab.analysis.experiment import make_store, read
from tests.lab.experiments.test_suite import definition, write
from tests.pools import PoolOnDisk, make_pool


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", layers=2, dtype="bf16")


@pytest.fixture(autouse=True)
def one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time of an analysis; test_charts.py looks at all of it."""
    builders = {"sensitivity": charts.PLOT_BUILDERS["sensitivity"]}
    monkeypatch.setattr(charts, "PLOT_BUILDERS", builders)


def test_a_suite_is_analysed(pool: PoolOnDisk, tmp_path: Path) -> None:
    package.suite(definition(pool), tmp_path / "out", threads=1)
    ran = sigmerge("analyze", tmp_path / "out", "--out", tmp_path / "pages", "--json")
    assert ran.code == 0, ran
    assert {"main_gain", "residual_gap", "sens_p0", "efficiency"} <= set(ran.json["tables"])
    assert "sensitivity" in ran.json["figures"]
    assert (tmp_path / "pages/index.html").exists()
    improved = next(s for s in ran.json["statements"] if s["text"] == "Every anchor improves")
    assert improved["here"].endswith("of 2")
    again = sigmerge("analyze", tmp_path / "out", "--json")
    assert Path(again.json["out"]) == tmp_path / "out/analysis"
    page = (tmp_path / "out/analysis/index.html").read_bytes()
    assert package.suite(definition(pool), tmp_path / "out", threads=1).made == 0  # it goes on
    assert (tmp_path / "out/analysis/index.html").read_bytes() == page
    rules_file = json.loads((tmp_path / "pages/anchor_rules.json").read_text())
    assert rules_file["pools"]["pool"]["anchors"] == 2


def test_only_an_older_analysis_is_replaced(tmp_path: Path) -> None:
    make_store(tmp_path / "large.sqlite")
    make_store(tmp_path / "small.sqlite", lambda run: run.kind in ("expert", "anchor", "default"))
    out, kept = tmp_path / "out", tmp_path / "notes"
    assert sigmerge("analyze", tmp_path / "large.sqlite", "--out", out).code == 0
    assert (out / "tables/baselines.md").exists()
    assert sigmerge("analyze", tmp_path / "small.sqlite", "--out", out).code == 0
    assert not (out / "tables/baselines.md").exists()
    assert sorted(file.name for file in tmp_path.glob(".*")) == []
    kept.mkdir()
    (kept / "index.html").write_text("mine")
    told = refused(4, "analyze", tmp_path / "small.sqlite", "--out", kept, beside=tmp_path)
    assert "choose a new folder" in told and (kept / "index.html").read_text() == "mine"
    (out / "mine.txt").write_text("mine")
    refused(4, "analyze", tmp_path / "small.sqlite", "--out", out, beside=tmp_path)


def test_a_suite_goes_on_beside_an_analysis_that_was_killed(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    package.suite(definition(pool), tmp_path / "out", threads=1)
    (tmp_path / "out/.analysis.partial/tables").mkdir(parents=True)
    (tmp_path / "out/.analysis.partial.lock").touch()
    assert package.suite(definition(pool), tmp_path / "out", threads=1).made == 0
    assert sigmerge("analyze", tmp_path / "out").code == 0
    assert not list((tmp_path / "out").glob(".analysis*"))


def test_statements_follow_the_numbers(tmp_path: Path) -> None:
    found = {c.text: c for c in claims(read(make_store(tmp_path / "store.sqlite")))}
    assert found["Every anchor improves"].holds
    assert found["inverted share is worse than the default on every pool"].holds
    assert found["The residual gap falls"].holds
    lowered = lambda r: r.kind != "default"  # noqa: E731
    less = claims(read(make_store(tmp_path / "less.sqlite", lowered)))
    assert "Every anchor improves" not in {c.text for c in less}


def test_the_rules_of_selection_are_those_of_the_statistics(tmp_path: Path) -> None:
    results = read(make_store(tmp_path / "results.sqlite"))
    found, main = rules(results)["pools"], results.main
    assert list(found) == results.pools
    for pool, row in found.items():
        pairs = main.filter(main["pool"] == pool).sort("before")
        lost = pairs["after"].max() - pairs["after"][-1]
        assert row["regret"]["strongest"] == pytest.approx(lost)
        assert row["regret"]["weakest"] == pytest.approx(pairs["after"].max() - pairs["after"][0])


def test_what_analyze_refuses(tmp_path: Path) -> None:
    assert sigmerge("analyze").code == 2
    assert "no such store" in sigmerge("analyze", tmp_path).err
    (tmp_path / "results.sqlite").write_text("nothing of the kind")
    assert sigmerge("analyze", tmp_path).code == 5


def test_anchors_are_ranked_by_calibration_scores(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = definition(pool)
    ran = sigmerge("anchors", write(tmp_path, content), "--json")
    assert ran.code == 0, ran
    [found] = ran.json["pools"]
    means = [row["statistics"]["macro"] for row in found["anchors"]]
    assert means == sorted(means, reverse=True)
    for row in found["anchors"]:
        assert row["statistics"]["macro"] == pytest.approx(sum(row["scores"].values()) / 3)
        gaps = [0.9 - value for value in row["scores"].values()]
        assert row["statistics"]["gap mean"] == pytest.approx(sum(gaps) / 3)
        assert len(row["statistics"]) == 9
    recipe = pool.recipe("ties") | {"repair": {"command": content["command"]}}
    by_recipe = package.anchors(pool.write(recipe), threads=1)
    names = {row.anchor for row in by_recipe.pools[0].anchors}
    assert names == {"linear", "task_arithmetic", "ties", "dare_linear", "dare_ties"}
    assert by_recipe.pools[0].left_out == ("fisher", "regmean")
    said = sigmerge("anchors", pool.write(recipe))
    assert "not ranked: fisher, regmean; give every model exemplars:" in said.out
    assert not list(tmp_path.glob(".anchors-*"))


def test_anchors_need_a_source_of_scores(pool: PoolOnDisk) -> None:
    ran = sigmerge("anchors", pool.write(pool.recipe("ties")))
    assert ran.code == 2 and "evaluate: or command:" in ran.err
