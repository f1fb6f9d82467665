"""Tuning: several anchors, guided, then repaired, in one budget of evaluation calls (ours).

Every anchor is evaluated as it is. Those that lead are guided (`guidance`), the others are dropped:
half of them after each stage, down to the leader. The leader is guided further and brought to its
centre, then its repair is calibrated (`calibration`); calls that the calibration leaves go to
guidance again, and a better anchor found there is calibrated once more. A last call of guidance
goes to the centre.

What is chosen is the best anchor's own choice, and a repair only if it beats that by more than the
noise of their difference. An anchor's choice is never below the plain anchor in the objective, so
the result is never below the best plain anchor.

One `Tuning` is one state: `propose` says which candidates to evaluate next, `observe` takes what
they scored. Both are pure, so a journal of the answers is enough to resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from sigmerge.method import calibration, guidance
from sigmerge.method.objective import Answer, Merit, Objective, Vector, check_calls
from sigmerge.method.shapes import Float64

STAGE: Final = 3
"""Guided calls of an anchor between two stages."""
GUIDED: Final = 8
"""Calls of the leader before its repair is calibrated."""


class AnchorWeights(NamedTuple):
    """An operator with its weights; `level` as in `guidance.begin`.

    Weights that are not `free` are evaluated once, as they are.
    """

    weights: Mapping[str, float]
    level: bool = True
    free: bool = True


class Proposal(NamedTuple):
    """A candidate: an anchor with these weights, in the order of the domains, and its repair."""

    anchor: str
    weights: Vector
    repair: calibration.RepairProposal | None = None


class EvaluationCall(NamedTuple):
    """One evaluation call."""

    proposal: Proposal
    answer: Answer
    merit: Merit


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
    repaired: int | None = None
    """The call of the best repair so far; None if no repair is better than its anchor."""
    earlier: int | None = None
    """The same before the calibration under way."""
    made: tuple[EvaluationCall, ...] = ()
    stopped: str = ""

    @property
    def left(self) -> int:
        return self.calls - len(self.made)

    @property
    def best(self) -> int:
        """The call to take, of those made so far."""
        anchor = _best(self, [self.choice(n) for n, guide in self.guides.items() if guide.tried])
        if self.repaired is None:
            return anchor
        better = self.objective.beats(self.made[self.repaired], self.made[anchor])
        return self.repaired if better else anchor

    def choice(self, name: str) -> int:
        """The call that the guidance of an anchor chooses."""
        mine = [
            i
            for i, (proposal, *_) in enumerate(self.made)
            if proposal.anchor == name and proposal.repair is None
        ]
        return mine[self.guides[name].chosen]


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
        name: guidance.begin(
            anchor.weights, target, calls if anchor.free else 1, chosen, level=anchor.level
        )
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
    state = replace(state, made=(*state.made, EvaluationCall(proposal, answer, merit)))
    if state.repair is not None:
        return _after_repair(replace(state, repair=calibration.observe(state.repair, answer)))
    guides = dict(state.guides)
    guides[proposal.anchor] = guidance.observe(guides[proposal.anchor], answer)
    return replace(state, guides=guides)


def _after_repair(state: Tuning) -> Tuning:
    """The calibration's own best, unless a repair found before it is as good."""
    assert state.repair is not None
    found = state.repair.best
    if found.setting is None:
        return replace(state, repaired=state.earlier)
    place = next(i for i, each in enumerate(state.repair.tried) if each is found)
    known = [] if state.earlier is None else [state.earlier]
    return replace(state, repaired=_best(state, [*known, state.opened + place - 1]))


def _best(state: Tuning, calls: Sequence[int]) -> int:
    """The call with the best merit; of equals the first in the list."""
    best = calls[0]
    for call in calls:
        best = call if state.made[call].merit.beats(state.made[best].merit) else best
    return best


def _turn(state: Tuning) -> list[str]:
    """Anchors with a call to make now: those behind the rung; as many as calls are left."""
    waiting = [name for name in state.alive if _waits(state, name)]
    return waiting[: state.left]


def _waits(state: Tuning, name: str) -> bool:
    guide = state.guides[name]
    return not guide.stopped and (guide.at_centre or len(guide.tried) < state.rung)


def _advance(state: Tuning) -> Tuning:
    """Drop, move on to the repair or back to guidance, or stop."""
    if state.left == 0:
        return replace(state, stopped=f"the {state.calls} calls are spent")
    if state.repair is not None:
        return state if not state.repair.stopped else _guided_again(state)
    if state.left == 1 and (last := _centred(state)) is not None:
        return last
    if _turn(state):
        return state
    if len(state.alive) > 1:
        return _advance(_dropped(state))
    return _centred(state) or _repaired(state)


def _centred(state: Tuning) -> Tuning | None:
    """The leader goes to its centre, before it is repaired and with the last call."""
    name = _ranked(state)[0]
    guide = state.guides[name]
    found = None if guide.stopped or guide.at_centre else guidance.to_centre(guide)
    if found is None:
        return None
    return replace(state, alive=(name,), guides={**state.guides, name: found})


def _dropped(state: Tuning) -> Tuning:
    """Keep the better half; the last one is the leader.

    After one call each at least two stay, and three if there are calls enough to guide them: a
    plain score says little of an anchor whose weights are far from their level.
    """
    count, least = len(state.alive), 1
    if state.rung == 1:
        least = 3 if state.left > 4 * len(state.guides) else 2
    kept = max(min(least, count), math.ceil(count / 2))
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
    name = _ranked(state)[0]
    guide, base = state.guides[name], state.choice(name)
    if state.opened and state.base == base:
        return replace(state, stopped=guide.stopped or "nothing is left to try")
    scores, marks = state.made[base].answer
    begun = calibration.begin(
        np.array(state.profile),
        Answer({d: scores[d] for d in state.domains}, marks),
        dict(zip(state.domains, state.target, strict=True)),
        state.left,
        state.objective,
        anchors=guide.level,
    )
    state = replace(state, opened=len(state.made), base=base, earlier=state.repaired)
    if begun.stopped:
        return replace(state, stopped=begun.stopped)
    return replace(state, repair=begun)


def _guided_again(state: Tuning) -> Tuning:
    """Calls that the calibration left: guide the leader until it stops by itself."""
    return _advance(replace(state, repair=None, rung=state.calls))
