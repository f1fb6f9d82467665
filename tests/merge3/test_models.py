"""Item models: the subset of every benchmark, and whose abilities are mixed."""

from __future__ import annotations

import numpy as np
import pytest

from sigmerge.merge3 import irt
from sigmerge.merge3.estimate import ESTIMATORS, domain_estimates
from sigmerge.merge3.extract import Question, labelled
from sigmerge.merge3.models import Extraction, item_models, per_call


def questions(**sizes: int) -> dict[str, tuple[Question, ...]]:
    """Benchmarks a1, a2 of the domain a, and so on."""
    return {
        name: tuple(Question(f"{name}/{i}", name, name[0], "calibration") for i in range(size))
        for name, size in sizes.items()
    }


def test_abilities_are_the_endpoints_own() -> None:
    """The endpoints stand neither first nor in the pool's order among the respondents."""
    asked, rng = questions(a1=40), np.random.default_rng(0)
    shares = {"merge": 0.5, "weak": 0.1, "other": 0.4, "strong": 0.9}
    answers = {
        name: {"a1": [int(x) for x in rng.random(40) < share]} for name, share in shares.items()
    }
    models, _ = item_models(asked, answers, ["strong", "weak"], Extraction(8))
    fitted = irt.fit(np.array([row["a1"] for row in answers.values()]))
    assert models["a1"].endpoints.tolist() == [
        fitted.abilities[3].tolist(), fitted.abilities[1].tolist()
    ]  # fmt: skip
    strong, weak = models["a1"].endpoints[:, 0]
    assert strong > max(fitted.abilities[[0, 2], 0]) and weak < min(fitted.abilities[[0, 2], 0])


def test_a_domain_is_the_mean_of_its_benchmarks() -> None:
    """40 right answers of 40 and 1 of 10: 0.55, where pooled items would give 0.82."""
    asked = questions(a1=40, a2=10, b1=5)
    models, _ = item_models(asked, {}, [], Extraction(1000))
    answers = {"a1": [1] * 40, "a2": [1] + [0] * 9, "b1": [0, 0, 1, 1, 0]}
    for name in ("mean", "p-irt", "gp-irt"):
        domains = {"a": ["a1", "a2"], "b": ["b1"]}
        found = domain_estimates(domains, models, answers, ESTIMATORS[name])
        assert found == {"a": pytest.approx(0.55), "b": pytest.approx(0.4)}


def test_items_are_drawn_from_every_benchmark() -> None:
    asked = questions(a1=400, a2=3, b1=50, c1=9, c2=9, c3=9)
    assert per_call(asked, 20) == {"a1": 17, "a2": 3, "b1": 20, "c1": 6, "c2": 7, "c3": 7}
    assert per_call(asked, 2) == {"a1": 1, "a2": 1, "b1": 2, "c1": 1, "c2": 1, "c3": 1}
    models, _ = item_models(asked, {}, [], Extraction(20))
    assert {name: len(model.seen) for name, model in models.items()} == per_call(asked, 20)


def test_labels_are_divided_by_domain_then_by_benchmark() -> None:
    asked = questions(a1=900, a2=100, b1=30)
    every = [question for each in asked.values() for question in each]
    chosen = labelled(every, 330)
    assert {name: len(each) for name, each in chosen.items()} == {"a1": 200, "a2": 100, "b1": 30}


def test_the_seed_decides_the_subset() -> None:
    asked = questions(a1=60, a2=60)
    rows = [
        [model.seen.tolist() for model in item_models(asked, {}, [], how)[0].values()]
        for how in (Extraction(10, seed=0), Extraction(10, seed=0), Extraction(10, seed=1))
    ]
    assert rows[0] == rows[1] != rows[2]
    assert rows[0][0] != rows[0][1]
