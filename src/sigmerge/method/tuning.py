"""Tuning: several anchors, guided, then repaired, in one budget of evaluation calls (ours).

Every anchor is evaluated as it is. Those that lead are guided (`guidance`), the others are dropped:
half of them after each stage, down to the leader. The leader is guided further, then its repair is
calibrated (`calibration`); calls that the calibration leaves go to guidance again, and a better
anchor found there is calibrated once more.

The plain anchors are candidates, and a candidate replaces the best so far only if it beats it: the
result is never below the best plain anchor in the objective.

One `Tuning` is one state: `propose` says which candidates to evaluate next, `observe` takes what
they scored. Both are pure, so a journal of the scores is enough to resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float64

from sigmerge.method import calibration, guidance
from sigmerge.method.objective import (
    Marks,
    Merit,
    Objective,
    Vector,
    check_calls,
    paired_error,
)

STAGE: Final = 3
"""Guided calls of an anchor between two stages."""
GUIDED: Final = 8
"""Calls of the leader before its repair is calibrated."""


class AnchorWeights(NamedTuple):
    """An operator with its weights; `level` as in `guidance.begin`."""

    weights: Mapping[str, float]
    level: bool = True


class Proposal(NamedTuple):
    """A candidate: an anchor with these weights, in the order of the domains, and its repair."""

    anchor: str
    weights: Vector
    repair: calibration.RepairProposal | None = None


class Answer(NamedTuple):
    """What a candidate scored; `right` has every domain's benchmarks with their items."""

    scores: Mapping[str, float]
    right: Marks | None = None


class EvaluationCall(NamedTuple):
    """One evaluation call."""

    proposal: Proposal
    answer: Answer
    merit: Merit
    error: float
    """Standard error of the difference to the candidate that it was compared with."""


@dataclass(frozen=True)
class Tuning:
    """The state of a tuning. Made by `begin`, continued by `observe`."""

    domains: tuple[str, ...]
    target: Vector
    profile: Vector
    calls: int
    objective: Objective
    guides: Mapping[str, guidance.Guidance]
    alive: tuple[str, ...]
    """Anchors that were not dropped, the leader first once it is known."""
    rung: int = 1
    """Calls of every living anchor before the next are dropped."""
    repair: calibration.Calibration | None = None
    opened: int = 0
    """The call that the calibration under way began after."""
    base: int = 0
    """The call whose anchor is repaired."""
    made: tuple[EvaluationCall, ...] = ()
    best: int = 0
    """Which call is the best so far; of equals the earliest, of repairs the one nearest the
    paper's."""
    stopped: str = ""

    @property
    def left(self) -> int:
        return self.calls - len(self.made)


def begin(
    anchors: Mapping[str, AnchorWeights],
    target: Mapping[str, float],
    profile: Float64[np.ndarray, layers],
    calls: int,
    objective: Objective | None = None,
) -> Tuning:
    """The state before the first call. `target` and `profile` as in `calibration.begin`."""
    check_calls(calls, len(anchors) + 1, f"tuning {len(anchors)} anchors")
    chosen = objective or Objective()
    guides = {
        name: guidance.begin(anchor.weights, target, calls, chosen, level=anchor.level)
        for name, anchor in anchors.items()
    }
    domains = next(iter(guides.values())).domains
    return Tuning(
        domains=domains,
        target=tuple(target[d] for d in domains),
        profile=tuple(profile.tolist()),
        calls=calls,
        objective=chosen,
        guides=guides,
        alive=tuple(anchors),
        rung=1 if len(anchors) > 1 else GUIDED,
    )


def propose(state: Tuning) -> tuple[Proposal, ...]:
    """The candidates to evaluate next, which do not depend on each other; empty at the end."""
    if state.stopped:
        return ()
    if state.repair is not None:
        found = calibration.propose(state.repair)
        assert found is not None
        anchor, weights, _ = state.made[state.base].proposal
        return (Proposal(anchor, tuple(found.anchor * w for w in weights), found),)
    return tuple(Proposal(name, state.guides[name].upcoming) for name in _turn(state))


def observe(state: Tuning, answers: Sequence[Answer]) -> Tuning:
    """The state after the proposed candidates got these answers, in their order."""
    for proposal, answer in zip(propose(state), answers, strict=True):
        state = _observed(state, proposal, answer)
    return _advance(state)


def _observed(state: Tuning, proposal: Proposal, answer: Answer) -> Tuning:
    scores = tuple(answer.scores[d] for d in state.domains)
    merit = state.objective.merit(state.domains, scores, state.target)
    rival = _rival(state, proposal)
    error = 0.0 if rival is None else difference_error(answer, state.made[rival].answer)
    made = (*state.made, EvaluationCall(proposal, answer, merit, error))
    state = replace(state, made=made)
    if state.repair is not None:
        return _after_repair(replace(state, repair=calibration.observe(
            state.repair, answer.scores, error)))  # fmt: skip
    guides = dict(state.guides)
    guides[proposal.anchor] = guidance.observe(guides[proposal.anchor], answer.scores, error)
    better = merit.beats(made[state.best].merit)
    return replace(state, guides=guides, best=len(made) - 1 if better else state.best)


def _after_repair(state: Tuning) -> Tuning:
    """The calibration's own best, unless what was found before it is better."""
    assert state.repair is not None
    found = state.repair.best
    place = next(i for i, each in enumerate(state.repair.tried) if each is found)
    call = state.base if place == 0 else state.opened + place - 1
    before = state.made[state.best].merit if state.best < state.opened else None
    keep = before is not None and not found.merit.beats(before)
    return replace(state, best=state.best if keep else call)


def _rival(state: Tuning, proposal: Proposal) -> int | None:
    """The call that a candidate is compared with: the best of its own anchor so far."""
    mine = [i for i, call in enumerate(state.made) if call.proposal.anchor == proposal.anchor]
    rival = None
    for i in mine:
        if rival is None or state.made[i].merit.beats(state.made[rival].merit):
            rival = i
    return rival


def difference_error(one: Answer, other: Answer) -> float:
    """Standard error of the difference of two means over domains, each a mean over benchmarks."""
    if one.right is None or other.right is None:
        return 0.0
    each = [paired_error(one.right[d], other.right[d]) for d in one.right]
    return math.sqrt(sum(e * e for e in each)) / len(each)


def _turn(state: Tuning) -> list[str]:
    """Anchors with a call to make now: those behind the rung; as many as calls are left."""
    waiting = [name for name in state.alive if _waits(state, name)]
    return waiting[: state.left]


def _waits(state: Tuning, name: str) -> bool:
    guide = state.guides[name]
    return not guide.stopped and len(guide.tried) < state.rung


def _advance(state: Tuning) -> Tuning:
    """Drop, move on to the repair or back to guidance, or stop."""
    if state.left == 0:
        return replace(state, stopped=f"the {state.calls} calls are spent")
    if state.repair is not None:
        return state if not state.repair.stopped else _guided_again(state)
    if _turn(state):
        return state
    if len(state.alive) > 1:
        return _advance(_dropped(state))
    return _repaired(state)


def _dropped(state: Tuning) -> Tuning:
    """Keep the better half, after the first stage at least two; the last one is the leader."""
    kept = max(2 if state.rung == 1 else 1, math.ceil(len(state.alive) / 2))
    ranked = _ranked(state)[:kept]
    if kept == 1:
        return replace(state, alive=(ranked[0],), rung=max(GUIDED, state.rung))
    each = min(STAGE, max(1, state.left // (2 * kept)))
    return replace(state, alive=tuple(ranked), rung=state.rung + each)


def _ranked(state: Tuning) -> list[str]:
    """Living anchors from the best to the worst; equal ones in their order."""
    ranked: list[str] = []
    for name in state.alive:
        merit = state.guides[name].best.merit
        place = next(
            (i for i, o in enumerate(ranked) if merit.beats(state.guides[o].best.merit)),
            len(ranked),
        )
        ranked.insert(place, name)
    return ranked


def _repaired(state: Tuning) -> Tuning:
    """Begin to calibrate the repair of the leader as it is now."""
    name = state.alive[0]
    guide = state.guides[name]
    mine = [
        i for i, (made, *_) in enumerate(state.made) if made.anchor == name and made.repair is None
    ]
    base = mine[guide.chosen]
    if state.repair is None and state.opened and state.base == base:
        return replace(state, stopped=guide.stopped or "nothing is left to try")
    begun = calibration.begin(
        np.array(state.profile),
        dict(zip(state.domains, guide.best.scores, strict=True)),
        dict(zip(state.domains, state.target, strict=True)),
        state.left,
        state.objective,
        anchors=guide.level,
    )
    state = replace(state, opened=len(state.made), base=base)
    if begun.stopped:
        return replace(state, stopped=begun.stopped)
    return replace(state, repair=begun)


def _guided_again(state: Tuning) -> Tuning:
    """Calls that the calibration left: guide the leader until it stops by itself."""
    return _advance(replace(state, repair=None, rung=state.calls))
