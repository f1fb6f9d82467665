"""Which items are used: budgets, subsets, and never the evaluation split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.errors import ScoreError
from sigmerge.merge3.extract import Question, allowances, clustered, generator, labelled, uniform
from sigmerge.merge3.irt import Items

CALIBRATION = {
    "math": 263,
    "instruction": 108,
    "coding": 107,
    "safety": 363,
    "multilingual": 18_943,
}


def test_1500_labels_from_the_calibration_split_of_the_paper() -> None:
    given = allowances(CALIBRATION, 1500)
    assert given == {**CALIBRATION, "multilingual": 659}
    assert list(given) == list(CALIBRATION)


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=7), st.integers(7, 2000))
def test_a_budget_is_used_up_and_no_domain_is_starved(sizes: list[int], budget: int) -> None:
    counts = {f"d{i}": size for i, size in enumerate(sizes)}
    given = allowances(counts, budget)
    assert sum(given.values()) == min(budget, sum(sizes))
    capped = [given[d] for d in counts if given[d] < counts[d]]
    assert all(given[d] >= 1 for d in counts)
    assert not capped or max(capped) - min(capped) <= 1
    assert not capped or min(capped) >= max(given.values()) - 1


def pool(split: str = "calibration", each: int = 30) -> list[Question]:
    return [Question(f"{d}-{i}", d, d, split) for d in ("a", "b") for i in range(each)]


def test_items_of_the_evaluation_split_are_refused() -> None:
    with pytest.raises(ScoreError, match=r"a-0 is of the evaluation split"):
        labelled(pool("evaluation"))
    with pytest.raises(ScoreError, match="x-1"):
        labelled([*pool(), Question("x-1", "a", "a", "evaluation")])


def test_all_items_within_the_budget_else_a_draw() -> None:
    assert [i for each in labelled(pool()).values() for i in each] == pool()
    drawn = labelled(pool(), budget=20, seed=4)
    assert {d: len(each) for d, each in drawn.items()} == {"a": 10, "b": 10}
    assert drawn == labelled(pool(), budget=20, seed=4)
    assert drawn != labelled(pool(), budget=20, seed=5)


def test_impossible_budgets_and_empty_suites() -> None:
    with pytest.raises(ScoreError, match="cannot cover 2 domains"):
        labelled(pool(), budget=1)
    with pytest.raises(ScoreError, match="no labelled items"):
        labelled([])


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 80), st.integers(0, 5))
def test_uniform(count: int, wanted: int, seed: int) -> None:
    subset = uniform(count, wanted, generator(seed, "subset"))
    assert len(subset.rows) == min(count, wanted) == len(set(subset.rows.tolist()))
    assert subset.weights.sum() == pytest.approx(1)
    assert (subset.rows >= 0).all() and (subset.rows < count).all()


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 5), st.integers(0, 100))
def test_clusters_even_of_items_that_coincide(
    count: int, wanted: int, distinct: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.standard_normal((distinct, 3))[rng.integers(0, distinct, count)]
    subset = clustered(Items(kinds[:, :2], kinds[:, 2]), wanted, generator(seed, "subset"))
    assert len(subset.rows) == min(count, wanted) == len(set(subset.rows.tolist()))
    assert subset.weights.sum() == pytest.approx(1)
    assert (subset.weights >= 1 / count - 1e-12).all()


def test_clusters_find_the_groups_and_weigh_them() -> None:
    rng = np.random.default_rng(0)
    centres = np.repeat([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]], [10, 30, 60], axis=0)
    points = centres + 0.1 * rng.standard_normal(centres.shape)
    found = [
        clustered(Items(points[:, :1], points[:, 1]), 3, generator(seed, "subset"))
        for seed in range(20)
    ]
    exact = [sorted(each.weights.tolist()) == [0.1, 0.3, 0.6] for each in found]
    assert sum(exact) >= 10  # Lloyd's iterations end in a local optimum from some starts
