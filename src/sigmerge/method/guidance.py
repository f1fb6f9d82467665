"""Guided weights: the deficits of every evaluation call steer the anchor's weights (ours).

A search reads one number from an evaluation call. A call returns one score per domain, and each
domain has an expert with a weight, so the deficits say which weights to raise:

    w  ←  clip( s · (w + η u (g − ḡ)), 0, ceiling · u )

w are the weights of the best candidate so far and g its deficits (Eq. gap), ḡ their mean; u is the
mean of the recipe's weights, so that a step means the same to an operator that sums task vectors
(weights about 0.4) and to one that averages them (weights 1). The step η moves weight from domains
without a deficit to those with one; the stretch s raises or lowers the level, all weights together.
A candidate that is not better is given up for the best so far: the next one stretches the other
way, and if that fails too, η and s are shortened.

The first candidate is the anchor as the recipe has it. The last one is the centre: the mean of the
weights of all candidates that the best does not beat by more than the standard error of their
difference. Their order is noise, so the best of them is the luckiest, on any side of the optimum.
Where the score is concave, their mean is at least as good as they are on average (Jensen), and what
noise did to each of them averages out (Polyak and Ruppert). The centre is chosen unless the best
beats it by more than noise.

One `Guidance` is one state: `propose` says which weights to evaluate next, `observe` takes what
they scored. Both are pure, so a journal of the answers is enough to resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sigmerge.errors import RecipeError
from sigmerge.method.objective import Answer, Merit, Objective, Vector, check_calls

FIRST_STEP: Final = 5.0
"""η: a deficit of 0.1 above the mean deficit raises its expert's weight by half of the unit."""
STRETCH: Final = 1.2
"""s: the level rises by a fifth, or falls by a sixth."""
SMALLEST_STEP: Final = 0.3
"""Below this η a step changes the scores by less than one item."""
GUIDANCE_PATIENCE: Final = 5
"""Calls in which the best merit must rise by more than the noise of the scores."""
CEILING: Final = 4.0
"""The largest weight, in units of the recipe's mean weight."""
SAME_WEIGHTS: Final = 1e-6
"""Weights closer than this make the same candidate."""


@dataclass(frozen=True)
class TriedWeights:
    """One evaluated candidate."""

    weights: Vector
    scores: Vector
    merit: Merit
    answer: Answer


@dataclass(frozen=True)
class Guidance:
    """The state of a guided search for weights. Made by `begin`, continued by `observe`."""

    domains: tuple[str, ...]
    target: Vector
    calls: int
    objective: Objective
    level: bool
    """Whether the level matters: an operator that divides by the sum of the weights has none."""
    unit: float
    """u, the mean of the recipe's weights."""
    upcoming: Vector
    step: float = FIRST_STEP
    stretch: float = STRETCH
    turned: bool = False
    """Whether the last candidate failed and the stretch was turned round for the next."""
    tried: tuple[TriedWeights, ...] = ()
    leader: int = 0
    """Which of the tried candidates has the best merit; steps start from it."""
    centre: int | None = None
    """Which of them is the last centre; the upcoming one before it was observed."""
    closing: str = ""
    """Why the centre is the last candidate."""
    stopped: str = ""
    """Why nothing more is proposed; empty while the search goes on."""

    @property
    def best(self) -> TriedWeights:
        return self.tried[self.leader]

    @property
    def at_centre(self) -> bool:
        """Whether the upcoming candidate is a centre."""
        return self.centre == len(self.tried)

    @property
    def chosen(self) -> int:
        """Which of the tried candidates to take: the centre, unless one is better.

        The best is better by more than noise; the recipe's own, the first, at all.
        """
        if self.centre is None or self.at_centre:
            return self.leader
        found = self.tried[self.centre]
        better = self.objective.beats(self.best, found) or self.tried[0].merit.beats(found.merit)
        return self.leader if better else self.centre


def begin(
    weights: Mapping[str, float],
    target: Mapping[str, float],
    calls: int,
    objective: Objective | None = None,
    *,
    level: bool = True,
) -> Guidance:
    """The state before the first call.

    `weights` are the recipe's, `target` the experts' scores that deficits are measured against,
    both by domain; `calls` is the budget of evaluation calls, the recipe's own weights included.
    """
    domains, chosen = tuple(weights), objective or Objective()
    check_calls(calls, 1, "guide:")
    check_weights(weights)
    problems = chosen.problems(domains)
    problems += [f"{d}: no score of an expert" for d in domains if d not in target]
    if problems:
        raise RecipeError("The weights cannot be guided:", problems)
    return Guidance(
        domains=domains,
        target=tuple(target[d] for d in domains),
        calls=calls,
        objective=chosen,
        level=level,
        unit=sum(weights.values()) / len(weights),
        upcoming=tuple(weights.values()),
        stretch=STRETCH if level else 1.0,
    )


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights that no step can start from."""
    problems = [
        f"{d}: the weight {w:g} is not 0 or more"
        for d, w in weights.items()
        if not 0 <= w < math.inf
    ]
    if not any(weights.values()):
        problems.append("all weights are 0")
    if problems:
        raise RecipeError("The weights cannot be guided:", problems)


def propose(state: Guidance) -> dict[str, float] | None:
    """The weights to evaluate next, by domain; None when the search has ended."""
    if state.stopped:
        return None
    return dict(zip(state.domains, state.upcoming, strict=True))


def observe(state: Guidance, answer: Answer) -> Guidance:
    """The state after the proposed candidate got this answer."""
    if state.stopped:
        raise ValueError(f"nothing was proposed: {state.stopped}")
    reached = tuple(answer.scores[d] for d in state.domains)
    merit = state.objective.merit(state.domains, reached, state.target)
    after = replace(
        state, tried=(*state.tried, TriedWeights(state.upcoming, reached, merit, answer))
    )
    if state.tried and merit.beats(state.best.merit):
        after = replace(after, leader=len(state.tried), turned=False)
    elif state.tried and not state.at_centre:
        after = _failed(after)
    return replace(after, stopped=after.closing) if after.closing else _advance(after)


def to_centre(state: Guidance) -> Guidance | None:
    """The state whose upcoming candidate is the centre; None if there is no new one.

    There is none while nothing is better than the recipe's own weights, nor before another step
    was tried.
    """
    if state.leader == 0 or state.centre == len(state.tried) - 1:
        return None
    level = [each.weights for each in state.tried if not state.objective.beats(state.best, each)]
    upcoming = tuple(np.mean(level, axis=0).tolist())
    if _known(upcoming, state.tried):
        return None
    return replace(state, upcoming=upcoming, centre=len(state.tried))


def _failed(state: Guidance) -> Guidance:
    """Turn the stretch round once; then shorten the step and the stretch."""
    if state.level and not state.turned:
        return replace(state, stretch=1 / state.stretch, turned=True)
    return _shortened(state)


def _shortened(state: Guidance) -> Guidance:
    stretch = math.sqrt(state.stretch)
    return replace(state, step=state.step / 2, stretch=stretch, turned=False)


def _advance(state: Guidance) -> Guidance:
    """Set the next candidate, or why there is none."""
    pull = state.objective.pull(state.domains, state.best.scores, state.target)
    left = state.calls - len(state.tried)
    spent = f"the {state.calls} calls are spent"
    if not pull.any():
        return replace(state, stopped="no deficit is left")
    if left == 0:
        return replace(state, stopped=spent)
    if _idle(state):
        return _closed(
            state, f"{GUIDANCE_PATIENCE} calls did not raise the scores by more than their noise"
        )
    if left == 1 and (last := to_centre(state)) is not None:
        return replace(last, closing=spent)
    while state.step >= SMALLEST_STEP:
        moved = np.array(state.best.weights) + state.step * state.unit * (pull - pull.mean())
        upcoming = tuple((state.stretch * moved).clip(0.0, CEILING * state.unit).tolist())
        if not _known(upcoming, state.tried):
            return replace(state, upcoming=upcoming)
        state = _failed(state)
    return _closed(state, "the step is too small to matter")


def _closed(state: Guidance, why: str) -> Guidance:
    """No step is left; the centre is evaluated where there is one."""
    last = to_centre(state)
    return replace(state, stopped=why) if last is None else replace(last, closing=why)


def _idle(state: Guidance) -> bool:
    """Whether the last calls brought no more than noise, compared with the best before them."""
    before, last = state.tried[:-GUIDANCE_PATIENCE], state.tried[-GUIDANCE_PATIENCE:]
    if not before:
        return False
    best = before[0]
    for each in before:
        best = each if each.merit.beats(best.merit) else best
    return not any(state.objective.beats(each, best) for each in last)


def _known(weights: Vector, tried: Sequence[TriedWeights]) -> bool:
    """Whether the weights were evaluated before: a clipped step can lead back to them."""
    return any(np.abs(np.subtract(each.weights, weights)).max() < SAME_WEIGHTS for each in tried)
