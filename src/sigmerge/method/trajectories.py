"""Weights of N checkpoints θ_0 … θ_{N−1} of one run, oldest first; they sum to 1.

With D(t) the learning rate at the part t of a decay, D(0) = 1 and D(1) = 0, the weight of θ_j is
D(j/N) − D((j+1)/N). It moves from θ_{j−1} to θ_j, by D(j/N) of the way that training took, as a
decay would have (WSM, arXiv:2507.17634). A linear decay gives every checkpoint the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

Averaging = Literal["uniform", "ema", "cosine", "1-sqrt"]
SCHEDULES: tuple[Averaging, ...] = get_args(Averaging)
_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "1-sqrt": lambda t: 1 - math.sqrt(t),
}


def weights(schedule: Averaging, count: int, decay: float = 0.9) -> list[float]:
    """The weights of so many checkpoints, oldest first.

    `decay` is that of ema: μ_0 = θ_0, μ_j = decay · μ_{j−1} + (1 − decay) · θ_j.

    >>> weights("uniform", 4)
    [0.25, 0.25, 0.25, 0.25]
    >>> weights("ema", 3, decay=0.5)
    [0.25, 0.25, 0.5]
    """
    if schedule == "ema":
        first = decay ** (count - 1)
        return [first, *((1 - decay) * decay ** (count - 1 - j) for j in range(1, count))]
    if schedule == "uniform":
        return [1 / count] * count
    rate = _DECAYS[schedule]
    return [rate(j / count) - rate((j + 1) / count) for j in range(count)]
