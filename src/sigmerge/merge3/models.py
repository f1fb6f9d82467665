"""Item models from the respondents' answers: parameters, endpoints' abilities and the subset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sigmerge.merge3 import extract, irt
from sigmerge.merge3.estimate import ItemModel, trust
from sigmerge.merge3.extract import Question

Answers = Mapping[str, Sequence[int]]
"""Right (1) and wrong (0) answers of one respondent, by benchmark, in the questions' order."""


@dataclass(frozen=True)
class Extraction:
    """How a subset is drawn and a model fitted. `items` counts the questions of a domain."""

    items: int
    method: str = "uniform"
    dimension: int = 1
    trust: float | str = 0.5
    seed: int = 0


def per_call(questions: Mapping[str, Sequence[Question]], items: int) -> dict[str, int]:
    """How many questions of each benchmark a candidate answers: `items` in each domain."""
    counts: dict[str, int] = {}
    for benchmarks in extract.by_domain(questions).values():
        counts |= extract.benchmark_allowances({b: questions[b] for b in benchmarks}, items)
    return counts


def item_models(
    questions: Mapping[str, Sequence[Question]],
    answers: Mapping[str, Answers],
    endpoints: Sequence[str],
    how: Extraction,
) -> tuple[dict[str, ItemModel], dict[str, irt.HeldOut]]:
    """The model of every benchmark, and its error on answers that a fit had not seen.

    `answers` are the respondents' by name; `endpoints` names those whose abilities are mixed. With
    no answers nothing is fitted, and only the plain mean can be estimated.
    """
    counts = per_call(questions, how.items)
    models, errors = {}, {}
    for domain, benchmarks in extract.by_domain(questions).items():
        rng = extract.generator(how.seed, "subset", domain)
        for name in benchmarks:
            size, share = len(questions[name]), how.trust
            items, abilities = irt.Items(np.zeros((size, 1)), np.zeros(size)), np.zeros((0, 1))
            if answers:
                right = np.array([answers[respondent][name] for respondent in answers])
                fitted = irt.fit(right, how.dimension)
                errors[name] = irt.held_out(right, how.dimension)
                rows = [list(answers).index(endpoint) for endpoint in endpoints]
                items, abilities = fitted.items, fitted.abilities[rows]
                if share == "auto":
                    share = trust(errors[name].bias, float(right.var()), counts[name])
            subset = (
                extract.clustered(items, counts[name], rng)
                if how.method == "clusters"
                else extract.uniform(size, counts[name], rng)
            )
            weight = share if isinstance(share, float) else 0.5
            models[name] = ItemModel(items, abilities, subset.rows, subset.weights, weight)
    return models, errors
