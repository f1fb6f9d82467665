"""Evolution with a stub fitness: the budget to the call, the seed to the bit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from sigmerge.errors import MissingExtra, RecipeError
from sigmerge.merge3.evolve import ScoredGenotype, best, evolve
from sigmerge.recipe.space import SPACES, Genotype, Space, generations_of, space_of

SPACE = SPACES["dare_ties"]


class Stub:
    """Best where every gene is 0.7; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, first: int, genotypes: Sequence[Genotype]) -> list[ScoredGenotype]:
        return [self.one(index, genotype) for index, genotype in enumerate(genotypes, first)]

    def one(self, index: int, genotype: Genotype) -> ScoredGenotype:
        self.calls.append(index)
        value = -float(np.sum((np.array(genotype) - 0.7) ** 2))
        return ScoredGenotype(index, genotype, {}, {}, value)


def searched(seed: int = 0, population: int = 24, generations: int = 10) -> list[ScoredGenotype]:
    return evolve(SPACE, 5, Stub(), population, generations, seed)


@pytest.mark.parametrize(
    ("population", "generations", "calls"),
    [(24, 10, 240), (20, 12, 240), (25, 7, 175), (2, 1, 2), (6, 1, 6)],
)
def test_population_times_generations_calls(population: int, generations: int, calls: int) -> None:
    stub = Stub()
    history = evolve(SPACE, 5, stub, population, generations, 0)
    assert stub.calls == list(range(calls))
    assert [candidate.index for candidate in history] == list(range(calls))


def test_the_seed_decides_the_history() -> None:
    assert searched(0, 8, 4) == searched(0, 8, 4)
    assert searched(0, 8, 4) != searched(1, 8, 4)


def test_other_random_numbers_do_not_matter() -> None:
    np.random.seed(1)
    one = searched(0, 8, 4)
    np.random.seed(2)
    assert searched(0, 8, 4) == one


def test_best_so_far_never_gets_worse_and_the_search_helps() -> None:
    history = searched()
    fitness = [-best(history[: i + 1]).estimate for i in range(len(history))]
    assert all(later <= earlier for earlier, later in pairwise(fitness))
    assert fitness[-1] < fitness[23] / 2


def test_one_objective_for_every_domain() -> None:
    """Two domains that want other genes: both ends survive, where a mean would settle between."""

    def evaluate(first: int, genotypes: Sequence[Genotype]) -> list[ScoredGenotype]:
        made = []
        for index, genotype in enumerate(genotypes, first):
            low, high = (-float(np.sum((np.array(genotype) - g) ** 2)) for g in (0.2, 0.8))
            made.append(
                ScoredGenotype(index, genotype, {}, {"a": low, "b": high}, (low + high) / 2)
            )
        return made

    def last(objectives: int) -> list[float]:
        history = evolve(Space(("weight",)), 1, evaluate, 12, 10, 0, objectives)
        assert len(history) == 120
        return [candidate.genotype[0] for candidate in history[-24:]]

    assert np.ptp(last(2)) > 0.5 > np.ptp(last(1))


def test_genes_stay_within_their_bounds() -> None:
    for space in (SPACE, Space(("weight",), 0.2, 0.4)):
        genes = np.array([c.genotype for c in evolve(space, 3, Stub(), 6, 5, 0)])
        assert genes.shape == (30, space.size(3))
        assert genes.min() >= space.low and genes.max() <= space.high
        assert len(np.unique(genes, axis=0)) == 30


def test_weights_come_before_densities() -> None:
    genotype = (0.1, 0.2, 0.3, 0.4)
    assert SPACE.settings(genotype, ["a", "b"]) == {
        "a": {"weight": 0.1, "density": 0.3},
        "b": {"weight": 0.2, "density": 0.4},
    }
    sizes = {name: space.size(5) for name, space in SPACES.items()}
    assert sizes == {"linear": 5, "task_arithmetic": 5, "ties": 10, "dare_ties": 10}


def test_the_earliest_of_equal_candidates_wins() -> None:
    history = [
        ScoredGenotype(i, (), {}, {}, estimate) for i, estimate in enumerate([1.0, 2.0, 2.0])
    ]
    assert best(reversed(history)).index == 1


def test_budgets() -> None:
    assert generations_of(240, 24) == 10
    assert generations_of(175, 25) == 7
    with pytest.raises(RecipeError, match=r"240 .* generations of 25: .* 20, 24, 30"):
        generations_of(240, 25)
    with pytest.raises(RecipeError, match="cannot be divided"):
        generations_of(10, 20)
    with pytest.raises(RecipeError, match="cannot be crossed"):
        generations_of(240, 1)


def test_operators_that_cannot_be_searched() -> None:
    with pytest.raises(RecipeError, match="cabs cannot be searched; the search knows linear, "):
        space_of("cabs")


def test_without_pymoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymoo", None)
    with pytest.raises(MissingExtra, match=r"pymoo.*pip install 'sigmerge-llm\[tune\]'"):
        searched()
