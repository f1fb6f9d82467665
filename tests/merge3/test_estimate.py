"""Estimators: the worked numbers, and each against an implementation that shares no code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from sigmerge.merge3.estimate import (
    ESTIMATORS,
    ItemModel,
    gmp_irt,
    gp_irt,
    mean,
    mp_irt,
    p_irt,
    trust,
)
from sigmerge.merge3.irt import Items, mixture

Array = np.ndarray[Any, Any]

WORKED = Items(np.array([[1.0], [2.0], [1.0], [1.0], [1.0]]), np.array([0.0, 1.0, -1.0, 0.0, 1.0]))


def benchmark(items: Items, seen: Any, **more: Any) -> ItemModel:
    rows = np.array(seen)
    given = {"endpoints": np.array([[0.5], [-0.5]]), "weights": np.full(len(rows), 1 / len(rows))}
    return ItemModel(items, seen=rows, **{**given, **more})


def random_benchmark(seed: int, dimension: int = 1, count: int = 30, seen: int = 12) -> Any:
    rng = np.random.default_rng(seed)
    alpha = rng.uniform(0.3, 2.0, (count, dimension)) * rng.choice([1, 1, 1, -1], (count, 1))
    weights = rng.random(seen)
    made = ItemModel(
        Items(alpha, rng.normal(0, 1, count)),
        rng.standard_normal((3, dimension)),
        rng.choice(count, seen, replace=False),
        weights / weights.sum(),
        trust=float(rng.random()),
    )
    return made, rng.integers(0, 2, seen)


def test_worked_probabilities_and_p_irt() -> None:
    expected = [0.622459, 0.5, 0.817574, 0.622459, 0.377541]
    assert WORKED.probability(np.array([0.5])) == pytest.approx(expected, abs=5e-7)
    worked = benchmark(WORKED, [0, 1])
    p = worked.score(np.array([1, 0]), np.array([0.5]))
    assert p == pytest.approx(0.563515, abs=5e-7)
    generalised = 0.5 * mean(worked, np.array([1, 0])) + 0.5 * p
    assert generalised == pytest.approx(0.531757, abs=1e-6)


def test_worked_shares() -> None:
    """N = 10, n = 4, observed 0.75, predicted 0.5 give 0.6, and 0.675 with c = 0.5."""
    coins = Items(np.zeros((10, 1)), np.zeros(10))
    four = benchmark(coins, [0, 3, 5, 9])
    answers = np.array([1, 1, 0, 1])
    assert p_irt(four, answers) == pytest.approx(0.6)
    assert mp_irt(four, answers) == pytest.approx(0.6)
    assert gp_irt(four, answers) == pytest.approx(0.675)
    assert gmp_irt(four, answers) == pytest.approx(0.675)


def test_worked_trust() -> None:
    assert trust(0.03, 0.25, 100) == pytest.approx(0.590164, abs=5e-7)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=5, max_size=5), st.sampled_from(list(ESTIMATORS)))
def test_a_subset_that_is_everything_gives_the_mean(answers: list[int], name: str) -> None:
    whole = benchmark(WORKED, range(5))
    assert ESTIMATORS[name](whole, np.array(answers)) == pytest.approx(np.mean(answers))


def plain_score(made: ItemModel, answers: Array, gamma: Array) -> float:
    """(n/N)·mean + (1 − n/N)·mean P over unseen, item by item."""
    unseen = [i for i in range(len(made.items)) if i not in set(made.seen.tolist())]
    total = 0.0
    for i in unseen:
        z = sum(a * g for a, g in zip(made.items.discrimination[i], gamma, strict=True))
        total += 1 / (1 + math.exp(-(z - made.items.difficulty[i])))
    n, count = len(made.seen), len(made.items)
    return n / count * sum(answers) / n + (1 - n / count) * total / len(unseen)


def plain_gamma(made: ItemModel, answers: Array, mixed: bool) -> Array:
    """Plain BFGS with numeric gradients, from 0 or from 1/J on."""
    alpha, beta = made.items.discrimination[made.seen], made.items.difficulty[made.seen]
    start = np.full(3, 1 / 3) if mixed else np.zeros(alpha.shape[1])

    def loss(x: Array) -> float:
        gamma = sum(w * e for w, e in zip(x, made.endpoints, strict=True)) if mixed else x
        value = made.precision / 2 * float(np.sum((x - start) ** 2))
        for a, b, y in zip(alpha, beta, answers, strict=True):
            p = 1 / (1 + math.exp(-(float(a @ gamma) - b)))
            value -= math.log(p) if y else math.log(1 - p)
        return value

    x = minimize(loss, start, method="BFGS", options={"gtol": 1e-8}).x
    return x @ made.endpoints if mixed else x


@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_against_an_independent_implementation(seed: int, dimension: int) -> None:
    made, answers = random_benchmark(seed, dimension)
    observed = sum(w * y for w, y in zip(made.weights, answers, strict=True))
    free = plain_score(made, answers, plain_gamma(made, answers, mixed=False))
    mixed = plain_score(made, answers, plain_gamma(made, answers, mixed=True))
    c = made.trust
    assert mean(made, answers) == pytest.approx(observed)
    assert p_irt(made, answers) == pytest.approx(free, abs=1e-5)
    assert gp_irt(made, answers) == pytest.approx(c * observed + (1 - c) * free, abs=1e-5)
    assert mp_irt(made, answers) == pytest.approx(mixed, abs=1e-5)
    assert gmp_irt(made, answers) == pytest.approx(c * observed + (1 - c) * mixed, abs=1e-5)


def test_answers_of_an_endpoint_are_explained_by_it() -> None:
    """Responses drawn from endpoint 1: ω ≈ (1, 0), and the accuracy is endpoint 1's."""
    rng = np.random.default_rng(0)
    items = Items(rng.uniform(-1.5, 1.5, (4000, 2)), rng.normal(0, 1, 4000))
    endpoints = np.array([[1.5, 0.3], [-0.5, 1.0]])
    chance = items.probability(endpoints[0])
    answers = (rng.random(4000) < chance).astype(int)
    seen = np.arange(2000)
    omega = mixture(items[seen], answers[seen], endpoints)
    assert omega == pytest.approx([1, 0], abs=0.1)
    estimate = mp_irt(benchmark(items, seen, endpoints=endpoints), answers[seen])
    assert estimate == pytest.approx(chance.mean(), abs=0.02)


def test_all_right_and_all_wrong() -> None:
    made, answers = random_benchmark(1)
    for name, estimator in ESTIMATORS.items():
        low, high = (estimator(made, np.full(len(answers), value)) for value in (0, 1))
        assert 0 <= low < high <= 1, name


def test_collinear_endpoints_are_harmless() -> None:
    """ω is not unique then, the prediction is."""
    made, answers = random_benchmark(2)
    same = ItemModel(made.items, np.ones((4, 1)), made.seen, made.weights, precision=1e-6)
    free = ItemModel(made.items, np.ones((1, 1)), made.seen, made.weights, precision=1e-6)
    assert mp_irt(same, answers) == pytest.approx(p_irt(free, answers), abs=1e-3)
