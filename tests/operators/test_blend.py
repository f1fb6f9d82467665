"""Blends against their parts, each merged by itself and put together with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sigmerge.errors import RecipeError
from sigmerge.operators.blend import Blend
from sigmerge.operators.table import operator
from tests.operators.driver import run
from tests.operators.test_matrices import BLOCKS, SHAPES, made

Array = np.ndarray[Any, Any]
CASES: dict[str, tuple[tuple[str, str], dict[str, Any], dict[str, Any]]] = {
    "two that solve": (("tsv", "iso_c"), {"lambda": 1.3}, {"lambda": 0.7}),
    "a formula": (("iso_c", "task_arithmetic"), {"rest": 0.2}, {"lambda": 0.5}),
    "passes over a tensor": (("ties", "boost"), {"density": 0.3}, {"beta": 0.4}),
    "values, not vectors": (("linear", "tsv"), {}, {"lambda": 1.1}),
    "tiles of matrices and of any length": (("della_linear", "wudi"), {}, {"steps": 5}),
    "a gram": (("regmean", "dare_ties"), {"gram": "task_vector"}, {"density": 0.5}),
}
WEIGHTS = (1.0, 0.7, 1.4)


@pytest.fixture(scope="module")
def pool() -> tuple[Any, Any]:
    return made(SHAPES)


def blended(pool: tuple[Any, Any], case: str, threads: int = 1, **more: Any) -> dict[str, Array]:
    parts, first, second = CASES[case]
    given = {f"{parts[0]}.{k}": v for k, v in first.items()}
    given |= {f"{parts[1]}.{k}": v for k, v in second.items()}
    return run("blend", *pool, on=parts, blocks=BLOCKS, threads=threads, **given, **more)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_mean_of_what_the_parts_merge(
    pool: tuple[Any, Any], case: str, share: float
) -> None:
    parts, *options = CASES[case]
    first, second = (
        run(part, *pool, blocks=BLOCKS, weight=WEIGHTS, **given)
        for part, given in zip(parts, options, strict=True)
    )
    found = blended(pool, case, threads=3, share=share, weight=WEIGHTS)
    for name in SHAPES:
        wanted = share * first[name].astype(np.float64) + (1 - share) * second[name]
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=3e-6)


def test_threads_change_no_bit(pool: tuple[Any, Any]) -> None:
    one, four = (blended(pool, "passes over a tensor", threads) for threads in (1, 4))
    assert all((one[name] == four[name]).all() for name in SHAPES)


def test_common_weights_multiply_those_of_the_parts(pool: tuple[Any, Any]) -> None:
    own = {"tsv.weight": (0.5, 1.0, 1.0), "iso_c.weight": (1.0, 1.0, 2.0)}
    found = blended(pool, "two that solve", weight=(2.0, 0.5, 1.0), **own)
    first = run("tsv", *pool, blocks=BLOCKS, weight=(1.0, 0.5, 1.0), **{"lambda": 1.3})
    second = run("iso_c", *pool, blocks=BLOCKS, weight=(2.0, 0.5, 2.0), **{"lambda": 0.7})
    for name in SHAPES:
        np.testing.assert_allclose(found[name], (first[name] + second[name]) / 2, atol=3e-6)


def test_it_needs_what_its_parts_need() -> None:
    assert operator("blend", ("tsv", "regmean")).needs == "features"
    assert operator("blend", ("tsv", "ties")).needs == ""
    assert operator("blend", ("ties", "slerp")).most == operator("slerp").most == 1


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (("tsv", "tsv"), "two different operators"),
        (("tsv", "blend"), "cannot stand on blend"),
        (("lines", "tsv"), "lines cannot be a part"),
        (("tsv",), "stands on 2, not on 1"),
        (("fisher", "regmean"), "different things of the exemplars"),
    ],
)
def test_parts_that_cannot_be_blended_are_refused(parts: tuple[str, ...], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        operator("blend", parts)


def test_options_have_the_name_of_their_part_before_them() -> None:
    chosen = operator("blend", ("tsv", "regmean"))
    assert isinstance(chosen, Blend)
    names = [each.name for each in chosen.parameters]
    assert {"weight", "share", "outside", "tsv.lambda", "regmean.off_diagonal"} <= set(names)
    assert len(names) == len(set(names))
