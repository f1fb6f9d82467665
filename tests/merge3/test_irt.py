"""The item response model: a maximum of its posterior, true parameters found, safe at the edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from sigmerge.merge3.irt import BOUND, Fit, Items, Prior, ability, fit, held_out, mixture

Array = np.ndarray[Any, Any]


def drawn(
    respondents: int, items: int, dimension: int, seed: int = 0
) -> tuple[Items, Array, Array]:
    """True item parameters and abilities, and answers drawn from them."""
    rng = np.random.default_rng(seed)
    alpha = 0.6 * rng.standard_normal((items, dimension))
    alpha[:, 0] = rng.uniform(0.6, 1.8, items)
    truth = Items(alpha, rng.normal(0, 1, items))
    gamma = rng.standard_normal((respondents, dimension))
    chance = np.stack([truth.probability(each) for each in gamma])
    return truth, gamma, (rng.random(chance.shape) < chance).astype(int)


def predicted(fitted: Fit) -> Array:
    return np.stack([fitted.items.probability(each) for each in fitted.abilities])


def posterior(fitted: Fit, answers: Array, prior: Prior) -> float:
    """The negative log posterior, term by term in plain Python."""
    total = 0.0
    for j, gamma in enumerate(fitted.abilities):
        total += sum(g**2 for g in gamma) / (2 * prior.ability**2)
        for i, (alpha, beta) in enumerate(
            zip(fitted.items.discrimination, fitted.items.difficulty, strict=True)
        ):
            p = 1 / (1 + math.exp(-(sum(a * g for a, g in zip(alpha, gamma, strict=True)) - beta)))
            total -= math.log(p if answers[j][i] else 1 - p)
    for alpha, beta in zip(fitted.items.discrimination, fitted.items.difficulty, strict=True):
        total += beta**2 / (2 * prior.difficulty**2)
        for d, a in enumerate(alpha):
            total += (a - (d == 0)) ** 2 / (2 * prior.discrimination**2)
    return total


@pytest.mark.parametrize("dimension", [1, 2])
def test_the_fit_is_a_maximum_of_the_posterior(dimension: int) -> None:
    _, _, answers = drawn(8, 10, dimension, seed=3)
    prior = Prior(0.7, 1.5, 1.2)
    fitted = fit(answers, dimension, prior)
    lowest = posterior(fitted, answers, prior)
    rng = np.random.default_rng(0)
    for step in (1e-2, 1e-1, 1.0):
        for _ in range(30):
            items = fitted.items
            moved = Fit(
                Items(
                    items.discrimination + step * rng.standard_normal(items.discrimination.shape),
                    items.difficulty + step * rng.standard_normal(items.difficulty.shape),
                ),
                fitted.abilities + step * rng.standard_normal(fitted.abilities.shape),
            )
            assert posterior(moved, answers, prior) > lowest


def test_parameters_are_recovered() -> None:
    truth, gamma, answers = drawn(400, 80, 1)
    fitted = fit(answers)

    def alike(one: Array, other: Array) -> float:
        return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])

    assert alike(fitted.items.difficulty, truth.difficulty) > 0.98
    assert alike(fitted.items.discrimination, truth.discrimination) > 0.85
    assert alike(fitted.abilities, gamma) > 0.95


@pytest.mark.parametrize("dimension", [1, 2])
def test_probabilities_are_recovered(dimension: int) -> None:
    truth, gamma, answers = drawn(300, 80, dimension)
    chance = np.stack([truth.probability(each) for each in gamma])
    error = np.abs(predicted(fit(answers, dimension)) - chance).mean()
    assert error < 0.07
    assert error < np.abs(answers.mean(0) - chance).mean() / 2


def test_a_second_dimension_explains_what_one_cannot() -> None:
    truth, gamma, _ = drawn(200, 60, 2)
    opposed = Items(truth.discrimination * [1, 3], truth.difficulty)
    chance = np.stack([opposed.probability(each) for each in gamma])
    answers = (np.random.default_rng(5).random(chance.shape) < chance).astype(int)
    assert held_out(answers, 2).error < held_out(answers, 1).error - 0.01


def test_answers_that_are_not_observed_do_not_count() -> None:
    _, _, answers = drawn(10, 12, 1)
    observed = np.random.default_rng(1).random(answers.shape) < 0.7
    flipped = np.where(observed, answers, 1 - answers)
    one, other = fit(answers, observed=observed), fit(flipped, observed=observed)
    assert np.array_equal(one.items.difficulty, other.items.difficulty)
    assert np.array_equal(one.abilities, other.abilities)


def test_held_out_error_knows_structure_from_chance() -> None:
    _, _, structured = drawn(15, 120, 1)
    found = held_out(structured)
    assert found.error < found.baseline - 0.01
    coins = np.random.default_rng(0).integers(0, 2, (15, 120))
    assert 0.2 < held_out(coins).error < 0.32


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("dimension", [1, 2])
def test_all_right_and_all_wrong_are_finite(value: int, dimension: int) -> None:
    fitted = fit(np.full((5, 7), value), dimension)
    found = predicted(fitted)
    assert np.isfinite(fitted.items.discrimination).all()
    assert (np.abs(found - value) < 0.3).all()
    assert np.isfinite(held_out(np.full((5, 7), value), dimension).error)


@pytest.mark.parametrize(("value", "sign"), [(0, -1), (1, 1)])
def test_an_ability_without_a_maximum_is_bounded(value: int, sign: int) -> None:
    items = Items(np.ones((6, 1)), np.zeros(6))
    assert ability(items, np.full(6, value), precision=0.0) == pytest.approx(sign * BOUND)
    weak = ability(items, np.full(6, value))
    assert 1 < sign * weak[0] < BOUND
    endpoints = np.array([[-1.0], [2.0]])
    assert np.isfinite(mixture(items, np.full(6, value), endpoints, precision=0.0)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 1.0]))
def test_an_ability_is_the_best_on_a_grid(seed: int, precision: float) -> None:
    truth, _, answers = drawn(1, 12, 1, seed)
    grid = np.linspace(-BOUND, BOUND, 4001)
    logits = grid[:, None] * truth.discrimination[:, 0] - truth.difficulty
    chance = np.clip(expit(logits), 1e-300, 1 - 1e-16)
    values = np.where(answers[0], np.log(chance), np.log1p(-chance)).sum(1)
    best = grid[np.argmax(values - precision * grid**2 / 2)]
    assert ability(truth, answers[0], precision)[0] == pytest.approx(best, abs=0.006)


def test_abler_respondents_have_more_ability() -> None:
    answers = np.array([[1] * k + [0] * (10 - k) for k in range(11)])
    abilities = fit(answers).abilities[:, 0]
    assert (np.diff(abilities) > 0).all()
