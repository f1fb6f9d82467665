"""Operators on whole matrices against full decompositions and plain loops."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sigmerge.core.algebra import PROCESSOR, ProcessorAlgebra
from sigmerge.operators.base import Site
from sigmerge.operators.matrices import SPECTRUM, MatrixOperator, factors, orthonormal
from sigmerge.operators.table import OPERATORS, operator
from tests.operators.driver import run, settings_of
from tests.oracles import oracle_matrices as oracle

Array = np.ndarray[Any, Any]

WEIGHTS = (1.0, 0.7, 1.4)
SHAPES = {
    "embed": (20, 8),
    "layers.0.q.weight": (12, 8),
    "layers.0.experts": (3, 9, 12),
    "layers.0.norm.weight": (8,),
    "layers.1.down.weight": (8, 20),
}
BLOCKS = {name: int(name[7]) for name in SHAPES if name.startswith("layers")}
MATRICES = [name for name in BLOCKS if len(SHAPES[name]) > 1]
CASES: dict[str, tuple[dict[str, Any], Callable[[list[Array]], Array]]] = {
    "iso_c": ({"lambda": 1.3}, lambda d: 1.3 * oracle.iso_c(d)),
    "boost": ({"lambda": 0.5, "beta": 0.3}, lambda d: 0.5 * oracle.boost(d, 0.3)),
    "tsv": ({"lambda": 1.5}, lambda d: 1.5 * oracle.tsv(unweighted(d), WEIGHTS)),
    "iso_cts": ({"common": 0.6, "lambda": 1.1}, lambda d: 1.1 * oracle.iso_cts(d, 0.6)),
    "wudi": (
        {"step": "absolute", "steps": 40, "rate": 1e-3, "lambda": 0.9},
        lambda d: 0.9 * oracle.wudi(d, 40, 1e-3),
    ),
    "knots": ({"density": 0.4, "lambda": 1.2}, lambda d: 1.2 * oracle.knots_ties(d, 0.4)),
    "regmean": (
        {"gram": "task_vector", "off_diagonal": 0.8, "ridge": 0.2, "lambda": 1.2},
        lambda d: 1.2 * oracle.regmean_of_vectors(d, 0.8, 0.2),
    ),
    "pcb": ({"density": 0.3, "lambda": 1.2}, lambda d: 1.2 * oracle.pcb(d, 0.3)),
}


def unweighted(deltas: list[Array]) -> list[Array]:
    return [delta / weight for delta, weight in zip(deltas, WEIGHTS, strict=True)]


def made(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    reference = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    experts = {
        name: {n: v + (0.1 * rng.standard_normal(v.shape)).astype(np.float32)
               for n, v in reference.items()}
        for name in ("math", "coding", "safety")
    }  # fmt: skip
    return reference, experts


@pytest.fixture(scope="module")
def pool() -> tuple[Any, Any]:
    return made(SHAPES)


def weighted(pool: tuple[Any, Any], name: str, weights: tuple[float, ...] = WEIGHTS) -> list[Array]:
    reference, experts = pool
    return [
        weight * (expert[name] - reference[name]).astype(np.float64)
        for expert, weight in zip(experts.values(), weights, strict=True)
    ]


def taus(pool: tuple[Any, Any], method: str, **given: Any) -> dict[str, Array]:
    """The merged task vectors, in the shapes of their tensors."""
    merged = run(method, *pool, blocks=BLOCKS, **given)
    return {n: merged[n].reshape(s) - pool[0][n].astype(np.float64) for n, s in SHAPES.items()}


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_against_full_decompositions(pool: tuple[Any, Any], method: str, threads: int) -> None:
    given, wanted = CASES[method]
    found = taus(pool, method, weight=WEIGHTS, threads=threads, rest=0.25, **given)
    for name in SHAPES:
        deltas = weighted(pool, name)
        if name not in MATRICES:
            expected = 0.25 * np.sum(deltas, axis=0)
        elif len(SHAPES[name]) == 3:
            expected = np.stack([wanted([d[i] for d in deltas]) for i in range(SHAPES[name][0])])
        else:
            expected = wanted(deltas)
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6)


def test_every_operator_on_matrices_has_its_oracle() -> None:
    given = {"gram": "task_vector"}
    every = {name: operator(name).with_parameters(given) for name in OPERATORS}
    solving = {name for name, chosen in every.items() if isinstance(chosen, MatrixOperator)}
    assert solving == set(CASES)


@pytest.mark.parametrize("method", CASES)
def test_an_expert_alone_of_weight_zero_leaves_the_reference(
    pool: tuple[Any, Any], method: str
) -> None:
    found = taus(pool, method, weight=0.0, **CASES[method][0])
    for name, tau in found.items():
        np.testing.assert_allclose(tau, 0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("method", ["iso_c", "iso_cts", "boost", "tsv", "wudi", "knots"])
def test_the_result_scales_with_the_weights(pool: tuple[Any, Any], method: str) -> None:
    once, twice = (taus(pool, method, weight=w, rest=1.0) for w in (1.0, 2.0))
    for name, tau in once.items():
        np.testing.assert_allclose(twice[name], 2 * tau, rtol=0, atol=3e-6)


def test_wudi_as_published_does_not_scale(pool: tuple[Any, Any]) -> None:
    """Else the test above would show nothing about its step."""
    once, twice = (
        taus(pool, "wudi", weight=w, step="absolute", rate=1e-3)["layers.0.q.weight"]
        for w in (1.0, 2.0)
    )
    assert abs(twice - 2 * once).max() > 0.01


def test_wudi_steps_of_the_root_mean_square_are_adam_s_on_unit_task_vectors(
    pool: tuple[Any, Any],
) -> None:
    name = "layers.1.down.weight"
    deltas = weighted(pool, name)
    rms = np.sqrt(np.mean(np.square(deltas)))
    wanted = rms * oracle.wudi([d / rms for d in deltas], 60, 1 / 30)
    found = taus(pool, "wudi", weight=WEIGHTS, steps=60)
    np.testing.assert_allclose(found[name], wanted, atol=1e-6)


def test_wudi_keeps_the_sum_without_steps_and_one_expert_as_it_is(pool: tuple[Any, Any]) -> None:
    found = taus(pool, "wudi", steps=0)
    alone = (pool[0], {"math": pool[1]["math"]})
    for name in MATRICES:
        total = np.sum(weighted(pool, name, (1, 1, 1)), axis=0)
        np.testing.assert_allclose(found[name], total, atol=1e-6)
        delta = pool[1]["math"][name] - pool[0][name].astype(np.float64)
        np.testing.assert_allclose(taus(alone, "wudi")[name], delta, atol=1e-6)


def test_tsv_is_linear_in_the_weights(pool: tuple[Any, Any]) -> None:
    each = [taus(pool, "tsv", weight=tuple(row)) for row in np.eye(3)]
    mixed = taus(pool, "tsv", weight=WEIGHTS)
    for name in SHAPES:
        wanted = sum(w * tau[name] for w, tau in zip(WEIGHTS, each, strict=True))
        np.testing.assert_allclose(mixed[name], wanted, atol=1e-6)


def test_tsv_of_task_vectors_that_share_no_direction_is_their_sum() -> None:
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((n, 6)))[0] for n in (9, 7))
    deltas = [(left[:, i : i + 2] * (3, 2)) @ right[:, i : i + 2].T for i in (0, 2, 4)]
    experts = {str(i): {"w": d.astype(np.float32)} for i, d in enumerate(deltas)}
    reference = {"w": np.zeros((9, 7), np.float32)}
    found = run("tsv", reference, experts, blocks={"w": 0})["w"]
    np.testing.assert_allclose(found.reshape(9, 7), np.sum(deltas, axis=0), atol=1e-6)


def low_rank(shape: tuple[int, int], rank: int) -> list[Array]:
    rng = np.random.default_rng(1)
    return [
        (rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))).astype(
            np.float32
        )
        for _ in range(3)
    ]


@pytest.mark.parametrize("method", ["iso_c", "boost", "iso_cts", "tsv", "knots"])
def test_directions_that_no_expert_moves_stay_at_the_reference(method: str) -> None:
    """Where a full decomposition would give arbitrary singular vectors."""
    deltas = low_rank((40, 30), 2)
    experts = {str(i): {"w": d} for i, d in enumerate(deltas)}
    reference = {"w": np.zeros((40, 30), np.float32)}
    tau = run(method, reference, experts, blocks={"w": 0})["w"].reshape(40, 30)
    rows = np.linalg.svd(np.vstack(deltas))[2][6:]
    assert abs(tau).max() > 0.1
    if method != "knots":  # which trims entries, not directions, of the inputs
        np.testing.assert_allclose(tau @ rows.T, 0, atol=2e-5)
    columns = np.linalg.svd(np.hstack(deltas))[0][:, 6:]
    np.testing.assert_allclose(columns.T @ tau, 0, atol=2e-5)


def test_iso_c_has_one_singular_value_and_the_mean_counts_zeros() -> None:
    deltas = low_rank((40, 30), 2)
    experts = {str(i): {"w": d} for i, d in enumerate(deltas)}
    notes: dict[str, Any] = {}
    tau = run("iso_c", {"w": np.zeros((40, 30), np.float32)}, experts, blocks={"w": 0},
              notes=notes, **{"lambda": 1.0})["w"]  # fmt: skip
    values = np.linalg.svd(tau.reshape(40, 30), compute_uv=False)
    total = np.linalg.svd(np.sum(deltas, axis=0, dtype=np.float64), compute_uv=False)
    np.testing.assert_allclose(values, [total.sum() / 30] * 6 + [0] * 24, rtol=1e-5, atol=1e-5)
    assert notes["w"] == {"rank": 6}


@pytest.mark.parametrize("decades", [2, 4, 5])
@pytest.mark.parametrize("shape", [(30, 20), (20, 30)])
def test_singular_vectors_from_a_gram_are_true_to_what_the_docstring_says(
    decades: int, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(2)
    side = min(shape)
    u, v = (np.linalg.qr(rng.standard_normal((n, side)))[0] for n in shape)
    values = np.logspace(0, -decades, side)
    found = factors((u * values) @ v.T, 1e-6, PROCESSOR)
    np.testing.assert_allclose(found.values[::-1], values, rtol=1e-15 * 10 ** (2 * decades))
    np.testing.assert_allclose(
        found.left @ found.right.T, u @ v.T, atol=1e-14 * 10 ** (2 * decades)
    )


def test_the_polar_factor_is_the_nearest_orthonormal_matrix() -> None:
    matrix = np.random.default_rng(0).standard_normal((9, 5))
    found = orthonormal(matrix, 1e-6, PROCESSOR)
    np.testing.assert_allclose(found, oracle.polar(matrix), atol=1e-12)


def test_knots_dare_keeps_the_density_and_the_sum_in_the_mean() -> None:
    reference, experts = made({"layers.0.w": (60, 50)})
    blocks = {"layers.0.w": 0}
    total = sum(e["layers.0.w"] - reference["layers.0.w"] for e in experts.values())
    draws = [
        run("knots", reference, experts, blocks=blocks, seed=seed, inner="dare", density=0.5)
        for seed in range(40)
    ]
    each = [d["layers.0.w"].reshape(60, 50) - reference["layers.0.w"] for d in draws]
    np.testing.assert_array_equal(
        draws[1]["layers.0.w"],
        run("knots", reference, experts, blocks=blocks, seed=1, inner="dare", density=0.5)[
            "layers.0.w"
        ],
    )
    assert (draws[0]["layers.0.w"] != draws[1]["layers.0.w"]).any()
    error = np.mean(each, axis=0) - total
    assert np.sqrt((error**2).mean()) == pytest.approx(0.1 * np.sqrt(3 / 40), rel=0.1)
    whole = run("knots", reference, experts, blocks=blocks, inner="dare", density=1.0)
    np.testing.assert_allclose(
        whole["layers.0.w"].reshape(60, 50), reference["layers.0.w"] + total, atol=2e-6
    )


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("shape", [(96, 320), (320, 96), (200, 200)])
def test_memory_stays_within_the_bound(method: str, shape: tuple[int, int]) -> None:
    reference, experts = made({"layers.0.w": shape})
    given, names, size = CASES[method][0], tuple(experts), shape[0] * shape[1]
    chosen = operator(method).with_parameters(given)
    assert isinstance(chosen, MatrixOperator)
    settings = settings_of(chosen, len(names), "mergekit", given)
    site = Site("layers.0.w", size, 0, 1, names, settings, 0, shape)
    rows = np.stack([
        (e["layers.0.w"] - reference["layers.0.w"]).ravel() for e in experts.values()
    ])  # fmt: skip
    tracemalloc.start()
    try:
        chosen._solved(rows, site, PROCESSOR)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak + rows.nbytes <= chosen.scratch(site)


def test_regmean_of_task_vectors_is_where_the_descent_of_wudi_ends(pool: tuple[Any, Any]) -> None:
    """Its closed form: the minimum itself, which many small steps come close to."""
    name = "layers.0.q.weight"
    closed = taus(pool, "regmean", gram="task_vector", off_diagonal=1.0)[name]
    descended = taus(pool, "wudi", steps=4000, rate=0.003)[name]
    begun = np.sum(weighted(pool, name, (1, 1, 1)), axis=0)
    assert abs(descended - closed).max() < 0.01 * abs(begun - closed).max()


def test_regmean_of_one_task_vector_is_that_task_vector(pool: tuple[Any, Any]) -> None:
    alone = (pool[0], {"math": pool[1]["math"]})
    found = taus(alone, "regmean", gram="task_vector", rest=1.0)
    for name in SHAPES:
        delta = pool[1]["math"][name] - pool[0][name].astype(np.float64)
        np.testing.assert_allclose(found[name], delta, atol=1e-6)


class Counted(np.ndarray[Any, Any]):
    """An array that counts the operations of its products."""

    done = 0.0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(each) for each in inputs]
        if ufunc is np.matmul:
            Counted.done += 2 * plain[0].shape[0] * plain[0].shape[1] * plain[1].shape[1]
        if "out" in kwargs:
            kwargs["out"] = tuple(np.asarray(each) for each in kwargs["out"])
            getattr(ufunc, method)(*plain, **kwargs)
            return inputs[0]
        return np.asarray(getattr(ufunc, method)(*plain, **kwargs)).view(Counted)


class Counting(ProcessorAlgebra):
    """Its matrices count, and its decompositions as many as the operators say."""

    def matrix(self, values: Array) -> Any:
        return super().matrix(values).view(Counted)

    def zeros(self, *shape: int) -> Any:
        return super().zeros(*shape).view(Counted)

    def eigh(self, matrix: Any) -> Any:
        Counted.done += SPECTRUM * len(matrix) ** 3
        return tuple(each.view(Counted) for each in super().eigh(np.asarray(matrix)))

    def array(self, matrix: Any) -> Array:
        return np.asarray(matrix)

    def cholesky(self, matrix: Any) -> Any:
        Counted.done += len(matrix) ** 3 / 3
        return super().cholesky(np.asarray(matrix))

    def solved(self, factor: Any, rhs: Any) -> Any:
        Counted.done += 2 * len(rhs) * len(factor) ** 2
        return super().solved(factor, np.asarray(rhs)).view(Counted)


@pytest.mark.parametrize("method", sorted({*CASES} - {"pcb"}))
@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
def test_operations_are_those_that_are_done(method: str, shape: tuple[int, int]) -> None:
    given = CASES[method][0]
    chosen = operator(method).with_parameters(given)
    assert isinstance(chosen, MatrixOperator)
    settings = settings_of(chosen, 3, "mergekit", given)
    site = Site("layers.0.w", shape[0] * shape[1], 0, 1, ("a", "b", "c"), settings, 0, shape)
    rows = np.random.default_rng(0).standard_normal((3, site.size)).astype(np.float32)
    Counted.done = 0.0
    chosen._solved(rows, site, Counting())
    assert chosen.operations(site) == pytest.approx(Counted.done, rel=0.02)
