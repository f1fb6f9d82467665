"""The schedule of a tuning on score models in closed form: budgets, dropping, stops, the guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from sigmerge.errors import RecipeError
from sigmerge.method import tuning
from sigmerge.method.objective import Answer, Objective, paired_bootstrap
from sigmerge.method.tuning import AnchorWeights, Proposal, Tuning

DOMAINS = ("a", "b", "c")
PROFILE = np.array([0.1, 0.3])
TARGET = dict.fromkeys(DOMAINS, 1.0)
Model = Callable[[Proposal], Mapping[str, float]]


def anchors(*names: str, weight: float = 0.4) -> dict[str, AnchorWeights]:
    return {name: AnchorWeights(dict.fromkeys(DOMAINS, weight)) for name in names}


def towards(best: Mapping[str, tuple[float, ...]], repaired: float = 0.0) -> Model:
    """Scores fall with the distance of a weight to the anchor's best; a repair adds to them."""

    def scores(proposal: Proposal) -> dict[str, float]:
        gain = repaired if proposal.repair else 0.0
        wanted = best[proposal.anchor]
        return {
            d: max(0.0, min(1.0, 0.9 - abs(w - b) + gain))
            for d, w, b in zip(DOMAINS, proposal.weights, wanted, strict=True)
        }

    return scores


def run(state: Tuning, model: Model) -> Tuning:
    while batch := tuning.propose(state):
        state = tuning.observe(state, [Answer(model(proposal)) for proposal in batch])
    return state


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("calls", [8, 13, 24, 64])
def test_the_budget_is_never_exceeded(count: int, calls: int) -> None:
    names = [f"o{i}" for i in range(count)]
    best = {name: (0.7, 0.1 * i, 0.5) for i, name in enumerate(names)}
    ended = run(tuning.begin(anchors(*names), TARGET, PROFILE, calls), towards(best))
    assert len(ended.made) <= calls and ended.stopped
    if calls <= 13:
        assert len(ended.made) == calls


def test_every_anchor_is_evaluated_as_it_is_first() -> None:
    state = tuning.begin(anchors("x", "y", "z"), TARGET, PROFILE, 24)
    first = tuning.propose(state)
    assert [proposal.anchor for proposal in first] == ["x", "y", "z"]
    assert {proposal.weights for proposal in first} == {(0.4, 0.4, 0.4)}
    assert all(proposal.repair is None for proposal in first)


def test_calls_go_to_the_leaders() -> None:
    best = {"x": (0.7, 0.1, 0.5), "far": (3, 3, 3), "farther": (4, 4, 4), "y": (0.9, 0.4, 0.9)}
    ended = run(tuning.begin(anchors(*best), TARGET, PROFILE, 24), towards(best))
    spent = {name: sum(call.proposal.anchor == name for call in ended.made) for name in best}
    assert spent["far"] == 4 and spent["farther"] == 1
    [leader] = ended.alive
    other = "y" if leader == "x" else "x"
    assert {leader, other} == {"x", "y"} and spent[leader] > spent[other] > 1
    plain = max(call.merit.value for call in ended.made[:4])
    assert ended.made[ended.best].merit.value > plain + 0.05


def test_an_anchor_that_starts_second_can_lead() -> None:
    """One call does not decide: the two best are guided before one of them is dropped."""

    def model(proposal: Proposal) -> dict[str, float]:
        if proposal.anchor == "stuck":
            return dict.fromkeys(DOMAINS, 0.7)
        return towards({"x": (1.0, 0.2, 0.4)})(proposal)

    ended = run(tuning.begin(anchors("stuck", "x"), TARGET, PROFILE, 16), model)
    assert ended.made[0].merit.value > ended.made[1].merit.value
    assert ended.made[ended.best].proposal.anchor == "x"


def test_an_anchor_whose_level_is_too_low_is_not_dropped_for_its_plain_score() -> None:
    """Mild experts: task arithmetic starts third, and leads once its weights have grown."""
    stuck = {"x": 0.7, "y": 0.69, "z": 0.6}

    def model(proposal: Proposal) -> dict[str, float]:
        if proposal.anchor in stuck:
            return dict.fromkeys(DOMAINS, stuck[proposal.anchor])
        return towards({"low": (0.7, 0.6, 0.65)})(proposal)

    begun = tuning.begin(anchors("low", *stuck), TARGET, PROFILE, 24)
    ended = run(begun, model)
    assert sorted(call.merit.value for call in ended.made[:4]).index(ended.made[0].merit.value) == 1
    assert ended.made[ended.best].proposal.anchor == "low"


def test_a_repair_that_helps_is_taken_and_one_that_does_not_is_not() -> None:
    best = {"x": (0.6, 0.4, 0.5)}
    begun = tuning.begin(anchors("x"), TARGET, PROFILE, 24)
    helped, hurt = run(begun, towards(best, 0.05)), run(begun, towards(best, -0.05))
    assert helped.made[helped.best].proposal.repair is not None
    assert hurt.made[hurt.best].proposal.repair is None
    assert any(call.proposal.repair for call in hurt.made)


def test_the_anchor_factor_multiplies_the_guided_weights() -> None:
    ended = run(tuning.begin(anchors("x"), TARGET, PROFILE, 16), towards({"x": (0.6, 0.4, 0.5)}))
    base = ended.made[ended.base].proposal.weights
    lowered = [c.proposal for c in ended.made if c.proposal.repair and c.proposal.repair.anchor < 1]
    assert lowered
    for proposal in lowered:
        assert proposal.repair is not None
        assert proposal.weights == tuple(proposal.repair.anchor * w for w in base)


def answered(scores: Mapping[str, float], number: int, items: int) -> Answer:
    """Each answer is right on an item of its own: any two differ on two of them."""
    return Answer(scores, {d: [1.0 * (np.arange(items) == number)] for d in scores})


@pytest.mark.parametrize(
    ("items", "objective", "made"),
    [
        (200, Objective(), True),
        (20, Objective(), True),
        (10, Objective(), False),
        (20, Objective("weighted", {"a": 1.0}), False),
    ],
)
def test_a_repair_must_beat_its_anchor_by_more_than_noise(
    items: int, objective: Objective, made: bool
) -> None:
    """It gains 0.05; two of n items in each of three domains make an error of √⅔/n.

    That of one domain alone is √2/n.
    """
    model, state = towards({"x": (0.6, 0.4, 0.5)}, 0.05), tuning.begin(
        anchors("x"), TARGET, PROFILE, 24, objective
    )  # fmt: skip
    while batch := tuning.propose(state):
        first = len(state.made)
        answers = [answered(model(p), first + i, items) for i, p in enumerate(batch)]
        state = tuning.observe(state, answers)
    assert any(call.proposal.repair for call in state.made)
    assert (state.made[state.best].proposal.repair is not None) == made


def test_the_leader_goes_to_its_centre_before_it_is_repaired_and_with_the_last_call() -> None:
    model, state = towards({"x": (0.9, 0.1, 0.5)}, -0.2), tuning.begin(
        anchors("x"), TARGET, PROFILE, 24
    )  # fmt: skip
    while batch := tuning.propose(state):
        before = state
        answers = [answered(model(p), len(state.made) + i, 12) for i, p in enumerate(batch)]
        state = tuning.observe(state, answers)
        if batch[0].repair is not None and before.made[-1].proposal.repair is None:
            guide = before.guides["x"]
            assert guide.centre == len(guide.tried) - 1
            assert batch[0].weights == guide.tried[guide.chosen].weights
    model, short = towards({"x": (0.3, 0.3, 0.6)}), tuning.begin(anchors("x"), TARGET, PROFILE, 6)
    while batch := tuning.propose(short):
        answers = [answered(model(p), len(short.made) + i, 12) for i, p in enumerate(batch)]
        short = tuning.observe(short, answers)
    leader = max(short.made[:5], key=lambda call: call.merit.value)
    level = [
        call.proposal.weights for call in short.made[:5] if not state.objective.beats(leader, call)
    ]
    assert len(level) == 4
    assert short.made[5].proposal.weights == pytest.approx(np.mean(level, axis=0))


def staged(state: Tuning, repaired: Callable[[Tuning], float]) -> tuple[list[str], Tuning]:
    """The batches of a tuning: a candidate is an anchor, `*` its centre, `+` with a repair.

    Guided calls of an anchor gain 0.02 each, up to twelve; `repaired` is what a repair scores more
    than the plain anchor. The error of a difference is √⅔/30, 0.027: a call is level with the next,
    and five calls gain more than noise.
    """
    plain, batches = {"w": 0.1, "x": 0.4, "y": 0.3, "z": 0.2}, []
    while batch := tuning.propose(state):
        names, answers = [], []
        for i, proposal in enumerate(batch):
            guide = state.guides[proposal.anchor]
            gain = repaired(state) if proposal.repair else 0.02 * min(12, len(guide.tried))
            scores = dict.fromkeys(DOMAINS, plain[proposal.anchor] + gain)
            answers.append(answered(scores, len(state.made) + i, 30))
            mark = "+" if proposal.repair else "*" if guide.at_centre else ""
            names.append(proposal.anchor + mark)
        batches.append(" ".join(names))
        state = tuning.observe(state, answers)
    return batches, state


@pytest.mark.parametrize(
    ("calls", "batches"),
    [
        (8, ["w x y z", "x y", "x", "x*"]),
        (12, ["w x y z", *["x y"] * 2, *["x"] * 3, "x*"]),
        (16, ["w x y z", *["x y"] * 3, *["x"] * 4, "x*", "x+"]),
        (24, ["w x y z", *["x y z"] * 3, *["x y"] * 2, *["x"] * 2, "x*", *["x+"] * 4]),
    ],
)
def test_the_budget_is_spent_in_stages(calls: int, batches: list[str]) -> None:
    """Two or three anchors are guided, then two, the leader up to its eighth call."""
    begun = tuning.begin(anchors("w", "x", "y", "z"), TARGET, PROFILE, calls)
    assert staged(begun, lambda state: -0.2)[0] == batches


@pytest.mark.parametrize("later", [-0.2, 0.3])
def test_a_second_calibration_does_not_forget_the_first(later: float) -> None:
    """The first repairs are the best of all; those of a better anchor are worse."""
    begun = tuning.begin(anchors("x"), TARGET, PROFILE, 64)
    batches, ended = staged(begun, lambda state: 0.4 if state.earlier is None else later)
    first = batches.index("x+")
    assert "x" in batches[first:] and batches[-1] == "x+"
    assert ended.best == first


def test_weights_that_are_not_free_are_evaluated_once() -> None:
    fixed = {"x": AnchorWeights(dict.fromkeys(DOMAINS, 1.0), level=False, free=False)}
    ended = run(
        tuning.begin(fixed, TARGET, PROFILE, 12),
        lambda proposal: dict.fromkeys(DOMAINS, 0.6 if proposal.repair else 0.5),
    )
    dense = [call for call in ended.made if call.proposal.repair is None]
    assert len(dense) == 1 < len(ended.made)
    assert {call.proposal.weights for call in ended.made} == {(1.0, 1.0, 1.0)}
    assert ended.made[ended.best].proposal.repair is not None


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed < 6 else pytest.mark.campaign) for seed in range(20)],
)
def test_the_result_is_never_below_the_best_plain_anchor(seed: int) -> None:
    generator = np.random.default_rng(seed)
    objective = Objective("worst" if seed % 2 else "mean", floors={"a": 0.5})

    def model(proposal: Proposal) -> dict[str, float]:
        return dict(zip(DOMAINS, generator.uniform(0, 1, 3).tolist(), strict=True))

    ended = run(tuning.begin(anchors("x", "y", "z"), TARGET, PROFILE, 20, objective), model)
    best = ended.made[ended.best].merit
    assert not any(call.merit.beats(best) for call in ended.made[:3])


def test_scores_that_do_not_change_end_it_early_with_the_plain_anchor() -> None:
    flat = run(
        tuning.begin(anchors("x", "y"), TARGET, PROFILE, 64),
        lambda proposal: dict.fromkeys(DOMAINS, 0.5),
    )
    assert len(flat.made) < 40 and flat.stopped and flat.best == 0


def test_no_deficit_ends_it() -> None:
    full = run(
        tuning.begin(anchors("x", "y"), TARGET, PROFILE, 64),
        lambda proposal: dict.fromkeys(DOMAINS, 1.0),
    )
    assert full.stopped == "no deficit is left to repair" and full.best == 0
    assert len(full.made) == 2


def test_too_few_calls_are_refused() -> None:
    with pytest.raises(RecipeError, match="at least 4 evaluation calls, not 3"):
        tuning.begin(anchors("x", "y", "z"), TARGET, PROFILE, 3)


def test_the_error_of_a_difference_is_that_of_its_benchmarks() -> None:
    def answer(*rows: list[int]) -> Answer:
        return Answer({"a": 0.0}, {"a": [np.array(row, float) for row in rows]})

    one, other = answer([1, 1, 0, 0], [1, 0]), answer([1, 0, 0, 1], [1, 0])
    # differences 0, 1, 0, -1: variance 1/2 over 4 items; the other benchmark has none
    assert Objective().error(one, other) == pytest.approx(np.sqrt(0.5 / 4) / 2)


def test_the_bootstrap_agrees_with_resampling_items() -> None:
    generator = np.random.default_rng(3)

    def marks(chance: float) -> dict[str, list[np.ndarray[Any, Any]]]:
        """Right or wrong in one benchmark, parts of an item in the other."""
        return {d: [(generator.random(80) < chance) * 1.0, generator.random(30)] for d in "ab"}

    after, before = marks(0.8), marks(0.6)
    found, low, high = paired_bootstrap(after, before)
    means = []
    for _ in range(4000):
        total = 0.0
        for d in "ab":
            for a, b in zip(after[d], before[d], strict=True):
                rows = generator.integers(a.size, size=a.size)
                total += (a[rows].mean() - b[rows].mean()) / 4
        means.append(total)
    mean = np.mean(
        [a.mean() - b.mean() for d in "ab" for a, b in zip(after[d], before[d], strict=True)]
    )
    assert found == pytest.approx(mean)
    assert (low, high) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.01)
    assert paired_bootstrap(after, before) == (found, low, high)
    assert paired_bootstrap(before, before) == (0.0, 0.0, 0.0)
