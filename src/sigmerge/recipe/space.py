"""The search space of an operator, and the budget of a search in evaluation calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sigmerge.errors import RecipeError

Genotype = tuple[float, ...]
CALLS = 240
"""The paper's budget of evaluation calls."""


@dataclass(frozen=True)
class Space:
    """The genes of an operator: for each of its `parameters` in turn, one gene per expert."""

    parameters: tuple[str, ...]
    low: float = 0.0
    high: float = 1.0

    def size(self, experts: int) -> int:
        return len(self.parameters) * experts

    def settings(self, genotype: Genotype, experts: Sequence[str]) -> dict[str, dict[str, float]]:
        """Every expert's parameters: first all weights, then all densities."""
        rows = np.reshape(genotype, (len(self.parameters), len(experts)))
        return {
            name: {p: float(row[k]) for p, row in zip(self.parameters, rows, strict=True)}
            for k, name in enumerate(experts)
        }


SPACES = {
    "linear": Space(("weight",), low=0.01),  # a soup divides by their sum
    "task_arithmetic": Space(("weight",)),
    "ties": Space(("weight", "density")),
    "dare_ties": Space(("weight", "density")),
}


def space_of(method: str) -> Space:
    if method not in SPACES:
        raise RecipeError(
            f"merge_method: {method} cannot be searched; the search knows {', '.join(SPACES)}."
        )
    return SPACES[method]


def generations_of(budget: int, population: int) -> int:
    """How many generations a budget of evaluation calls lasts."""
    if population < 2:
        raise RecipeError(f"A population of {population} cannot be crossed; give at least 2.")
    if budget < population or budget % population:
        near = [n for n in range(2, budget + 1) if budget % n == 0]
        near = sorted(sorted(near, key=lambda n: abs(n - population))[:4])
        raise RecipeError(
            f"A budget of {budget} evaluation calls cannot be divided into generations of "
            f"{population}: populations near it that divide it are {', '.join(map(str, near))}."
        )
    return budget // population
