"""Ways to spend the evaluation calls of a tuning: ours, and those it is compared with.

A strategy gets a function that evaluates candidates and calls it until the budget is spent or it
has nothing more to try. All begin with plain anchors, so that none can end below them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from sigmerge.errors import RecipeError
from sigmerge.method import calibration, guidance, tuning
from sigmerge.method.objective import Answer, Objective, check_calls
from sigmerge.method.tuning import Proposal
from sigmerge.recipe import load_recipe
from sigmerge.recipe.anchors import AnchorRecipe

if TYPE_CHECKING:
    from sigmerge.merge3.evolve import ScoredGenotype

BOX: Final = 2.5
"""The largest weight of random search and evolution where `box:` gives none, in units of the
anchor's mean weight: MERGE³'s [0, 1] for task arithmetic at 0.4. `guided` goes up to
`guidance.CEILING`."""

Ask = Callable[[Sequence[Proposal]], Sequence[Answer]]


@dataclass(frozen=True)
class Setup:
    """What a strategy may know before the first call."""

    anchors: Mapping[str, AnchorRecipe]
    target: Mapping[str, float]
    calls: int
    objective: Objective
    profile: tuple[float, ...] = ()
    seed: int = 0
    box: float = BOX
    population: int | None = None
    prompts: Path | None = None
    """Prompts without answers, for strategies that read them."""

    def plain(self, name: str) -> Proposal:
        return Proposal(name, tuple(self.anchors[name].weights.values()))


@dataclass(frozen=True)
class Ended:
    """Why a strategy ended, and the call that it chose; None: the best, of equals the earliest."""

    stopped: str
    chosen: int | None = None


def guided(setup: Setup, ask: Ask) -> Ended:
    """Guided weights, then calibrated occupancy (`method.tuning`)."""
    anchors = {
        n: tuning.AnchorWeights(a.weights, a.level, a.weighted) for n, a in setup.anchors.items()
    }
    state = tuning.begin(
        anchors, setup.target, np.array(setup.profile), setup.calls, setup.objective
    )
    while batch := tuning.propose(state):
        state = tuning.observe(state, ask(batch))
    return Ended(state.stopped, state.best)


def guide(setup: Setup, ask: Ask) -> Ended:
    """Guided weights of one anchor (`method.guidance`); the guide: section of a recipe."""
    [(name, anchor)] = setup.anchors.items()
    state = guidance.begin(
        anchor.weights, setup.target, setup.calls, setup.objective, level=anchor.level
    )
    while (weights := guidance.propose(state)) is not None:
        [answer] = ask([Proposal(name, tuple(weights.values()))])
        state = guidance.observe(state, answer)
    return Ended(state.stopped, state.chosen)


def calibrate(setup: Setup, plain: Answer, ask: Ask) -> Ended:
    """Calibrated occupancy of one anchor (`method.calibration`); the calibrate: section.

    `plain` is what the anchor scored. No call is chosen where no repair is better than it.
    """
    [(name, anchor)] = setup.anchors.items()
    weights = tuple(anchor.weights.values())
    state = calibration.begin(
        np.array(setup.profile), plain, setup.target, setup.calls, setup.objective,
        anchors=anchor.level,
    )  # fmt: skip
    while (found := calibration.propose(state)) is not None:
        [answer] = ask([Proposal(name, tuple(found.anchor * w for w in weights), found)])
        state = calibration.observe(state, answer)
    chosen = next(i for i, each in enumerate(state.tried) if each is state.best)
    return Ended(state.stopped, chosen - 1 if chosen else None)


def random(setup: Setup, ask: Ask) -> Ended:
    """Weights and repairs drawn at random from the forms that `guided` tries, within a box."""
    ask([setup.plain(name) for name in setup.anchors])
    generator = np.random.default_rng([setup.seed, 1])
    for _ in range(setup.calls - len(setup.anchors)):
        ask([_drawn(setup, generator)])
    return Ended(f"the {setup.calls} calls are spent")


def _drawn(setup: Setup, generator: np.random.Generator) -> Proposal:
    name = list(setup.anchors)[generator.integers(len(setup.anchors))]
    base = setup.anchors[name].weights
    unit = sum(base.values()) / len(base)
    weights = tuple((unit * generator.uniform(0.01, setup.box, len(base))).tolist())
    form = "add" if generator.random() < 0.5 else "replace"
    scales = calibration.SCALES[form]
    level = float(generator.uniform(0.05, calibration.LEVELS[-1]))
    share = tuple(generator.dirichlet(np.ones(len(base))).tolist())
    scale = scales[generator.integers(len(scales))]
    if generator.random() < 0.5:
        return Proposal(name, weights)
    repair = calibration.RepairProposal(form, scale, (level,) * len(setup.profile), share, 1.0)  # type: ignore[arg-type]
    return Proposal(name, weights, repair)


def merge3(setup: Setup, ask: Ask) -> Ended:
    """The evolution of MERGE³ over the weights of the first anchor, scored on all items."""
    from sigmerge.merge3.evolve import ScoredGenotype, evolve
    from sigmerge.recipe.space import Genotype, Space

    name, base = next((n, a.weights) for n, a in setup.anchors.items())
    unit = sum(base.values()) / len(base)
    population, generations = _generations(setup.calls - 1, setup.population)
    ask([setup.plain(name)])

    def evaluate(first: int, genotypes: Sequence[Genotype]) -> list[ScoredGenotype]:
        answers = ask([Proposal(name, tuple(genes)) for genes in genotypes])
        return [
            ScoredGenotype(first + i, genes, {}, answer.scores, _value(setup, answer))
            for i, (genes, answer) in enumerate(zip(genotypes, answers, strict=True))
        ]

    space = Space(("weight",), low=0.01 * unit, high=setup.box * unit)
    evolve(space, len(base), evaluate, population, generations, setup.seed)
    return Ended(f"{generations} generations of {population} are over")


def _value(setup: Setup, answer: Answer) -> float:
    domains = tuple(setup.target)
    scores = tuple(answer.scores[d] for d in domains)
    merit = setup.objective.merit(domains, scores, tuple(setup.target.values()))
    return merit.value - 10 * merit.below


def _generations(calls: int, population: int | None = None) -> tuple[int, int]:
    """Population and generations that spend most of the calls; at least four of four or more.

    Of a given population, as many generations as the calls allow, two at least.
    """
    if population is not None:
        check_calls(calls + 1, 2 * population + 1, f"merge3 with a population of {population}")
        return population, calls // population
    least = 4
    if calls < least * 2:
        raise RecipeError(
            f"merge3 needs at least {2 * least + 1} evaluation calls: the plain anchor and two "
            f"generations of {least}."
        )
    most = max(least, min(24, int(calls**0.5) + 1))
    return max(
        ((size, calls // size) for size in range(least, most + 1)),
        key=lambda pair: pair[0] * pair[1],
    )


def adamerging(setup: Setup, ask: Ask) -> Ended:
    """Task-wise weights that make the answers to unlabelled prompts certain (AdaMerging).

    They are learnt without evaluation calls; the plain anchor and the result take one each.
    """
    from sigmerge.probing.adamerging import learnt_weights

    name = "task_arithmetic"
    assert setup.prompts is not None
    anchor = setup.anchors[name]
    folders = {n: Path(entry["model"]) for n, entry in anchor.models.items()}
    reference = load_recipe(anchor.recipe(tuple(anchor.weights.values()))).reference
    assert reference is not None
    weights = learnt_weights(reference, folders, anchor.weights, setup.prompts)
    ask([setup.plain(name)])
    ask([Proposal(name, weights)])
    return Ended("the entropy was minimised")


def check_method(
    method: str,
    anchors: Mapping[str, AnchorRecipe],
    calls: int,
    probe: bool,
    population: int | None = None,
) -> None:
    """Refuse what a method cannot work with, before anything is scored."""
    if method == "adamerging":
        check_calls(calls, 2, method)
        if "task_arithmetic" not in anchors or not probe:
            raise RecipeError(
                "adamerging learns the weights of task_arithmetic from prompts: name that anchor, "
                "and give probe: in the repair: section."
            )
    elif method == "merge3":
        from sigmerge.merge3.evolve import require_search

        require_search()
        _generations(calls - 1, population)
        first, anchor = next(iter(anchors.items()))
        if not anchor.weighted:
            raise RecipeError(
                f"merge3 searches weights, and {first} has none: name another anchor."
            )
    else:
        check_calls(calls, len(anchors) + 1, f"tuning {len(anchors)} anchors")
        for anchor in anchors.values():
            guidance.check_weights(anchor.weights)


STRATEGIES: Final[Mapping[str, Callable[[Setup, Ask], Ended]]] = {
    "guided": guided,
    "random": random,
    "merge3": merge3,
    "adamerging": adamerging,
}
