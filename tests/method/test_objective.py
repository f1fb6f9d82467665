"""What is maximised, what must be kept, and how far a score can be trusted."""

import math

import numpy as np
import pytest

from sigmerge.errors import RecipeError
from sigmerge.method.objective import (
    Answer,
    Merit,
    Objective,
    check_calls,
    paired_error,
)

DOMAINS = ("math", "safety")
TARGET = (0.8, 1.0)


def merit(objective, *scores):
    return objective.merit(DOMAINS, scores, TARGET)


def test_values_by_hand():
    assert merit(Objective(), 0.5, 0.7) == Merit(0.0, pytest.approx(0.6))
    weighted = Objective("weighted", {"math": 3.0, "safety": 1.0})
    assert merit(weighted, 0.5, 0.7) == Merit(0.0, pytest.approx(0.55))
    assert merit(Objective("weighted", {"safety": 2.0}), 0.5, 0.7).value == pytest.approx(0.7)
    assert merit(Objective("worst"), 0.5, 0.9) == Merit(0.0, pytest.approx(-0.3))
    assert merit(Objective("worst"), 0.9, 0.9).value == pytest.approx(-0.1)


def test_a_floor_is_a_fraction_of_the_experts_score_and_comes_first():
    kept = Objective(floors={"safety": 0.95})
    high, safe = merit(kept, 0.9, 0.90), merit(kept, 0.3, 0.95)
    assert high.below == pytest.approx(0.05)
    assert safe.below == 0
    assert safe.beats(high)
    assert not high.beats(safe)
    assert merit(kept, 0.3, 0.91).beats(high)
    assert merit(kept, 0.4, 0.95).beats(safe)
    # As far below the floor, the value decides.
    assert high.beats(merit(kept, 0.8, 0.90))
    # 0.95 of an expert that reaches 0.8 is 0.76.
    assert merit(Objective(floors={"math": 0.95}), 0.7, 0.9).below == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("gain", "margin", "better"),
    [(0.02, 0.0, True), (0.02, 0.03, False), (0.9e-9, 0.0, False), (1.1e-9, 0.0, True)],
)
def test_better_is_by_more_than_the_margin(gain, margin, better):
    assert Merit(0.0, gain).beats(Merit(0.0, 0.0), margin) == better
    assert not Merit(0.0, 0.0).beats(Merit(0.0, gain), margin)


def test_pull_is_the_deficit_as_the_objective_counts_it():
    assert Objective().pull(DOMAINS, (0.5, 1.0), TARGET) == pytest.approx([0.3, 0])
    weighted = Objective("weighted", {"math": 1.0, "safety": 3.0})
    assert weighted.pull(DOMAINS, (0.5, 0.9), TARGET) == pytest.approx([0.15, 0.15])
    kept = Objective(floors={"safety": 0.95})
    assert kept.pull(DOMAINS, (0.5, 0.9), TARGET) == pytest.approx([0.3, 0.15])
    assert Objective().pull(DOMAINS, (0.8 - 1e-12, 1.0), TARGET).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        (Objective("weighted", {"maths": 1.0}), "unknown domain maths, the pool has math, safety"),
        (Objective(floors={"speed": 0.5}), "unknown domain speed"),
        (Objective("weighted"), "weighted needs at least one weight above 0"),
        (Objective("weighted", {"math": 0.0}), "at least one weight above 0"),
        (Objective("weighted", {"math": -1.0, "safety": 1.0}), "the weight of math is -1"),
        (Objective("weighted", {"math": math.inf}), "the weight of math is inf"),
        (Objective("mean", {"math": 1.0}), "mean takes no weights"),
        (Objective(floors={"math": 1.2}), "the floor of math is 1.2"),
    ],
)
def test_one_problem_each(objective, problem):
    (found,) = objective.problems(DOMAINS)
    assert problem in found


def test_a_good_objective_has_no_problem():
    whole = Objective("weighted", {"math": 0.0, "safety": 2.0}, {"safety": 1.0, "math": 0.0})
    assert whole.problems(DOMAINS) == []


@pytest.mark.parametrize("weights", [None, {"a": 1.0}, {"a": 3.0, "c": 1.0}])
def test_the_error_of_a_difference_is_that_of_simulated_items(weights):
    """Two candidates that answer the same items, each right by a chance of its own."""
    objective = Objective("weighted", weights) if weights else Objective()
    rng = np.random.default_rng(0)
    both, items = np.array([0.8, 0.4, 0.6]), [40, 120, 10]

    def asked():
        one, other = {}, {}
        for d, chance, n in zip("abc", both, items, strict=True):
            shared, alone = rng.random(n) < chance, rng.random((2, n)) < 0.3
            one[d], other[d] = ([1.0 * (shared | each)] for each in alone)
        return Answer({}, one), Answer({}, other)

    pairs = [asked() for _ in range(2000)]
    gaps = [
        np.average(
            [one.marks[d][0].mean() - other.marks[d][0].mean() for d in one.marks],
            weights=[weights.get(d, 0) for d in one.marks] if weights else None,
        )
        for one, other in pairs
    ]
    errors = [objective.error(one, other) ** 2 for one, other in pairs]
    assert math.sqrt(np.mean(errors)) == pytest.approx(np.std(gaps), rel=0.06)
    assert objective.error(Answer({"a": 1.0}), pairs[0][0]) == 0


def test_the_error_of_the_worst_domain_is_the_largest():
    one = Answer({}, {"math": [np.array([1.0, 0, 0, 0])], "safety": [np.array([1.0, 0])]})
    other = Answer({}, {"math": [np.array([0, 1.0, 0, 0])], "safety": [np.array([1.0, 0])]})
    # math: variance 1/2 over four items; safety: none.
    assert Objective("worst").error(one, other) == pytest.approx(math.sqrt(1 / 8))


def test_paired_error_counts_the_items_on_which_two_candidates_differ():
    one = [np.array([1, 1, 1, 0], float), np.array([1, 1], float)]
    assert paired_error(one, one) == 0
    other = [np.array([1, 1, 0, 1], float), np.array([1, 1], float)]
    # Differences 0, 0, 1, -1: variance 1/2, over four items, and two domains in the mean.
    assert paired_error(one, other) == pytest.approx(math.sqrt(0.5 / 4) / 2)
    apart = [np.array([0, 1, 1, 1], float), np.array([1, 0], float)]
    # A second domain adds its own: differences 0 and 1, variance 1/4, over two items.
    assert paired_error(one, apart) == pytest.approx(math.sqrt(0.5 / 4 + 0.25 / 2) / 2)


def test_too_few_calls():
    check_calls(2, 2, "tune")
    with pytest.raises(RecipeError, match="tune needs at least 2 evaluation calls, not 1"):
        check_calls(1, 2, "tune")
