"""Calibrated occupancy on score models whose best setting is known."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.errors import RecipeError
from sigmerge.method import budget, calibration
from sigmerge.method.calibration import (
    ANCHOR_FACTORS,
    CALIBRATION_PATIENCE,
    SCALES,
    Calibration,
    LatticePoint,
    begin,
    propose,
)
from sigmerge.method.objective import Answer, Objective

PROFILE = np.array([0.22, 0.28, 0.3, 0.2])
ANCHOR = {"math": 0.6, "coding": 0.7, "safety": 0.9}
TARGET = dict.fromkeys(ANCHOR, 0.9)


def started(calls=30, **options) -> Calibration:
    anchor = Answer(ANCHOR, marks(0, options.pop("items", None)))
    return begin(PROFILE, anchor, TARGET, calls, **options)


def marks(place, items):
    """Each answer is right on an item of its own: any two differ on two of them."""
    return {d: [1.0 * (np.arange(items) == place)] for d in ANCHOR} if items else None


def observe(state, scores, items=None):
    return calibration.observe(state, Answer(scores, marks(len(state.tried), items)))


def calibrated(score, calls=30, **options):
    """Run to the end with a score of candidates; the state and the candidates."""
    state, seen, items = started(calls, **options), [], options.get("items")
    while (candidate := propose(state)) is not None:
        seen.append(candidate)
        state = observe(state, score(candidate), items)
    return state, seen


def flat(value):
    return {d: float(q + value) for d, q in ANCHOR.items()}


def peak(form, scale, level, anchor=1.0, shape="profile"):
    """A score that falls with the distance from one setting."""

    def score(candidate):
        mean = float(np.mean(candidate.capacity))
        uniform = np.ptp(candidate.capacity) < 1e-12
        lost = 0.02 * (candidate.form != form) + 0.04 * abs(candidate.scale - scale)
        lost += 0.05 * abs(mean - level) + 0.05 * abs(candidate.anchor - anchor)
        return flat(0.08 - lost - 0.001 * (uniform != (shape == "uniform")))

    return score


def test_the_first_candidate_is_the_papers():
    first = propose(started())
    assert (first.form, first.scale, first.anchor) == ("add", 0.6, 1.0)
    assert first.capacity == pytest.approx(PROFILE)
    assert first.share == pytest.approx([0.6, 0.4, 0.0])


@pytest.mark.parametrize(
    "wanted",
    [
        ("add", 0.6, 0.25, 1.0, "profile"),
        ("add", 1.5, 0.65, 1.0, "profile"),
        ("add", 0.3, 0.125, 1.0, "profile"),
        ("replace", 1.0, 0.45, 1.0, "profile"),
        ("add", 1.0, 0.45, 0.5, "profile"),
        ("replace", 1.0, 0.65, 0.75, "uniform"),
    ],
)
def test_a_single_peak_is_found(wanted):
    state, seen = calibrated(peak(*wanted), calls=40)
    best = calibration.candidate(state, state.best.setting, state.best.share)
    form, scale, level, anchor, shape = wanted
    assert (best.form, best.scale, best.anchor) == (form, scale, anchor)
    assert np.mean(best.capacity) == pytest.approx(level)
    assert state.best.setting.shape == shape
    assert len(seen) == len(state.tried) - 1 <= 40


def test_few_calls_find_what_a_grid_would():
    """Twelve calls for the best of 4 × 5 × 2 scales, levels and shapes, and more axes beside."""
    state, _seen = calibrated(peak("add", 1.5, 0.45), calls=12)
    best = calibration.candidate(state, state.best.setting, state.best.share)
    assert (best.form, best.scale) == ("add", 1.5)
    assert np.mean(best.capacity) == pytest.approx(0.45)


def test_no_repair_is_a_candidate_without_a_call():
    state, _ = calibrated(lambda candidate: flat(-0.01 * candidate.scale))
    assert state.best.setting is None
    assert state.best.scores == tuple(ANCHOR.values())


def test_a_repair_must_be_better_than_none():
    state, _ = calibrated(lambda c: flat(0.0 if c.scale == 1.0 else -0.01), calls=3)
    assert 2 in [each.setting.scale for each in state.tried[1:]]
    assert state.best.setting is None
    level, _ = calibrated(lambda candidate: flat(0.0))
    assert level.best.setting is None


@pytest.mark.parametrize(
    ("items", "weights", "made"),
    [(None, {}, True), (28, {}, True), (25, {}, False), (28, {"math": 1.0}, False),
     (50, {"math": 1.0}, True)],
)  # fmt: skip
def test_a_repair_must_be_better_than_none_by_more_than_noise(items, weights, made):
    """Two of n items in each of three domains make a standard error of √⅔/n: 0.029, and 0.033.

    That of one domain alone is √2/n: 0.051, and 0.028.
    """
    objective = Objective("weighted", weights) if weights else None
    state, _ = calibrated(lambda candidate: flat(0.03), calls=5, items=items, objective=objective)
    assert (state.best.setting == state.paper) == made
    assert (state.best.setting is None) != made


def test_equal_scores_choose_the_nearest_to_the_papers():
    state, _seen = calibrated(lambda candidate: flat(0.05))
    assert state.best.setting == state.paper
    # Rounding makes no difference (ruling 21).
    noisy, _ = calibrated(lambda candidate: flat(0.05 + 1e-13 * candidate.scale))
    assert noisy.best.setting == noisy.paper


def test_a_success_is_repeated_first():
    """A move that helped is made again before any other is tried."""
    state = started()
    for value in (0.01, 0.02, 0.03):
        state = observe(state, flat(value))
    scales = [each.setting.scale for each in state.tried[1:]]
    assert scales == [1, 2, 3]
    other = observe(observe(started(), flat(0.02)), flat(0.01))
    assert (other.upcoming.scale, other.upcoming.level) == (1, 2)
    other = observe(other, flat(0.03))
    # The level helped: it rises once more before the scale is tried again.
    assert (other.upcoming.scale, other.upcoming.level) == (1, 3)


def test_scales_rise_by_steps_and_replace_ends_at_the_expert():
    for scales in SCALES.values():
        assert list(scales) == sorted(set(scales))
        assert max(b / a for a, b in itertools.pairwise(scales)) <= 2
        assert 0.6 in scales
    assert SCALES["replace"][-1] == 1.0


def test_shares_move_to_the_deficits_that_the_repair_leaves():
    state = observe(started(), flat(0.02))
    while state.upcoming.shares == 0:
        state = observe(state, flat(0.0))
    left = np.array([0.28, 0.18, 0.0])
    wanted = np.clip(np.array([0.6, 0.4, 0.0]) + left - left.mean(), 0, None)
    assert propose(state).share == pytest.approx(wanted / wanted.sum())
    assert sum(propose(state).share) == pytest.approx(1)


def test_shares_that_vanish_stay():
    assert calibration._moved((0.0, 0.0), np.zeros(2)) == (0.0, 0.0)


def test_an_anchor_that_is_only_a_folder_keeps_its_level():
    _, seen = calibrated(peak("add", 1.0, 0.45, anchor=0.5), anchors=False)
    assert {candidate.anchor for candidate in seen} == {1.0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 0.09), min_size=60, max_size=60))
def test_whatever_the_scores_no_candidate_comes_twice_and_every_one_can_be_claimed(values):
    rise = iter(values)
    state, seen = calibrated(lambda candidate: flat(next(rise)), calls=40)
    assert len({each.setting for each in state.tried}) == len(state.tried)
    for candidate in seen:
        assert sum(candidate.share) == pytest.approx(1)
        capacity, sizes = np.array(candidate.capacity), np.full(4, 100)
        quota = budget.quotas(capacity, np.array(candidate.share), sizes)
        assert budget.infeasible(quota, sizes) == []


def test_levels_follow_the_profile():
    assert started().levels == pytest.approx((0.125, 0.25, 0.45, 0.65, 0.85))
    full = begin(np.full(4, 0.6), Answer(ANCHOR), TARGET, 5)
    assert full.levels == pytest.approx((0.3, 0.6, 0.85))
    steep = begin(np.array([0.05, 0.05, 0.8]), Answer(ANCHOR), TARGET, 5)
    most = calibration.candidate(steep, steep.paper._replace(level=4), (1.0, 0.0, 0.0))
    assert max(most.capacity) == calibration.MOST
    uniform = calibration.candidate(
        steep, steep.paper._replace(level=2, shape="uniform"), (1.0, 0.0, 0.0)
    )
    assert uniform.capacity == pytest.approx([0.45] * 3)


def test_distance_counts_moves():
    paper = started().paper
    assert paper == LatticePoint(
        "add", SCALES["add"].index(0.6), 1, "profile", len(ANCHOR_FACTORS) - 1, 0
    )
    assert paper.distance(paper) == 0
    assert paper.distance(LatticePoint("replace", 3, 0, "uniform", 0, 2)) == 1 + 2 + 1 + 1 + 2 + 2


# Stop rules


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_the_budget_is_kept(calls):
    state, seen = calibrated(peak("add", 1.5, 0.65), calls=calls)
    assert len(seen) == calls
    assert state.stopped == f"the {calls} calls are spent"


@pytest.mark.parametrize("calls", [0, -1])
def test_too_few_calls(calls):
    with pytest.raises(RecipeError, match="at least 1 evaluation calls"):
        started(calls)


def test_without_a_deficit_there_is_nothing_to_repair():
    state = begin(PROFILE, Answer(TARGET), TARGET, 5)
    assert propose(state) is None
    assert state.stopped == "no deficit is left to repair"
    assert state.best.setting is None
    with pytest.raises(ValueError, match="nothing was proposed"):
        observe(state, ANCHOR)


def test_scores_that_do_not_change_end_it():
    state, seen = calibrated(lambda candidate: flat(0.0), calls=60)
    assert "noise" in state.stopped
    assert len(seen) == CALIBRATION_PATIENCE


@pytest.mark.parametrize(
    ("items", "objective", "stops"),
    [
        (None, Objective(), False),
        (28, Objective(), False),
        (16, Objective(), True),
        (28, Objective("weighted", {"math": 1.0}), True),
        (40, Objective("weighted", {"math": 1.0}), False),
    ],
)
def test_it_stops_when_gains_are_within_the_noise(items, objective, stops):
    """Every call gains 0.005, and CALIBRATION_PATIENCE of them 0.04.

    Two of n items in each of three domains make a standard error of √⅔/n: 0.029, and 0.051; that
    of one domain alone is √2/n: 0.051, and 0.035.
    """
    state = started(items=items, objective=objective)
    for call in range(CALIBRATION_PATIENCE):
        assert not state.stopped
        state = observe(state, flat(0.005 * (call + 1)), items)
    assert bool(state.stopped) == stops


def test_it_ends_when_every_neighbour_was_tried(monkeypatch):
    """With patience out of the way a lonely peak is left only when all its sides are known."""
    monkeypatch.setattr(calibration, "CALIBRATION_PATIENCE", 60)
    state = observe(started(60), flat(0.05))
    while propose(state) is not None:
        state = observe(state, flat(-0.05))
    assert state.stopped == "every setting next to the best was tried"
    assert state.best.setting == state.paper
    around = [each.setting.distance(state.paper) for each in state.tried[2:]]
    assert around == [1] * 8  # two scales, two levels, shares, form, anchor and shape


# Special pools


def test_one_domain():
    state = begin(PROFILE, Answer({"math": 0.5}), {"math": 0.9}, 12)
    while (candidate := propose(state)) is not None:
        assert candidate.share == (1.0,)
        state = observe(state, {"math": 0.5 + 0.1 * candidate.scale})
    assert SCALES["add"][state.best.setting.scale] == 1.5


def test_floors_decide_before_the_mean():
    """The larger scale has the better mean, but safety falls below its floor."""

    def score(candidate):
        lost = 0.05 if candidate.scale > 0.6 else 0.0
        return {"math": 0.6 + 0.3 * candidate.scale / 1.5, "coding": 0.7, "safety": 0.9 - lost}

    free, _ = calibrated(score)
    kept, _ = calibrated(score, objective=Objective(floors={"safety": 0.95}))
    assert SCALES[free.best.setting.form][free.best.setting.scale] > 0.6
    assert SCALES[kept.best.setting.form][kept.best.setting.scale] == 0.6


def test_wrong_input_is_named():
    with pytest.raises(RecipeError, match="cannot be calibrated") as error:
        begin(PROFILE, Answer(ANCHOR), {"math": 0.9}, 5, Objective(floors={"z": 0.5}))
    assert [p.split(":")[0] for p in error.value.problems] == ["objective", "coding", "safety"]


def test_a_state_replayed_from_its_scores_is_the_same():
    state, _ = calibrated(peak("replace", 1.0, 0.45), calls=9)
    again = started(9)
    for each in state.tried[1:]:
        again = calibration.observe(again, each.answer)
    assert again == state
