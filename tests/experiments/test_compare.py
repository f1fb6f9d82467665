"""The table of all methods: means, spread, order and costs."""

from __future__ import annotations

from pathlib import Path

from sigmerge.experiments.compare import Row, markdown
from sigmerge.experiments.studies import BASELINES, _recipes
from sigmerge.jobs.demo import ANCHORS
from sigmerge.nano.files import POOL
from sigmerge.recipe import load_recipe


def row(method: str, math: float, coding: float, **costs: int) -> Row:
    return Row(method, {"math": math, "coding": coding}, 1 - (math + coding) / 2, 2.0, **costs)


def test_one_pool_has_no_spread() -> None:
    lines = markdown([[row("a", 0.5, 0.7), row("b", 0.9, 0.8, calls=240)]]).splitlines()
    assert lines[0] == "| method | Macro-2 | math | coding | residual gap |"
    assert lines[2] == "| b | 85.00 | 90.00 | 80.00 | 15.00 |"
    assert lines[-1] == "| b | 2.0 | 0 | 240 | 0 | 0 |"


def test_several_pools_have_mean_and_standard_deviation() -> None:
    pools = [[row("a", 0.5, 0.7)], [row("a", 0.6, 0.7)], [row("a", 0.7, 0.7)]]
    line = markdown(pools).splitlines()[2]
    assert line == "| a | 65.00 ± 5.00 | 60.00 ± 10.00 | 70.00 ± 0.00 | 35.00 ± 5.00 |"


def test_all_twelve_recipes_can_be_moved_to_a_pool() -> None:
    recipes = [load_recipe(_recipes(POOL)(name)) for name in (*ANCHORS, *BASELINES)]
    assert len(recipes) == 12
    assert all(recipe.reference == POOL / "reference" for recipe in recipes)
    [search] = [recipe.search for recipe in recipes if recipe.search]
    assert Path(search.suite) == POOL
