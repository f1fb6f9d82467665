"""Operators against the float64 oracles, over their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.operators.driver import run
from tests.oracles import oracle_operators as oracle

# Dyadic where a sign is elected: a sum that cancels does so in float32 and float64 alike.
WEIGHTS = (0.5, 0.75, -0.3125)
POSITIVE = (0.5, 0.75, 0.3125)
DENSITIES = (0.2, 0.55, 0.9)
KEPT = (0.25, 0.5, 0.125)
SIZES = {"embed": 301, "layers.0.b": 7, "layers.0.w": 1024, "layers.1.w": 530, "norm": 1}
BLOCKS = {"layers.0.b": 0, "layers.0.w": 0, "layers.1.w": 1}
SEED = 7


def bf16(values: Any) -> Any:
    """Rounded down to bfloat16, so that task vectors tie as they do in real checkpoints."""
    bits = np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


@pytest.fixture(scope="module")
def pool() -> tuple[Any, Any]:
    rng = np.random.default_rng(11)
    reference = {n: bf16(rng.standard_normal(s)) for n, s in SIZES.items()}
    experts = {
        name: {n: bf16(v + 0.05 * rng.standard_normal(v.size)) for n, v in reference.items()}
        for name in ("math", "coding", "safety")
    }
    return reference, experts


Merged = dict[str, Any]


def vectors(pool: tuple[Any, Any], name: str) -> oracle.Vectors:
    reference, experts = pool
    return oracle.task_vectors(reference[name], [e[name] for e in experts.values()])


def check(pool: tuple[Any, Any], merged: Merged, wanted: Callable[[str], Any]) -> None:
    """`wanted` gives the merged task vector in float64."""
    for name, values in merged.items():
        reference = pool[0][name].astype(np.float64)
        np.testing.assert_allclose(values, reference + wanted(name), rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("normalize", [True, False])
def test_linear(pool: tuple[Any, Any], normalize: bool) -> None:
    merged = run("linear", *pool, weight=WEIGHTS, normalize=normalize)
    for name, values in merged.items():
        wanted = oracle.linear([e[name] for e in pool[1].values()], WEIGHTS, normalize)
        np.testing.assert_allclose(values, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_task_arithmetic(pool: tuple[Any, Any], normalize: bool, scale: float) -> None:
    options: dict[str, Any] = {"normalize": normalize, "lambda": scale}
    merged = run("task_arithmetic", *pool, weight=WEIGHTS, **options)
    check(
        pool,
        merged,
        lambda n: oracle.task_arithmetic(vectors(pool, n), WEIGHTS, scale, normalize),
    )


@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("elect", ["weighted", "unweighted"])
@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_ties(pool: tuple[Any, Any], scope: str, elect: str, normalize: bool, scale: float) -> None:
    options: dict[str, Any] = {"normalize": normalize, "lambda": scale, "elect": elect}
    merged = run("ties", *pool, weight=POSITIVE, density=DENSITIES, scope=scope, **options)
    trimmed = ties_trimmed(pool, scope)
    check(
        pool,
        merged,
        lambda n: oracle.elect_and_merge(
            trimmed[n], POSITIVE, elect == "weighted", normalize, scale
        ),
    )


def ties_trimmed(pool: tuple[Any, Any], scope: str) -> dict[str, oracle.Vectors]:
    whole = {n: vectors(pool, n) for n in SIZES}
    if scope == "tensor":
        return {
            n: [oracle.trim_tensor(v, d) for v, d in zip(vs, DENSITIES, strict=True)]
            for n, vs in whole.items()
        }
    per_expert = [
        oracle.trim_model({n: whole[n][k] for n in SIZES}, d) for k, d in enumerate(DENSITIES)
    ]
    return {n: [expert[n] for expert in per_expert] for n in SIZES}


def test_scopes_differ_on_this_pool(pool: tuple[Any, Any]) -> None:
    """The two thresholds are two methods; a test that could not tell them apart would be void."""
    by_tensor, by_model = ties_trimmed(pool, "tensor"), ties_trimmed(pool, "model")
    assert any(
        (a != b).any() for n in SIZES for a, b in zip(by_tensor[n], by_model[n], strict=True)
    )


def dropped(pool: tuple[Any, Any], name: str, rescale: str) -> oracle.Vectors:
    return [
        oracle.dare(v, oracle.dare_mask(SEED, expert, name, v.size, d), d, rescale)
        for v, expert, d in zip(vectors(pool, name), pool[1], KEPT, strict=True)
    ]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
def test_dare_linear(pool: tuple[Any, Any], rescale: str, normalize: bool) -> None:
    options: dict[str, Any] = {"rescale": rescale, "normalize": normalize, "lambda": 0.7}
    merged = run("dare_linear", *pool, weight=WEIGHTS, density=KEPT, seed=SEED, **options)
    check(
        pool,
        merged,
        lambda n: oracle.task_arithmetic(dropped(pool, n, rescale), WEIGHTS, 0.7, normalize),
    )


@pytest.mark.parametrize("elect", ["weighted", "unweighted"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
def test_dare_ties(pool: tuple[Any, Any], rescale: str, normalize: bool, elect: str) -> None:
    options: dict[str, Any] = {"rescale": rescale, "normalize": normalize, "elect": elect}
    merged = run("dare_ties", *pool, weight=POSITIVE, density=KEPT, seed=SEED, **options)
    check(
        pool,
        merged,
        lambda n: oracle.elect_and_merge(
            dropped(pool, n, rescale), POSITIVE, elect == "weighted", normalize
        ),
    )


@pytest.mark.parametrize(
    ("n", "m", "overlap"),
    [(2, 8, "error"), (85, 256, "error"), (1, 3, "error"), (5, 8, "fill"), (8, 8, "fill")],
)
def test_cabs(pool: tuple[Any, Any], n: int, m: int, overlap: str) -> None:
    merged = run("cabs", *pool, weight=WEIGHTS, n=n, m=m, overlap=overlap)
    fill = overlap == "fill"
    check(pool, merged, lambda name: oracle.cabs(vectors(pool, name), WEIGHTS, n, m, fill))


INNER: dict[str, dict[str, Any]] = {
    "linear": {"weight": POSITIVE},
    "task_arithmetic": {"weight": POSITIVE, "lambda": 0.5},
    "ties": {"weight": POSITIVE, "density": DENSITIES, "scope": "model"},
    "dare_linear": {"weight": POSITIVE, "density": DENSITIES},
    "dare_ties": {"weight": POSITIVE, "density": DENSITIES},
    "cabs": {"weight": POSITIVE, "n": 2, "m": 8},
}


@pytest.mark.parametrize(
    ("inner", "alpha"),
    [*((inner, 0.3) for inner in INNER), ("task_arithmetic", "auto")],
)
def test_lines_on_every_operator(pool: tuple[Any, Any], inner: str, alpha: Any) -> None:
    """The inner operator has its own oracle above; here its result is scaled by depth.

    The norm of "auto" is that of a result, whichever operator made it: one stands for all, since
    for each a loop would be compiled, for seconds.
    """
    merged = run(
        "lines", *pool, on=inner, blocks=BLOCKS, seed=SEED, alpha=alpha, beta=0.6, **INNER[inner]
    )
    plain = run(inner, *pool, blocks=BLOCKS, seed=SEED, **INNER[inner])
    taus = {n: values.astype(np.float64) - pool[0][n] for n, values in plain.items()}
    if alpha == "auto":
        alpha = oracle.lines_alpha({n: vectors(pool, n) for n in SIZES}, taus)
    for name, values in merged.items():
        factor = oracle.lines_factor(BLOCKS.get(name), 2, alpha, 0.6)
        np.testing.assert_allclose(
            values, pool[0][name] + factor * taus[name], rtol=1e-6, atol=1e-6
        )


def test_the_oracle_draws_the_published_philox_numbers() -> None:
    """Known answers of Random123's philox4x32-10."""
    assert oracle.philox_block(0, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**32 - 1
    assert oracle.philox_block(2**128 - 1, (ones, ones)) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
