"""`check_operator`: every shipped operator passes, and operators that break a rule do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge.operators.base import LAMBDA, WEIGHT, Operator, Pass, add
from sigmerge.operators.table import OPERATORS, operator
from sigmerge.testing import check_operator

OF_MATRICES = {name for name in OPERATORS if operator(name).solves}
SETTINGS: dict[str, dict[str, Any]] = {
    "slerp": {"t": 0.5},
    "nearswap": {"t": 0.5},
    "wudi": {"steps": 12},
}
COUNT = {"slerp": 1, "nuslerp": 2, "nearswap": 1, "arcee_fusion": 1, "passthrough": 1}


@pytest.mark.parametrize("name", sorted(n for n in OPERATORS if not operator(n).needs))
def test_shipped_operators_keep_the_rules(name: str) -> None:
    check_operator(name, experts=COUNT.get(name, 3), **SETTINGS.get(name, {}))


def registered(name: str, function: Any, **how: Any) -> Operator:
    return sigmerge.operator(f"checked_{name}", **how)(function)


def test_a_function_of_its_own_state_is_found() -> None:
    drawn = np.random.default_rng()

    def random(tile: Any, site: Any) -> None:
        tile.out[:] = drawn.random(tile.out.size)

    with pytest.raises(AssertionError, match="on 1 threads gives other values"):
        check_operator(registered("random", random))


def test_a_function_that_looks_across_its_tile_is_found() -> None:
    def centred(tile: Any, site: Any) -> None:
        mean = tile.experts.mean(axis=0)
        tile.out[:] = mean - mean.mean()

    with pytest.raises(AssertionError, match="cut into smaller tiles gives other values"):
        check_operator(registered("centred", centred))
    check_operator(registered("centred_whole", centred, whole=True))


def test_a_function_that_fails_is_found() -> None:
    def partly(tile: Any, site: Any) -> None:
        tile.out[1:] = 0

    def infinite(tile: Any, site: Any) -> None:
        tile.out[:] = np.inf

    with pytest.raises(AssertionError, match="did not fill"):
        check_operator(registered("partly", partly))
    with pytest.raises(AssertionError, match="merge fails"):
        check_operator(registered("infinite", infinite))


def test_a_class_is_an_operator() -> None:
    class Bounded(Operator):
        title, paper = "bounded", "of a test"
        parameters = (WEIGHT, LAMBDA)

        def prepare(self, site: Any, survey: Any) -> Any:
            total = yield Pass(lambda chunk: np.float64(chunk.size), add)
            return np.float32(1 / total)

        def merge(self, chunk: Any, survey: Any) -> Any:
            for tile in chunk.tiles("reference"):
                tile.out[:] = chunk.state * tile.experts.sum(axis=0)
                yield tile

    made = registered("bounded", Bounded)
    assert sigmerge.Method.of(made).operator == "checked_bounded"
    merged = check_operator(made)
    assert merged["lm_head.weight"].dtype == np.float32
    with pytest.raises(sigmerge.errors.RecipeError, match="registered already"):
        sigmerge.operator("checked_bounded")(lambda tile, site: None)
