"""Item response theory: the multidimensional two-parameter logistic model.

    P(respondent j is right on item i) = σ(α_iᵀγ_j − β_i)

α is an item's discrimination, β its difficulty, γ_j a respondent's ability. This one
parameterisation holds everywhere. Parameters are maximum a posteriori under Gaussian priors: with
the dozen respondents of a pool the likelihood alone would run away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit

from sigmerge.core import Array

BOUND = 10.0
"""No coordinate of an ability leaves ±BOUND: all-right answers have no finite maximum."""
WEAK = 0.1
"""Precision of the weak Gaussian prior of a single ability; 0 is maximum likelihood."""


@dataclass(frozen=True)
class Items:
    """Item parameters: `discrimination` α [items, dimension] and `difficulty` β [items]."""

    discrimination: Array
    difficulty: Array

    def __len__(self) -> int:
        return len(self.difficulty)

    def __getitem__(self, rows: Any) -> Items:
        return Items(self.discrimination[rows], self.difficulty[rows])

    def probability(self, ability: Array) -> Array:
        """σ(α_iᵀγ − β_i) for every item."""
        return np.asarray(expit(self.discrimination @ ability - self.difficulty))


@dataclass(frozen=True)
class Prior:
    """Standard deviations of the Gaussian priors.

    The first dimension of α has mean 1 and the others mean 0: it is the general ability, and its
    sign is not left to chance. β and γ have mean 0.
    """

    discrimination: float = 0.5
    difficulty: float = 2.0
    ability: float = 1.0


@dataclass(frozen=True)
class Fit:
    """A fitted model: item parameters and the respondents' abilities γ [respondents, dimension]."""

    items: Items
    abilities: Array


@dataclass(frozen=True)
class HeldOut:
    """Mean squared error of predicted answers that the fit had not seen.

    `baseline` is that of the plain guess: a respondent's mean over the answers the fit saw. `bias`
    is how far a respondent's predicted accuracy is from its true one, on average.
    """

    error: float
    baseline: float
    bias: float


DEFAULT_PRIOR = Prior()


def fit(
    answers: Array,
    dimension: int = 1,
    prior: Prior = DEFAULT_PRIOR,
    observed: Array | None = None,
) -> Fit:
    """Maximum a posteriori item parameters and abilities from right (1) and wrong (0) answers.

    `answers` is [respondents, items]; where `observed` is false an answer is not looked at.
    """
    right = np.asarray(answers, np.float64)
    mask = np.ones_like(right) if observed is None else np.asarray(observed, np.float64)
    start = _start(right, mask, dimension)
    respondents, items = right.shape
    cuts = np.cumsum([items * dimension, items])
    centre = np.zeros((items, dimension))
    centre[:, 0] = 1.0

    def unpack(flat: Array) -> tuple[Array, Array, Array]:
        alpha, beta, gamma = np.split(flat, cuts)
        return alpha.reshape(items, dimension), beta, gamma.reshape(respondents, dimension)

    def loss(flat: Array) -> tuple[float, Array]:
        alpha, beta, gamma = unpack(flat)
        logits = gamma @ alpha.T - beta
        away = (alpha - centre) / prior.discrimination**2
        harder, abler = beta / prior.difficulty**2, gamma / prior.ability**2
        value = np.sum(mask * (np.logaddexp(0.0, logits) - right * logits))
        value += (np.sum(away * (alpha - centre)) + harder @ beta + np.sum(abler * gamma)) / 2
        residual = mask * (expit(logits) - right)
        parts = residual.T @ gamma + away, harder - residual.sum(0), residual @ alpha + abler
        return float(value), np.concatenate([part.ravel() for part in parts])

    alpha, beta, gamma = unpack(_least(loss, start, options={"maxiter": 2000}))
    return Fit(Items(alpha, beta), gamma)


def _start(right: Array, mask: Array, dimension: int) -> Array:
    """Difficulties and abilities from smoothed means; further dimensions slightly off zero."""
    rng = np.random.default_rng(0)
    respondents, items = right.shape
    alpha = 0.1 * rng.standard_normal((items, dimension))
    gamma = 0.1 * rng.standard_normal((respondents, dimension))
    alpha[:, 0] = 1.0
    gamma[:, 0] = _smoothed_logit(right, mask, 1)
    beta = -_smoothed_logit(right, mask, 0)
    gamma[:, 0] -= gamma[:, 0].mean()
    return np.concatenate([alpha.ravel(), beta, gamma.ravel()])


def _smoothed_logit(right: Array, mask: Array, axis: int) -> Array:
    hits, seen = (mask * right).sum(axis) + 0.5, mask.sum(axis) + 1.0
    return np.asarray(np.log(hits / (seen - hits)))


def held_out(
    answers: Array, dimension: int = 1, prior: Prior = DEFAULT_PRIOR, folds: int = 5, seed: int = 0
) -> HeldOut:
    """Cross-validation over single answers: each is predicted by a fit that did not see it."""
    right = np.asarray(answers, np.float64)
    shuffled = np.random.default_rng(seed).permutation(right.size)
    fold = (shuffled % folds).reshape(right.shape)
    errors, baselines, told = np.empty_like(right), np.empty_like(right), np.empty_like(right)
    for hidden in (fold == k for k in range(folds)):
        fitted = fit(right, dimension, prior, ~hidden)
        predicted = np.stack([fitted.items.probability(ability) for ability in fitted.abilities])
        means = (right * ~hidden).sum(1) / np.maximum(1, (~hidden).sum(1))
        told[hidden] = predicted[hidden]
        errors[hidden] = ((predicted - right) ** 2)[hidden]
        baselines[hidden] = ((means[:, None] - right) ** 2)[hidden]
    bias = float(np.abs(told.mean(1) - right.mean(1)).mean())
    return HeldOut(float(errors.mean()), float(baselines.mean()), bias)


def ability(items: Items, answers: Array, precision: float = WEAK) -> Array:
    """γ of one respondent from its answers to these items, from γ = 0 on."""
    start = np.zeros(items.discrimination.shape[1])
    return _logistic(items.discrimination, items.difficulty, answers, start, precision, BOUND)


def mixture(items: Items, answers: Array, endpoints: Array, precision: float = WEAK) -> Array:
    """ω such that γ = Σ_j ω_j γ_j explains the answers; `endpoints` holds the γ_j as rows.

    ω starts at 1/J, where the weak prior has its centre, and is not constrained.
    """
    start = np.full(len(endpoints), 1 / len(endpoints))
    design = items.discrimination @ endpoints.T
    return _logistic(design, items.difficulty, answers, start, precision, np.inf)


def _logistic(
    design: Array, offset: Array, answers: Array, start: Array, precision: float, bound: float
) -> Array:
    """The x near `start` under which σ(design·x − offset) explains the answers best."""
    right = np.asarray(answers, np.float64)

    def loss(x: Array) -> tuple[float, Array]:
        logits = design @ x - offset
        away = x - start
        value = np.sum(np.logaddexp(0.0, logits) - right * logits) + precision * (away @ away) / 2
        return float(value), design.T @ (expit(logits) - right) + precision * away

    limits = [(-bound, bound)] * len(start)
    tight = {"gtol": 1e-10, "ftol": 1e-15}
    return _least(loss, start, bounds=limits, options=tight)


def _least(loss: Callable[[Array], tuple[float, Array]], start: Array, **how: Any) -> Array:
    """Where a function is least, of which each value comes with its gradient."""
    from scipy.optimize import minimize  # takes longer to load than all that starts a search

    return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B", **how).x)
