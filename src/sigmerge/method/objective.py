"""What a tuned merge is to be good at, and how far a calibration score can be trusted (ours).

Scores are fractions, one per domain, in one fixed order of domains. `target` is the score of the
expert that a domain's deficit is measured against, Q_d of Eq. gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from sigmerge.errors import RecipeError
from sigmerge.method.deficit import TOLERANCE, residual_gap
from sigmerge.method.shapes import Float64

Vector = tuple[float, ...]
"""One number per domain."""

Marks = Mapping[str, Sequence[Float64[np.ndarray, "_"]]]
"""Domain -> what the answers to the items of each of its benchmarks are worth, 0 to 1."""


class Answer(NamedTuple):
    """What a candidate scored; `marks` is None where only the scores are known."""

    scores: Mapping[str, float]
    marks: Marks | None = None


class Merit(NamedTuple):
    """How good a candidate is: it keeps the floors before it has a high value."""

    below: float
    """By how much scores lie below their floors, in total."""
    value: float
    """What the objective maximises."""

    def beats(self, other: Merit, margin: float = 0.0) -> bool:
        """Whether this is better by more than the margin, which is at least ruling 21's."""
        if abs(self.below - other.below) > TOLERANCE:
            return self.below < other.below
        return self.value - other.value > max(margin, TOLERANCE)


@runtime_checkable
class Evaluated(Protocol):
    """A candidate that answered the items."""

    @property
    def merit(self) -> Merit: ...

    @property
    def answer(self) -> Answer: ...


@dataclass(frozen=True)
class Objective:
    """What is maximised over the domains, and what must not be given up for it.

    `mean`: the mean score. `weighted`: the mean weighted by `weights`. `worst`: the negative of the
    largest deficit. `floors` name the fraction of the target that a domain must keep: 0.95 for
    safety means "safety not below 0.95 of its expert".
    """

    kind: Literal["mean", "worst", "weighted"] = "mean"
    weights: Mapping[str, float] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)

    def problems(self, domains: Sequence[str]) -> list[str]:
        """What is wrong with the objective for a pool of these domains."""
        known = f"the pool has {', '.join(domains)}"
        unknown = [d for d in (*self.weights, *self.floors) if d not in domains]
        found = [f"objective: unknown domain {d}, {known}" for d in dict.fromkeys(unknown)]
        if self.kind == "weighted" and not any(w > 0 for w in self.weights.values()):
            found.append("objective: weighted needs at least one weight above 0")
        if self.kind != "weighted" and self.weights:
            found.append(f"objective: {self.kind} takes no weights")
        found += [
            f"objective: the weight of {d} is {w:g}, not 0 or more"
            for d, w in self.weights.items()
            if not 0 <= w < math.inf
        ]
        return found + [
            f"objective: the floor of {d} is {f:g}, not a fraction of its expert's score"
            for d, f in self.floors.items()
            if not 0 <= f <= 1
        ]

    def importance(self, domains: Sequence[str]) -> Float64[np.ndarray, domains]:
        """How much each domain counts, 1 on average."""
        if self.kind != "weighted":
            return np.ones(len(domains))
        weights = np.array([self.weights.get(d, 0.0) for d in domains])
        return weights * len(domains) / weights.sum()

    def merit(self, domains: Sequence[str], scores: Vector, target: Vector) -> Merit:
        """How good a candidate with these scores is."""
        reached, wanted = np.array(scores), np.array(target)
        if self.kind == "worst":
            value = -float(residual_gap(wanted, reached).max())
        else:
            value = float((self.importance(domains) * reached).mean())
        return Merit(float(self._below(domains, reached, wanted).sum()), value)

    def pull(
        self, domains: Sequence[str], scores: Vector, target: Vector
    ) -> Float64[np.ndarray, domains]:
        """The deficits g_d as the objective counts them; a large one raises its expert's weight.

        A score below its floor counts twice.
        """
        reached, wanted = np.array(scores), np.array(target)
        gaps = residual_gap(wanted, reached)
        return gaps * self.importance(domains) + self._below(domains, reached, wanted)

    def error(self, one: Answer, other: Answer) -> float:
        """Standard error of the difference of two values; 0 where only the scores are known.

        The value of `worst` is that of one domain, so the largest error of a domain counts.
        """
        if one.marks is None or other.marks is None:
            return 0.0
        each = [paired_error(one.marks[d], other.marks[d]) for d in one.marks]
        if self.kind == "worst":
            return max(each)
        counted = self.importance(tuple(one.marks)).tolist()
        return math.sqrt(sum((w * e) ** 2 for w, e in zip(counted, each, strict=True))) / len(each)

    def beats(self, one: Evaluated, other: Evaluated) -> bool:
        """Whether one candidate is better than another by more than the noise."""
        return one.merit.beats(other.merit, self.error(one.answer, other.answer))

    def _below(
        self,
        domains: Sequence[str],
        reached: Float64[np.ndarray, domains],
        wanted: Float64[np.ndarray, domains],
    ) -> Float64[np.ndarray, domains]:
        floors = np.array([self.floors.get(d, 0.0) for d in domains])
        return residual_gap(floors * wanted, reached)


def amount(kind: str, value: float) -> tuple[str, float]:
    """What a value of this kind of objective is called where it is shown, and its size.

    `worst` maximises the negative of the largest deficit; what is shown is the deficit.
    """
    return ("largest deficit", abs(value)) if kind == "worst" else ("objective", value)


def paired_error(
    one: Sequence[Float64[np.ndarray, _]], other: Sequence[Float64[np.ndarray, _]]
) -> float:
    """Standard error of the difference of two means over benchmarks, from the same items.

    `one` and `other` have every benchmark's marks. Two candidates of one pool agree on most
    items, so this is smaller than the error of either mean.
    """
    variance = 0.0
    for a, b in zip(one, other, strict=True):
        difference = a - b
        variance += float(difference.var()) / difference.size
    return math.sqrt(variance) / len(one)


def check_calls(calls: int, least: int, what: str) -> None:
    """Refuse a budget in which nothing can be done."""
    if calls < least:
        raise RecipeError(f"{what} needs at least {least} evaluation calls, not {calls}.")


def paired_bootstrap(
    after: Marks, before: Marks, resamples: int = 10_000, seed: int = 0, level: float = 0.95
) -> tuple[float, float, float]:
    """The difference of two means over domains, and its percentile interval.

    The items of every benchmark are drawn with replacement, the same for both candidates. Many
    items have the same difference, so what is drawn is how often each difference occurs.
    """
    generator = np.random.default_rng(seed)
    total, drawn = 0.0, np.zeros(resamples)
    for domain, benchmarks in after.items():
        weight = 1 / (len(after) * len(benchmarks))
        for a, b in zip(benchmarks, before[domain], strict=True):
            differences, often = np.unique(a - b, return_counts=True)
            counts = generator.multinomial(a.size, often / a.size, resamples)
            total += weight * float((a - b).mean())
            drawn += weight * (counts @ differences) / a.size
    tail = 50 * (1 - level)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return total, float(low), float(high)
