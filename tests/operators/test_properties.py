"""Properties that hold for all task vectors. Values are small dyadic numbers: float32 is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.core import select
from sigmerge.operators.ties import Inside
from tests.operators.driver import run, run_vectors
from tests.oracles import oracle_operators as oracle

quick = settings(max_examples=40, deadline=None)
entry = st.integers(-16, 16).map(lambda i: i / 4)
dyadic = st.integers(1, 8).map(lambda i: i / 8)


@st.composite
def vectors(draw: Any, low: int = 1, high: int = 4, zeros: bool = True) -> list[list[float]]:
    size, experts = draw(st.integers(1, 40)), draw(st.integers(low, high))
    value = entry if zeros else entry.filter(bool)
    return [draw(st.lists(value, min_size=size, max_size=size)) for _ in range(experts)]


def flat(rows: list[list[float]]) -> oracle.Vectors:
    return [np.array(row) for row in rows]


@quick
@given(vectors(high=1), dyadic)
def test_one_expert_of_full_density_is_task_arithmetic(rows: list[list[float]], w: float) -> None:
    plain = run_vectors("task_arithmetic", rows, weight=w)
    for method in ("dare_linear", "dare_ties"):
        np.testing.assert_array_equal(run_vectors(method, rows, weight=w), plain)
    summed = run_vectors("ties", rows, weight=w, normalize=False)
    np.testing.assert_array_equal(summed, plain)
    np.testing.assert_array_equal(run_vectors("ties", rows, weight=w), rows[0])


@quick
@given(vectors(low=2), st.randoms())
def test_the_order_of_experts_does_not_matter(rows: list[list[float]], random: Any) -> None:
    names = [f"e{i}" for i in range(len(rows))]
    order = names[:]
    random.shuffle(order)
    reference = {"t": np.zeros(len(rows[0]), np.float32)}
    experts = {n: {"t": np.array(r, np.float32)} for n, r in zip(names, rows, strict=True)}
    shuffled = {name: experts[name] for name in order}
    weight = {name: (i + 1) / 4 for i, name in enumerate(names)}
    options: dict[str, dict[str, Any]] = {
        "linear": {"normalize": False},
        "task_arithmetic": {},
        "ties": {"density": 0.5},
        "dare_linear": {"density": 0.5, "rescale": "inverse"},
        "dare_ties": {"density": 0.5, "rescale": "inverse"},
    }
    for method, given_ in options.items():
        one = run(method, reference, experts, weight=[weight[n] for n in names], **given_)
        two = run(method, reference, shuffled, weight=[weight[n] for n in order], **given_)
        np.testing.assert_array_equal(one["t"], two["t"], err_msg=method)


@quick
@given(vectors(low=2, high=4))
def test_soup_is_task_arithmetic_with_one_over_k(rows: list[list[float]]) -> None:
    soup = run_vectors("linear", rows)
    plain = run_vectors("task_arithmetic", rows, weight=1 / len(rows))
    np.testing.assert_allclose(soup, plain, rtol=1e-6, atol=1e-6)


@quick
@given(vectors(), st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.7, 0.99, 1.0]))
def test_ties_keeps_exactly_k_entries_of_a_tensor(rows: list[list[float]], density: float) -> None:
    for row in rows:
        shown = run_vectors("ties", [row], density=density)
        wanted = oracle.trim_tensor(np.array(row), density)
        np.testing.assert_array_equal(shown, wanted)
        nonzero = np.count_nonzero(row)
        assert np.count_nonzero(shown) == min(nonzero, oracle.kept(density, len(row)))


@quick
@given(
    st.lists(st.lists(entry, min_size=1, max_size=20), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
)
def test_ties_threshold_over_the_model_is_exact(parts: list[list[float]], density: float) -> None:
    tensors = {f"t{i}": np.array(part, np.float32) for i, part in enumerate(parts)}
    zero = {name: np.zeros_like(values) for name, values in tensors.items()}
    shown = run("ties", zero, {"e": tensors}, density=density, scope="model")
    wanted = oracle.trim_model({n: v.astype(np.float64) for n, v in tensors.items()}, density)
    for name, values in shown.items():
        np.testing.assert_array_equal(values, wanted[name])


@quick
@given(vectors(low=2), st.booleans(), st.booleans(), st.data())
def test_ties_elects_as_defined(
    rows: list[list[float]], weighted: bool, normalize: bool, data: Any
) -> None:
    weights = [data.draw(dyadic) for _ in rows]
    elect = "weighted" if weighted else "unweighted"
    shown = run_vectors("ties", rows, weight=weights, elect=elect, normalize=normalize)
    wanted = oracle.elect_and_merge(flat(rows), weights, weighted, normalize)
    np.testing.assert_allclose(shown, wanted, rtol=2e-7, atol=0)


few = st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0])
"""Values of which many sums cancel exactly."""


@quick
@given(
    st.lists(
        st.tuples(st.integers(1, 12)).flatmap(
            lambda size: st.lists(
                st.lists(few, min_size=size[0], max_size=size[0]), min_size=3, max_size=3
            )
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["weighted", "unweighted"]),
    st.sampled_from(["tensor", "model"]),
    st.booleans(),
)
def test_cancelled_entries_take_the_majority_of_the_whole_model(
    tensors: list[list[list[float]]], elect: str, scope: str, normalize: bool
) -> None:
    weights = [1.0, 0.5, 0.25]
    names = [f"t{i}" for i in range(len(tensors))]
    experts = {
        f"e{k}": {n: np.array(t[k], np.float32) for n, t in zip(names, tensors, strict=True)}
        for k in range(3)
    }
    zero = {n: np.zeros(len(t[0]), np.float32) for n, t in zip(names, tensors, strict=True)}
    whole = [flat(t) for t in tensors]
    weighted = elect == "weighted"
    sign = oracle.majority(whole, weights, weighted)
    options = {"weight": weights, "elect": elect, "normalize": normalize, "cancelled": "majority"}
    for method, more in {"ties": {"scope": scope}, "dare_ties": {}}.items():
        merged = run(method, zero, experts, **options, **more)
        for name, each in zip(names, whole, strict=True):
            wanted = oracle.elect_and_merge(each, weights, weighted, normalize, cancelled=sign)
            np.testing.assert_allclose(merged[name], wanted, rtol=2e-7, atol=0)


@quick
@given(vectors(zeros=False), st.integers(1, 8), st.data())
def test_cabs_masks_are_disjoint_and_of_exact_density(
    rows: list[list[float]], m: int, data: Any
) -> None:
    experts = len(rows)
    m = max(m, experts)
    n = data.draw(st.integers(1, m // experts))
    alone = [
        run_vectors("cabs", rows, weight=_one_hot(experts, k), n=n, m=m) for k in range(experts)
    ]
    masks = [values != 0 for values in alone]
    assert (np.sum(masks, axis=0) <= 1).all()
    whole = len(rows[0]) // m
    for mask in masks:
        assert (mask[: whole * m].reshape(whole, m).sum(axis=1) == n).all()
        assert not mask[whole * m :].any()
    merged = run_vectors("cabs", rows, n=n, m=m).astype(np.float64)
    assert merged @ merged == sum(float(a.astype(np.float64) @ a) for a in alone)
    for mask, wanted in zip(masks, oracle.cabs_masks(flat(rows), n, m), strict=True):
        np.testing.assert_array_equal(mask, wanted)


def _one_hot(experts: int, k: int) -> list[float]:
    return [1.0 if d == k else 0.0 for d in range(experts)]


@quick
@given(vectors(), st.integers(1, 8), st.data())
def test_cabs_fill_as_defined(rows: list[list[float]], m: int, data: Any) -> None:
    n = data.draw(st.integers(1, m))
    weights = [data.draw(dyadic) for _ in rows]
    shown = run_vectors("cabs", rows, weight=weights, n=n, m=m, overlap="fill")
    wanted = oracle.cabs(flat(rows), weights, n, m, fill=True)
    np.testing.assert_allclose(shown, wanted, rtol=2e-7, atol=0)


@quick
@given(vectors(high=1, zeros=False), st.integers(1, 6))
def test_swapping_identical_cabs_experts_changes_nothing(rows: list[list[float]], n: int) -> None:
    twins = [rows[0], rows[0]]
    one = run_vectors("cabs", twins, weight=[1.0, 0.5], n=n, m=2 * n)
    two = run_vectors("cabs", twins, weight=[0.5, 1.0], n=n, m=2 * n)
    np.testing.assert_array_equal(one != 0, two != 0)


@quick
@given(vectors(), st.integers(0, 2**40), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_dare_masks_are_the_oracles(rows: list[list[float]], seed: int, density: float) -> None:
    options: dict[str, Any] = {"rescale": "none", "density": density, "seed": seed}
    shown = run_vectors("dare_linear", rows, **options)
    masks = [
        oracle.dare_mask(seed, chr(ord("A") + k), "t", len(row), density)
        for k, row in enumerate(rows)
    ]
    wanted = sum(np.where(mask, row, 0) for mask, row in zip(masks, flat(rows), strict=True))
    np.testing.assert_array_equal(shown, wanted)


@quick
@given(vectors(), dyadic)
def test_lines_with_beta_zero_is_the_inner_operator_scaled(
    rows: list[list[float]], alpha: float
) -> None:
    for inner in ("task_arithmetic", "ties", "dare_linear"):
        scaled = run_vectors("lines", rows, on=inner, alpha=alpha, beta=0.0)
        np.testing.assert_allclose(
            scaled, alpha * run_vectors(inner, rows).astype(np.float64), rtol=2e-7
        )


def test_a_rank_outside_a_range_has_no_cut() -> None:
    counts = np.array([[1, 4], [2, 3], [0, 0]], np.uint32)
    some = Inside(select.range_of(0, 0), [0], [counts], 0)
    assert [some.cut(rank)[1] for rank in (1, 3, 4, 5)] == [(4, 1), (4, 3), (1, 1), (1, 2)]
    assert [some.cut(rank) for rank in (-1, 0, 6)] == [(0, None, 0)] * 3
    assert some._replace(chunks=[]).cut(1) == (0, None, 0)
