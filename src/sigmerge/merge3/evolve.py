"""Evolve: a genetic algorithm over the coefficients of a merge.

One objective, the mean of the domains' estimates, or one for every domain (NSGA-II). The first
generation counts, so a search makes exactly population × generations evaluation calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sigmerge.errors import SigmergeError, require
from sigmerge.recipe.space import Genotype, Space


@dataclass(frozen=True)
class ScoredGenotype:
    """One evaluation call: the candidate, its answers and their value."""

    index: int
    genotype: Genotype
    answers: Mapping[str, Sequence[int]]
    estimates: Mapping[str, float]
    estimate: float


def best(history: Iterable[ScoredGenotype]) -> ScoredGenotype:
    """The highest estimate; of equal ones the earliest."""
    return min(history, key=lambda candidate: (-candidate.estimate, candidate.index))


def require_search(**also: Sequence[str]) -> None:
    """Raise MissingExtra where a library of the search is not installed. Loads none."""
    require("The search", tune=["scipy", "pymoo"], **also)


Evaluate = Callable[[int, Sequence[Genotype]], Sequence[ScoredGenotype]]
"""Called with a generation: the index of its first candidate, and the genotypes in their order."""


def evolve(
    space: Space,
    experts: int,
    evaluate: Evaluate,
    population: int,
    generations: int,
    seed: int,
    objectives: int = 1,
) -> list[ScoredGenotype]:
    """Simulated binary crossover and polynomial mutation; returns every candidate in its order.

    With as many `objectives` as domains, dominance in them decides which survive.
    """
    require_search()
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.algorithms.soo.nonconvex.ga import GA
    from pymoo.core.evaluator import Evaluator
    from pymoo.core.problem import Problem
    from pymoo.operators.crossover.sbx import SBX
    from pymoo.operators.mutation.pm import PM
    from pymoo.problems.static import StaticProblem

    size, kind = space.size(experts), GA if objectives == 1 else NSGA2
    problem = Problem(n_var=size, n_obj=objectives, xl=space.low, xu=space.high)
    algorithm = kind(pop_size=population, crossover=SBX(), mutation=PM(), eliminate_duplicates=True)
    algorithm.setup(problem, termination=("n_gen", generations), seed=seed)
    history: list[ScoredGenotype] = []
    while algorithm.has_next():
        born = algorithm.ask()
        genotypes = [tuple(map(float, genes)) for genes in born.get("X")]
        generation = evaluate(len(history), genotypes)
        history += generation
        fitness = np.array([
            [-candidate.estimate] if objectives == 1 else [-q for q in candidate.estimates.values()]
            for candidate in generation
        ])  # fmt: skip
        Evaluator().eval(StaticProblem(problem, F=fitness), born)
        algorithm.tell(infills=born)
    calls = population * generations
    if len(history) != calls:
        raise SigmergeError(
            f"The search made {len(history)} evaluation calls, not {population} × {generations} = "
            f"{calls}: no new genotypes were left. Lower the budget."
        )
    return history
