"""Guided weights on score models whose optimum is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.errors import RecipeError
from sigmerge.method import guidance
from sigmerge.method.guidance import Guidance, begin, propose
from sigmerge.method.objective import Answer, Objective

DOMAINS = ("a", "b", "c", "d", "e")


def named(values):
    return {d: float(v) for d, v in zip(DOMAINS, values, strict=False)}


def observe(state, scores, items=None):
    """With `items`, each answer is right on an item of its own: any two differ on two of them."""
    row = 1.0 * (np.arange(items or 1) == len(state.tried))
    right = {d: [row] for d in scores} if items else None
    return guidance.observe(state, Answer(scores, right))


class Linear:
    """q_d = target − slope · max(0, t_d − w_d): a domain lacks in proportion to missing weight.

    With `cost`, the level above that of t costs every domain the same.
    """

    def __init__(self, optimum, slope=0.5, cost=0.0):
        self.optimum, self.slope, self.cost = np.array(optimum), slope, cost
        self.target = named([0.9] * len(optimum))
        self.calls = 0

    def __call__(self, weights):
        self.calls += 1
        w = np.array(list(weights.values()))
        missing = self.slope * np.maximum(0, self.optimum - w)
        return named(0.9 - missing - self.cost * max(0.0, w.sum() - self.optimum.sum()))


def guided(model, start, calls, objective=None, **options) -> Guidance:
    state = begin(named(start), model.target, calls, objective, **options)
    while (weights := propose(state)) is not None:
        state = observe(state, model(weights))
    return state


def test_the_first_candidate_is_the_recipes():
    assert propose(begin(named([0.4, 0.2]), named([1, 1]), 3)) == {"a": 0.4, "b": 0.2}


def test_the_second_is_the_closed_form():
    model = Linear([0.6, 0.2, 0.4], slope=0.5)
    start = np.array([0.4, 0.4, 0.4])
    state = observe(begin(named(start), model.target, 9), model(named(start)))
    gap = 0.5 * np.array([0.2, 0, 0])
    wanted = guidance.STRETCH * (start + guidance.FIRST_STEP * 0.4 * (gap - gap.mean()))
    assert list(propose(state).values()) == pytest.approx(wanted)


def test_without_a_level_a_step_only_moves_weight():
    model = Linear([0.5, 0.3, 0.4], slope=0.2)
    state = observe(begin(named([0.4] * 3), model.target, 9, level=False), model(named([0.4] * 3)))
    weights = list(propose(state).values())
    gap = 0.2 * np.array([0.1, 0, 0])
    assert weights == pytest.approx(0.4 + guidance.FIRST_STEP * 0.4 * (gap - gap.mean()))
    assert sum(weights) == pytest.approx(1.2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=5))
def test_it_converges_to_the_optimum_of_a_linear_model(parts):
    """The weights that leave no deficit at the level of the start are found."""
    optimum = 0.4 * len(parts) * np.array(parts) / sum(parts)
    model = Linear(optimum, slope=0.5)
    state = guided(model, [0.4] * len(parts), 60, level=False)
    missing = np.maximum(0, optimum - np.array(state.best.weights)) * 0.5
    assert missing.mean() < 0.012
    assert model.calls == len(state.tried) <= 60


@pytest.mark.parametrize("level", [0.2, 0.8])
def test_the_level_is_found_too(level):
    """A level that is too low leaves deficits, one that is too high costs every domain."""
    model = Linear([0.4, 0.4, 0.4], slope=1.0, cost=0.5)
    start = model(named([level] * 3))
    state = guided(model, [level] * 3, 20)
    assert np.mean(list(start.values())) < 0.75
    assert state.best.merit.value > 0.87
    assert np.array(state.best.weights) == pytest.approx([0.4] * 3, rel=0.12)


def test_a_failure_turns_the_stretch_then_shortens_the_step():
    state = observe(begin(named([0.4, 0.4]), named([0.9, 0.9]), 20), named([0.5, 0.7]))
    step, stretch = state.step, state.stretch
    first = propose(state)
    state = observe(state, named([0.4, 0.4]))
    assert (state.step, state.stretch) == (step, pytest.approx(1 / stretch))
    second = propose(state)
    assert sum(second.values()) == pytest.approx(sum(first.values()) / stretch**2)
    state = observe(state, named([0.4, 0.4]))
    assert (state.step, state.stretch) == (step / 2, pytest.approx(stretch**-0.5))
    assert state.leader == 0
    assert not state.turned
    state = observe(state, named([0.8, 0.8]))
    assert state.leader == 3
    assert (state.step, state.turned) == (step / 2, False)


def test_it_goes_on_from_the_best_not_from_the_last():
    state = observe(begin(named([0.4, 0.4]), named([0.9, 0.9]), 20, level=False), named([0.5, 0.7]))
    state = observe(state, named([0.3, 0.3]))
    gap = np.array([0.4, 0.2])
    wanted = 0.4 + guidance.FIRST_STEP / 2 * 0.4 * (gap - gap.mean())
    assert list(propose(state).values()) == pytest.approx(wanted)


def test_weights_stay_between_zero_and_the_ceiling():
    state = begin(named([0.4] * 3), named([1.0] * 3), 40)
    for _ in range(12):
        weights = np.array(list(propose(state).values()))
        assert (weights >= 0).all()
        assert (weights <= guidance.CEILING * 0.4 + 1e-12).all()
        state = observe(state, {"a": 0.0, "b": 1.0, "c": 0.01 * len(state.tried)})
        if state.stopped:
            break
    assert max(max(each.weights) for each in state.tried) == pytest.approx(guidance.CEILING * 0.4)
    assert min(min(each.weights) for each in state.tried) == 0


# Stop rules


def test_no_deficit_stops_at_once():
    state = observe(begin(named([0.4, 0.4]), named([0.5, 0.6]), 9), named([0.5 - 1e-12, 0.9]))
    assert propose(state) is None
    assert state.stopped == "no deficit is left"
    with pytest.raises(ValueError, match="nothing was proposed: no deficit is left"):
        observe(state, named([0.5, 0.6]))


@pytest.mark.parametrize("calls", [1, 2, 7])
def test_the_budget_is_kept(calls):
    model = Linear([2.0, 0.1, 3.0], slope=0.1)
    state = guided(model, [0.4] * 3, calls)
    assert model.calls == len(state.tried) == calls
    assert state.stopped == f"the {calls} calls are spent"


@pytest.mark.parametrize("calls", [0, -3])
def test_too_few_calls(calls):
    with pytest.raises(RecipeError, match="at least 1 evaluation calls"):
        begin(named([0.4, 0.4]), named([1, 1]), calls)


def test_scores_that_do_not_change_end_it_and_keep_the_recipes_weights():
    state = begin(named([0.4, 0.4]), named([0.9, 0.9]), 50)
    while propose(state) is not None:
        state = observe(state, named([0.5, 0.6]))
    assert "noise" in state.stopped
    assert len(state.tried) == guidance.GUIDANCE_PATIENCE + 1
    assert state.best.weights == (0.4, 0.4)


@pytest.mark.parametrize(
    ("items", "objective", "stops"),
    [
        (None, Objective(), False),
        (17, Objective(), False),
        (14, Objective(), True),
        (17, Objective("weighted", {"a": 1.0, "b": 2.0}), True),
        (18, Objective("weighted", {"a": 1.0, "b": 2.0}), False),
        (20, Objective("worst"), True),
        (25, Objective("worst"), False),
    ],
)
def test_it_stops_when_gains_are_within_the_noise(items, objective, stops):
    """Every call gains 0.012, and GUIDANCE_PATIENCE of them 0.06.

    Two of n items in each of two domains make a standard error of 1/n: 0.059, and 0.071. With
    twice the weight on one it is √10/3n: 0.062, and 0.059; of one domain alone √2/n: 0.071, and
    0.057.
    """
    state = begin(named([0.4, 0.4]), named([0.9, 0.9]), 50, objective)
    for call in range(guidance.GUIDANCE_PATIENCE + 1):
        assert not state.stopped
        state = observe(state, named([0.1 + 0.012 * call, 0.3 + 0.012 * call]), items)
    assert bool(state.stopped or state.closing) == stops


def test_a_kept_floor_counts_as_a_gain():
    """Values fall while a floor is approached: that is no standstill."""
    objective = Objective(floors={"a": 1.0})
    state = begin(named([0.4, 0.4]), named([0.9, 0.9]), 50, objective)
    for call in range(guidance.GUIDANCE_PATIENCE + 3):
        assert not state.stopped
        state = observe(state, named([0.88 + 0.001 * call, 0.88 - 0.002 * call]), 9)
    assert state.leader == len(state.tried) - 1


def test_a_step_too_small_ends_it():
    state = begin(named([0.4, 0.4]), named([0.9, 0.9]), 50, level=False)
    for call in range(30):
        if state.stopped:
            break
        # Gains beyond noise alternate with failures, so patience never runs out.
        gain = 0.001 * call if call % 2 == 0 else -0.2
        state = observe(state, named([0.5 + gain, 0.6]))
    assert state.stopped == "the step is too small to matter"
    assert state.step < guidance.SMALLEST_STEP
    assert len(state.tried) < 30


def test_what_counts_is_the_best_before_the_last_calls():
    """0.7 was reached in the second call; five candidates of 0.6 are no progress."""
    state = begin(named([0.4, 0.4]), named([0.9, 0.9]), 50)
    for value in (0.5, 0.7, *[0.6] * guidance.GUIDANCE_PATIENCE):
        assert not state.stopped
        state = observe(state, named([value, value - 0.1]))
    assert "noise" in state.stopped


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 10)] * 2), min_size=40, max_size=40), st.booleans())
def test_no_weights_are_evaluated_twice(scores, level):
    state, values = begin(named([0.4, 0.0]), named([1.0, 1.0]), 40, level=level), iter(scores)
    while propose(state) is not None:
        state = observe(state, named([q / 10 for q in next(values)]))
    tried = np.array([each.weights for each in state.tried])
    for i, weights in enumerate(tried):
        assert all(np.abs(other - weights).max() >= guidance.SAME_WEIGHTS for other in tried[:i])


# The centre


def level_calls(values, calls, items=20):
    """A guidance whose candidates got these values; one standard error is 1/items."""
    state = begin(named([0.4, 0.4]), named([0.9, 0.9]), calls)
    for value in values:
        state = observe(state, named([value, value - 0.1]), items)
    return state


def test_the_last_call_goes_to_the_mean_of_those_that_noise_cannot_tell_apart():
    state = level_calls((0.5, 0.6, 0.7, 0.68), 5)
    assert state.at_centre
    _, out, best, near = (np.array(each.weights) for each in state.tried)
    assert list(propose(state).values()) == pytest.approx((best + near) / 2)
    assert np.abs(out - best).max() > 0.01  # 0.6 lies more than 0.05 below the best
    ended = observe(state, named([0.66, 0.56]), 20)
    assert ended.stopped == "the 5 calls are spent"
    assert (ended.leader, ended.chosen) == (2, 4)


@pytest.mark.parametrize(("value", "taken"), [(0.70, True), (0.66, True), (0.64, False)])
def test_the_centre_is_taken_unless_the_best_is_better_by_more_than_noise(value, taken):
    ended = observe(level_calls((0.5, 0.6, 0.7, 0.68), 5), named([value, value - 0.1]), 20)
    assert (ended.chosen == 4) == taken


def test_the_centre_is_not_taken_below_the_recipes_own_weights():
    state = level_calls((0.68, 0.70, 0.69), 4)
    assert state.at_centre
    assert observe(state, named([0.675, 0.575]), 20).chosen == 1
    assert observe(state, named([0.685, 0.585]), 20).chosen == 3


def test_without_anything_better_than_the_recipes_own_there_is_no_centre():
    state = level_calls((0.7, 0.68, 0.69), 4)
    assert not state.at_centre
    assert guidance.to_centre(state) is None


def test_no_centre_is_asked_for_again_before_another_step():
    state = level_calls((0.5, 0.6, 0.7, 0.68), 9)
    centre = guidance.to_centre(state)
    assert not state.at_centre and centre.at_centre
    after = observe(centre, named([0.69, 0.59]), 20)
    assert (after.step, after.stretch, after.turned) == (state.step, state.stretch, state.turned)
    assert guidance.to_centre(after) is None
    assert guidance.to_centre(observe(after, named([0.68, 0.58]), 20)) is not None


def test_a_stop_by_noise_goes_to_the_centre_first():
    values = [0.5, 0.7, *[0.69] * guidance.GUIDANCE_PATIENCE]
    state = level_calls(values, 50)
    assert state.at_centre and not state.stopped
    wanted = np.mean([each.weights for each in state.tried[1:]], axis=0)
    assert list(propose(state).values()) == pytest.approx(wanted)
    assert "noise" in observe(state, named([0.7, 0.6]), 20).stopped


# Special pools


def test_one_domain_has_a_level_only():
    model = Linear([0.7], slope=0.5, cost=0.4)
    state = guided(model, [0.4], 12)
    assert state.best.weights[0] == pytest.approx(0.7, rel=0.1)


def test_one_domain_without_a_level_has_nothing_to_guide():
    state = guided(Linear([1.7]), [1.0], 12, level=False)
    assert len(state.tried) == 1
    assert state.stopped == "the step is too small to matter"


def test_the_objective_steers():
    model = Linear([0.8, 0.8], slope=0.5, cost=0.0)
    heavy = guided(model, [0.4, 0.4], 2, Objective("weighted", {"a": 3.0, "b": 1.0}))
    a, b = heavy.tried[1].weights
    assert a > b
    floors = guided(model, [0.4, 0.4], 2, Objective(floors={"b": 0.95}))
    a, b = floors.tried[1].weights
    assert b > a


@pytest.mark.parametrize(
    ("weights", "target", "objective", "problem"),
    [
        ([0.4, -0.1], [1, 1], None, "b: the weight -0.1 is not 0 or more"),
        ([0.4, np.nan], [1, 1], None, "b: the weight nan is not 0 or more"),
        ([0.0, 0.0], [1, 1], None, "all weights are 0"),
        ([0.4, 0.4], [1], None, "b: no score of an expert"),
        ([0.4, 0.4], [1, 1], Objective(floors={"z": 0.5}), "unknown domain z"),
    ],
)
def test_wrong_input_is_named(weights, target, objective, problem):
    with pytest.raises(RecipeError, match="cannot be guided") as error:
        begin(named(weights), named(target), 5, objective)
    assert problem in error.value.problems[0]


def test_a_state_replayed_from_its_scores_is_the_same():
    """A journal of scores is enough to resume."""
    model = Linear([0.7, 0.1, 0.5], slope=0.6, cost=0.3)
    whole = guided(model, [0.4] * 3, 9)
    again = begin(named([0.4] * 3), model.target, 9)
    for each in whole.tried:
        again = guidance.observe(again, each.answer)
    assert again == whole
