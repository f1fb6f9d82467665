"""Estimates of the time of passes over weights, scaled from measurements on two machines.

docs/scale.md has the machines, and what the model leaves out.
"""

from __future__ import annotations

from typing import NamedTuple


class PassSpeed(NamedTuple):
    """Nanoseconds a coordinate with five experts: of one core, and where threads wait."""

    core: float
    waiting: float


SPEEDS = {
    "linear": PassSpeed(3.9, 0.16),
    "task_arithmetic": PassSpeed(4.5, 0.23),
    "dare_ties": PassSpeed(16.3, 0.31),
    "ties": PassSpeed(11.4, 0.55),
    "profile": PassSpeed(5.8, 0.0),
    "repair": PassSpeed(12.2, 0.71),
}
"""Of the table of 16 cores in docs/results/scaling.md (CPU time; wall time beyond start-up and the
share of the cores), the profile of docs/results/repair.md (2 cores, 430 M coordinates; CPU time
beyond start-up)."""
MEASURED_EXPERTS = 5
START = 0.4
"""Seconds until the first block."""
DISK = 1.7e9
"""Bytes a second, read and written: the floor of docs/results/repair.md, from disk."""


PRODUCTS = 50e9
"""Operations a second of matrix products in float64 on one core; operators/matrices.py has more."""


def solving(operations: float, threads: int) -> float:
    """Wall seconds of linear algebra, a matrix a thread."""
    return operations / PRODUCTS / threads


def seconds(what: str, coordinates: int, experts: int, threads: int) -> float:
    """Wall seconds of a merge by an operator, a profile or a repair, its inputs in memory.

    An operator that was not measured counts as TIES, which takes most passes of those that were.
    """
    speed = SPEEDS.get(what, SPEEDS["ties"])
    each = (speed.core / threads + speed.waiting) * (experts + 1) / (MEASURED_EXPERTS + 1)
    return START + each * coordinates / 1e9
