"""Calibrated occupancy: form, scale, capacity and anchor level of a repair by its score (ours).

No fixed setting is best everywhere, and far out the score falls off a cliff. So settings lie on a
lattice, the search starts at the paper's (add, λ = 0.6, the profile's own capacity, the anchor as
it is) and moves outward from the best setting so far, one step along one axis at a time:

    scale    λ of Eq. occupancy, or μ of `replace`
    level    the mean capacity over the layers
    share    ρ moved by the deficits g that the repair leaves: ρ ← ρ + η (g − ḡ), on the simplex
    form     add or replace
    anchor   a common factor of the anchor's weights: a lower anchor leaves more to the repair
    shape    capacity as the profile has it, or the same in every layer

Of two settings with equal scores (ruling 21) the one nearer the paper's is chosen. The plain anchor
is a candidate from the start: the best of many repairs is the luckiest, so it is made only if it
beats the plain anchor by more than the standard error of their difference.

One `Calibration` is one state: `propose` says which repair to evaluate next, `observe` takes what
it scored. Both are pure, so a journal of the answers is enough to resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from sigmerge.errors import RecipeError
from sigmerge.method.deficit import shares
from sigmerge.method.objective import Answer, Merit, Objective, Vector, check_calls
from sigmerge.method.shapes import Float64

SCALES: Final[Mapping[str, Vector]] = {"add": (0.3, 0.6, 1.0, 1.5), "replace": (0.3, 0.6, 1.0)}
"""The paper's λ = 0.6 and steps around it; `replace` ends at the expert's own value."""
LEVELS: Final = (0.45, 0.65, 0.85)
"""Mean capacities above the profile's own; half of it is below."""
ANCHOR_FACTORS: Final = (0.5, 0.75, 1.0)
"""Factors of the anchor's weights."""
MOST: Final = 0.95
"""The most of a layer that may be claimed; the rest leaves room for quotas rounded up."""
SHARE_STEP: Final = 1.0
"""η: a deficit of 0.1 above the mean deficit raises its domain's share by 0.1."""
CALIBRATION_PATIENCE: Final = 8
"""Calls in which the best merit must rise by more than the noise of the scores."""


class LatticePoint(NamedTuple):
    """A place on the lattice, in indices; `shares` counts the moves of the shares."""

    form: Literal["add", "replace"]
    scale: int
    level: int
    shape: Literal["profile", "uniform"]
    anchor: int
    shares: int

    def distance(self, other: LatticePoint) -> int:
        """How many moves away another setting is."""
        return sum(
            abs(a - b) if isinstance(a, int) and isinstance(b, int) else int(a != b)
            for a, b in zip(self, other, strict=True)
        )


class RepairProposal(NamedTuple):
    """A repair to evaluate. Shares follow the domains; `anchor` multiplies the anchor's weights."""

    form: Literal["add", "replace"]
    scale: float
    capacity: Vector
    share: Vector
    anchor: float


@dataclass(frozen=True)
class TriedRepair:
    """One evaluated candidate; the plain anchor has no setting."""

    setting: LatticePoint | None
    share: Vector
    scores: Vector
    merit: Merit
    answer: Answer


@dataclass(frozen=True)
class Calibration:
    """The state of a calibration. Made by `begin`, continued by `observe`."""

    domains: tuple[str, ...]
    target: Vector
    profile: Vector
    """C_i, the capacity of every layer by the paper's constants."""
    levels: Vector
    calls: int
    objective: Objective
    anchors: bool
    """Whether the anchor can be made anew with other weights."""
    upcoming: LatticePoint
    share: Vector
    """Shares of the upcoming candidate."""
    tried: tuple[TriedRepair, ...]
    centre: int = 0
    """Which of the tried repairs moves start from; 0 before the first."""
    axis: int = 0
    """The move to the upcoming candidate; if that is better, the move is made again first."""
    stopped: str = ""
    """Why nothing more is proposed; empty while the search goes on."""

    @property
    def best(self) -> TriedRepair:
        """The best repair, of equals the one nearest the paper's, if it beats the plain anchor."""
        plain, *repairs = self.tried
        if not repairs:
            return plain
        best = repairs[0]
        for each in repairs:
            nearer = not best.merit.beats(each.merit) and self._far(each) < self._far(best)
            best = each if each.merit.beats(best.merit) or nearer else best
        return best if self.objective.beats(best, plain) else plain

    def _far(self, each: TriedRepair) -> int:
        assert each.setting is not None
        return each.setting.distance(self.paper)

    @property
    def paper(self) -> LatticePoint:
        return LatticePoint(
            "add", SCALES["add"].index(0.6), 1, "profile", ANCHOR_FACTORS.index(1.0), 0
        )


def begin(
    profile: Float64[np.ndarray, layers],
    anchor: Answer,
    target: Mapping[str, float],
    calls: int,
    objective: Objective | None = None,
    *,
    anchors: bool = True,
) -> Calibration:
    """The state before the first call.

    `profile` is the capacity by the paper's constants, `anchor` what the anchor scored and `target`
    the scores that deficits are measured against. `calls` does not count the anchor's own.
    """
    domains, chosen = tuple(anchor.scores), objective or Objective()
    check_calls(calls, 1, "calibrate:")
    problems = chosen.problems(domains)
    problems += [f"{d}: no score of an expert" for d in domains if d not in target]
    if problems:
        raise RecipeError("The repair cannot be calibrated:", problems)
    scores, wanted = tuple(anchor.scores.values()), tuple(target[d] for d in domains)
    merit = chosen.merit(domains, scores, wanted)
    plain = TriedRepair(None, (0.0,) * len(domains), scores, merit, anchor)
    mean = float(np.mean(profile))
    pull = chosen.pull(domains, scores, wanted)
    state = Calibration(
        domains=domains,
        target=wanted,
        profile=tuple(profile.tolist()),
        levels=(mean / 2, mean, *(level for level in LEVELS if level > 1.1 * mean)),
        calls=calls,
        objective=chosen,
        anchors=anchors,
        upcoming=LatticePoint("add", 0, 0, "profile", 0, 0),
        share=tuple(shares(pull).tolist()),
        tried=(plain,),
    )
    return replace(
        state, upcoming=state.paper, stopped="" if pull.any() else "no deficit is left to repair"
    )


def propose(state: Calibration) -> RepairProposal | None:
    """The repair to evaluate next; None when the calibration has ended."""
    return None if state.stopped else candidate(state, state.upcoming, state.share)


def candidate(state: Calibration, setting: LatticePoint, share: Vector) -> RepairProposal:
    """A setting in numbers."""
    level, profile = state.levels[setting.level], np.array(state.profile)
    if setting.shape == "profile":
        capacity = np.clip(profile * (level / profile.mean()), 0.0, MOST)
    else:
        capacity = np.full_like(profile, level)
    return RepairProposal(
        setting.form,
        SCALES[setting.form][setting.scale],
        tuple(capacity.tolist()),
        share,
        ANCHOR_FACTORS[setting.anchor],
    )


def observe(state: Calibration, answer: Answer) -> Calibration:
    """The state after the proposed repair got this answer."""
    if state.stopped:
        raise ValueError(f"nothing was proposed: {state.stopped}")
    reached = tuple(answer.scores[d] for d in state.domains)
    merit = state.objective.merit(state.domains, reached, state.target)
    tried = (*state.tried, TriedRepair(state.upcoming, state.share, reached, merit, answer))
    better = state.centre == 0 or merit.beats(state.tried[state.centre].merit)
    after = replace(state, tried=tried, centre=len(tried) - 1 if better else state.centre)
    return _advance(after)


def _advance(state: Calibration) -> Calibration:
    """Set the next candidate, or why there is none."""
    if len(state.tried) > state.calls:
        return replace(state, stopped=f"the {state.calls} calls are spent")
    before, last = state.tried[:-CALIBRATION_PATIENCE], state.tried[-CALIBRATION_PATIENCE:]
    beats = state.objective.beats
    if before and not any(all(beats(each, other) for other in before) for each in last):
        return replace(
            state,
            stopped=f"{CALIBRATION_PATIENCE} calls did not raise the scores by more than their "
            "noise",
        )
    known = {each.setting for each in state.tried}
    for axis, (setting, share) in _moves(state):
        if setting not in known:
            return replace(state, upcoming=setting, share=share, axis=axis)
    return replace(state, stopped="every setting next to the best was tried")


def _moves(state: Calibration) -> list[tuple[int, tuple[LatticePoint, Vector]]]:
    """The settings one move away from the centre, in the order in which they are tried."""
    centre = state.tried[state.centre]
    here = centre.setting
    assert here is not None
    last = len(SCALES[here.form]) - 1
    top = len(ANCHOR_FACTORS) - 1
    other: Literal["add", "replace"] = "replace" if here.form == "add" else "add"
    flat: Literal["profile", "uniform"] = "uniform" if here.shape == "profile" else "profile"
    pull = state.objective.pull(state.domains, centre.scores, state.target)
    same = centre.share
    moves = [
        (here._replace(scale=min(here.scale + 1, last)), same),
        (here._replace(level=min(here.level + 1, len(state.levels) - 1)), same),
        (here._replace(shares=here.shares + 1), _moved(same, pull)),
        (here._replace(form=other, scale=min(here.scale, len(SCALES[other]) - 1)), same),
        (here._replace(scale=max(here.scale - 1, 0)), same),
        (here._replace(level=max(here.level - 1, 0)), same),
        (here._replace(anchor=max(here.anchor - 1, 0) if state.anchors else here.anchor), same),
        (here._replace(anchor=min(here.anchor + 1, top)), same),
        (here._replace(shape=flat), same),
    ]
    numbered = list(enumerate(moves))
    return [numbered[state.axis], *numbered]


def _moved(share: Vector, pull: Float64[np.ndarray, domains]) -> Vector:
    """ρ + η (g − ḡ), clipped at 0 and normalised; ρ itself if nothing would be left."""
    moved = np.clip(np.array(share) + SHARE_STEP * (pull - pull.mean()), 0.0, None)
    return tuple((moved / moved.sum()).tolist()) if moved.sum() > 0 else share
