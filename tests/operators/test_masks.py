"""Consensus TA and localize-and-stitch against plain loops, and worked examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.operators.driver import run, run_vectors
from tests.oracles import oracle_matrices as oracle

WEIGHTS = (0.5, 0.75, 1.0)
SIZES = {"embed": 301, "layers.0.w": 1024, "layers.1.w": 530}


@pytest.fixture(scope="module")
def pool() -> tuple[Any, Any]:
    """Values of few bits, so that magnitudes tie and sums are exact."""
    rng = np.random.default_rng(5)
    reference = {n: rng.integers(-64, 64, s).astype(np.float32) / 64 for n, s in SIZES.items()}
    experts = {
        name: {n: v + rng.integers(-40, 40, v.size).astype(np.float32) / 1024
               for n, v in reference.items()}
        for name in ("math", "coding", "safety")
    }  # fmt: skip
    return reference, experts


def vectors(pool: tuple[Any, Any], name: str) -> list[Any]:
    return [expert[name] - pool[0][name] for expert in pool[1].values()]


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("agree", [0, 1, 2, 3, 4])
def test_consensus(pool: tuple[Any, Any], share: float, agree: int) -> None:
    """No experts needed: task arithmetic; more than there are: the reference."""
    given: dict[str, Any] = {"share": share, "agree": agree, "lambda": 0.5}
    merged = run("consensus", *pool, weight=WEIGHTS, **given)
    for name, values in merged.items():
        weighted = [w * v for w, v in zip(WEIGHTS, vectors(pool, name), strict=True)]
        wanted = 0.5 * oracle.consensus(weighted, share, agree)
        np.testing.assert_array_equal(values, pool[0][name] + wanted.astype(np.float32))


def test_consensus_by_hand() -> None:
    """Needed by both, by one, by none: each cancels most of what the other says."""
    found = run_vectors("consensus", [[2, 4, 1], [2, 1, -1]], share=0.5, **{"lambda": 1.0})
    np.testing.assert_array_equal(found, [4, 0, 0])
    one = run_vectors("consensus", [[2, 4, 1], [2, 1, -1]], share=0.5, agree=1, **{"lambda": 1.0})
    np.testing.assert_array_equal(one, [4, 5, 0])


@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_localize_stitch(pool: tuple[Any, Any], scope: str, density: float) -> None:
    every = {name: vectors(pool, name) for name in SIZES}
    if scope == "model":
        wanted = oracle.localize_stitch(every, density)
    else:
        wanted = {n: oracle.localize_stitch({n: v}, density)[n] for n, v in every.items()}
    merged = run("localize_stitch", *pool, density=density, scope=scope, **{"lambda": 0.5})
    for name, values in merged.items():
        np.testing.assert_allclose(values, pool[0][name] + 0.5 * wanted[name], atol=1e-7)


def test_localize_stitch_averages_where_masks_overlap() -> None:
    found = run_vectors("localize_stitch", [[4, 3, 0, 0], [2, 0, 5, 1]], density=0.5)
    np.testing.assert_array_equal(found, [3, 3, 5, 0])
    halved = run_vectors("localize_stitch", [[4, 3, 0, 0], [2, 0, 5, 1]], density=0.5,
                         weight=[0.5, 1.0])  # fmt: skip
    np.testing.assert_array_equal(halved, [2, 1.5, 5, 0])
    none = run_vectors("localize_stitch", [[4, 3, 0, 0], [2, 0, 5, 1]], density=[0.5, 0.0])
    np.testing.assert_array_equal(none, [4, 3, 0, 0])
