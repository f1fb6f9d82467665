"""Fisher, RegMean, CAT and LOT: methods.md's worked examples, invariants, and dense oracles."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import numpy as np
import pytest

from sigmerge.checkpoints.statistics import packed
from sigmerge.core.algebra import ProcessorAlgebra
from sigmerge.engine import stream
from sigmerge.errors import PoolError
from sigmerge.operators import cat as cat_module
from sigmerge.operators.base import Site
from sigmerge.operators.features import peak_bytes
from sigmerge.operators.table import operator
from tests.operators.driver import run
from tests.oracles import oracle_features as oracle

Array = np.ndarray[Any, Any]


class Measured:
    """Statistics in memory: features (tokens × channels) or Fisher information, by expert."""

    def __init__(
        self,
        kinds: Mapping[str, str],
        data: Mapping[str, Mapping[str, Any]],
        turned: Collection[str] = (),
    ) -> None:
        self.kinds, self.data, self.turned = kinds, data, turned
        self.made: dict[Hashable, Any] = {}

    def measured(self, tensor: str) -> str:
        return self.kinds.get(tensor, "")

    def transposed(self, tensor: str) -> bool:
        return tensor in self.turned

    def triangle(self, expert: str, tensor: str) -> Array:
        x = np.asarray(self.data[expert][tensor], np.float64)
        return packed(x.T @ x)

    def energy(self, expert: str, tensor: str) -> Array:
        energy: Array = np.square(self.data[expert][tensor], dtype=np.float64).sum(axis=0)
        return energy

    def rows(self, expert: str, tensor: str) -> int:
        return len(self.data[expert][tensor])

    def fisher(self, expert: str, tensor: str, start: int, stop: int) -> Array:
        return np.asarray(self.data[expert][tensor], np.float32).ravel()[start:stop]

    def fisher_norm(self, expert: str) -> float:
        every = [np.asarray(v, np.float64).ravel() for v in self.data[expert].values()]
        return float(np.linalg.norm(np.concatenate(every)))

    def once(self, tensor: str, key: Hashable, make: Callable[[], Any]) -> Any:
        return self.made.setdefault((tensor, key), make())


def merged(
    method: str, kind: str, values: list[Any], data: list[Any], reference: Any = None, **given: Any
) -> Array:
    """One tensor "t" of experts A, B, …, measured as `kind`; with the shape of its values."""
    rows = [np.array(v, np.float32) for v in values]
    names = [chr(ord("A") + i) for i in range(len(rows))]
    base = np.zeros_like(rows[0]) if reference is None else np.array(reference, np.float32)
    statistics = Measured(
        {"t": kind}, {n: {"t": np.array(d, float)} for n, d in zip(names, data, strict=True)}
    )
    experts = {n: {"t": row + base} for n, row in zip(names, rows, strict=True)}
    return run(method, {"t": base}, experts, statistics=statistics, **given)["t"].reshape(
        base.shape
    )


@pytest.fixture(scope="module")
def pool() -> tuple[Any, Any, Measured]:
    """Three experts with two weights that share inputs, a norm scale, a bias and an embedding."""
    rng = np.random.default_rng(5)
    shapes = {"l.0.q.weight": (12, 8), "l.0.v.weight": (6, 8), "l.0.n.weight": (8,),
              "l.0.q.bias": (12,), "embed": (20, 8)}  # fmt: skip
    kinds = {"l.0.q.weight": "gram", "l.0.v.weight": "gram", "l.0.n.weight": "energy"}
    reference = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    experts, data = {}, {}
    for name, tokens in (("math", 30), ("coding", 40), ("safety", 21)):
        experts[name] = {
            n: v + (0.1 * rng.standard_normal(v.shape)).astype(np.float32)
            for n, v in reference.items()
        }
        x = rng.standard_normal((tokens, 8)) * rng.uniform(0.2, 3, 8)
        data[name] = {"l.0.q.weight": x, "l.0.v.weight": x, "l.0.n.weight": x}
    return reference, experts, Measured(kinds, data)


def exact(pool: tuple[Any, Any, Measured], name: str) -> tuple[Array, list[Array], list[Array]]:
    """Reference, task vectors and features of a tensor in float64."""
    reference, experts, statistics = pool
    base = reference[name].astype(np.float64)
    deltas = [(e[name] - reference[name]).astype(np.float64) for e in experts.values()]
    return base, deltas, [statistics.data[e].get(name) for e in experts]


# LOT (methods.md §4)


def test_lot_1_one_vector_without_drift() -> None:
    out = merged("lot", "gram", [[[1, 1]], [[0, 2]]], [[[1, 0]], [[1, 1]]])
    np.testing.assert_allclose(out, [[1, 1]], atol=1e-6)


def test_lot_2_unseen_directions_stay_at_the_reference_and_regmean_erases_them() -> None:
    vectors, features, base = [[[1, 7]], [[-1, 9]]], [[[2, 0]], [[1, 0]]], [[10, 20]]
    np.testing.assert_allclose(merged("lot", "gram", vectors, features), [[0.6, 0]], atol=1e-7)
    np.testing.assert_allclose(merged("lot", "gram", vectors, features, base), [[10.6, 20]], 1e-6)
    notes: dict[str, Any] = {}
    out = merged("regmean", "gram", vectors, features, base, off_diagonal=1.0, notes=notes)
    np.testing.assert_allclose(out, [[10.6, 0]], rtol=1e-6, atol=1e-6)
    assert notes["t"] == {"solver": "pinv", "condition": None, "rank": 1, "of": 2}


def test_lot_3_equals_regmean_where_all_directions_are_seen(pool: Any) -> None:
    reference, experts, statistics = pool
    equal = Measured(statistics.kinds, {
        n: {t: x[:21] for t, x in tensors.items()} for n, tensors in statistics.data.items()
    })  # fmt: skip
    lot = run("lot", reference, experts, statistics=equal)
    regmean = run("regmean", reference, experts, statistics=equal, off_diagonal=1.0)
    for name in ("l.0.q.weight", "l.0.v.weight"):
        np.testing.assert_allclose(lot[name], regmean[name], rtol=1e-5, atol=1e-6)


def test_lot_4_one_expert_orthogonal_features_identical_features_and_scales() -> None:
    rng = np.random.default_rng(0)
    delta, x = rng.standard_normal((3, 5)), rng.standard_normal((2, 5))
    out = merged("lot", "gram", [delta], [x])
    np.testing.assert_allclose(x @ out.T, x @ delta.T, atol=1e-5)
    other = rng.standard_normal((3, 5))
    axes = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    one, two = axes[:2], axes[2:4]
    out = merged("lot", "gram", [delta, other], [one, two])
    wanted = delta @ one.T @ one + other @ two.T @ two
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    full = rng.standard_normal((9, 5))
    out = merged("lot", "gram", [delta, other], [full, full])
    np.testing.assert_allclose(out, (delta + other) / 2, atol=1e-6)
    scale = merged("lot", "energy", [[1, 5], [-1, 5]], [[[2, 0]], [[1, 0]]])
    np.testing.assert_allclose(scale, [0.6, 0], atol=1e-7)


def test_lot_against_least_squares(pool: Any) -> None:
    reference, experts, statistics = pool
    notes: dict[str, Any] = {}
    out = run("lot", reference, experts, statistics=statistics, notes=notes, **{"lambda": 1.2})
    for name in ("l.0.q.weight", "l.0.v.weight"):
        base, deltas, features = exact(pool, name)
        wanted = base + 1.2 * oracle.lot(deltas, features)
        np.testing.assert_allclose(out[name], wanted.ravel(), rtol=2e-6, atol=2e-6)
        assert notes[name] == {"rank": 8, "of": 8}
    base, deltas, features = exact(pool, "l.0.n.weight")
    energy = np.array([np.square(x).sum(axis=0) for x in features])
    wanted = base + 1.2 * (energy * deltas).sum(axis=0) / energy.sum(axis=0)
    np.testing.assert_allclose(out["l.0.n.weight"], wanted, rtol=1e-6, atol=1e-6)
    for name in ("l.0.q.bias", "embed"):
        base, deltas, _ = exact(pool, name)
        wanted = base + 1.2 * np.mean(deltas, axis=0)
        np.testing.assert_allclose(out[name], wanted.ravel(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rtol", "kept"), [(1e-9, [3, 5, 7]), (1e-5, [3, 5, 0]), (0.1, [3, 0, 0])])
def test_lot_counts_as_seen_what_rtol_says(rtol: float, kept: list[float]) -> None:
    """Eigenvalues 1, 1e-4 and 1e-8 of the Gram."""
    out = merged("lot", "gram", [[[3, 5, 7]]], [np.diag([1, 1e-2, 1e-4])], rtol=rtol)
    np.testing.assert_allclose(out, [kept], atol=1e-5)


def test_lot_keeps_few_directions_of_a_deficient_gram() -> None:
    rng = np.random.default_rng(2)
    deltas = [rng.standard_normal((4, 40)) for _ in range(2)]
    features = [rng.standard_normal((5, 40)) * 1e3 ** rng.uniform(-1, 1, 40) for _ in range(2)]
    notes: dict[str, Any] = {}
    out = merged("lot", "gram", deltas, features, notes=notes)
    assert notes["t"] == {"rank": 10, "of": 40}
    np.testing.assert_allclose(out, oracle.lot(deltas, features), rtol=1e-3, atol=1e-4)


# CAT (methods.md §2)

X1, X2, T1, T2 = [[1, 0]], [[0, 1]], np.diag([1, 2]), np.diag([3, 1])
ONE: dict[str, Any] = {"rank": 1, "trade_off": 1.0, "lambda": 1.0}


def test_cat_1_trimmed_updates_cause_no_drift() -> None:
    notes: dict[str, Any] = {}
    out = merged("cat", "gram", [T1, T2], [X1, X2], notes=notes, **ONE)
    np.testing.assert_allclose(out, np.eye(2), atol=1e-7)
    assert notes["t"] == {"rank": {"A": 1, "B": 1}}
    out = merged("cat", "gram", [T1, T2], [X1, X2], renorm=True, **ONE)
    np.testing.assert_allclose(out, np.diag([5**0.5, 10**0.5]), rtol=1e-6)


def test_cat_2_without_rank_or_with_identical_features_it_is_task_arithmetic(pool: Any) -> None:
    plain = merged("cat", "gram", [T1, T2], [X1, X2], **{**ONE, "rank": 0})
    np.testing.assert_allclose(plain, np.diag([4, 3]))
    rng = np.random.default_rng(1)
    x, deltas = rng.standard_normal((9, 5)), [rng.standard_normal((4, 5)) for _ in range(3)]
    same = merged("cat", "gram", deltas, [x, x, x], rank=4, trade_off=1.5, **{"lambda": 1.0})
    np.testing.assert_allclose(same, np.sum(deltas, axis=0), rtol=1e-5, atol=1e-5)
    scale = merged("cat", "energy", [d[0] for d in deltas], [x, x, x], **{"lambda": 1.0})
    np.testing.assert_allclose(scale, np.sum([d[0] for d in deltas], axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", [1024, 4])
def test_cat_3_bases_are_orthonormal_and_trimming_is_idempotent(
    dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessorAlgebra, "dense", dense)
    rng = np.random.default_rng(3)
    deltas = rng.standard_normal((2, 30, 10))
    features = [rng.standard_normal((20, 10)) * s for s in (1.0, 0.6)]
    grams = [x.T @ x for x in features]
    bases = [cat_module.removal_basis(deltas, grams, k, 3, 0.3) for k in range(2)]
    trims = [cat_module._projection(basis) for basis in bases]
    once = deltas.copy()
    cat_module.trim_others(once, trims, renorm=False)
    for basis, other in zip(bases, once[::-1], strict=True):
        assert basis.shape == (30, 3)
        np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-10)
        np.testing.assert_allclose(basis.T @ other, 0, atol=1e-10)
    twice = once.copy()
    cat_module.trim_others(twice, trims, renorm=False)
    np.testing.assert_allclose(twice, once, atol=1e-12)


def test_cat_4_the_scale_example() -> None:
    rows = np.array([[0.0, 0.0], [1.0, 1.0]])
    seen = np.array([[4.0, 1.0], [1.0, 1.0]])
    scores = cat_module.scale_scores(rows, seen, 0, 1.0)
    np.testing.assert_allclose(scores, [3, 0])
    np.testing.assert_array_equal(cat_module.top_positive(scores, 1), [True, False])
    options: dict[str, Any] = {"norm_mask": 1, "norm_trade_off": 1.0, "lambda": 1.0}
    out = merged("cat", "energy", list(rows), [[[2, 1]], [[1, 1]]], **options)
    np.testing.assert_allclose(out, [0, 1])


def test_cat_masks_the_entries_of_a_bias_that_others_move_most() -> None:
    bias = [np.array([3.0, 1.0, 0.0], np.float32), np.array([0.0, 1.0, 5.0], np.float32)]
    experts = {n: {"x.bias": b} for n, b in zip("AB", bias, strict=True)}
    out = run("cat", {"x.bias": np.zeros(3, np.float32)}, experts, statistics=Measured({}, {}),
              bias_mask=1, **{"lambda": 1.0})  # fmt: skip
    np.testing.assert_allclose(out["x.bias"], [0, 2, 0])


@pytest.mark.parametrize("renorm", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dense", [1024, 4])
def test_cat_against_whole_spectra(
    pool: Any, renorm: bool, mean: bool, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessorAlgebra, "dense", dense)
    reference, experts, statistics = pool
    options: dict[str, Any] = {"rank": 2, "trade_off": 0.4, "renorm": renorm, "weight": (1, 2, 1),
                               "normalize_tokens": mean, "lambda": 0.4}  # fmt: skip
    out = run("cat", reference, experts, statistics=statistics, **options)
    for name in ("l.0.q.weight", "l.0.v.weight"):
        base, deltas, features = exact(pool, name)
        a, b, c = oracle.cat(deltas, features, 2, 0.4, mean=mean, renorm=renorm)
        wanted = base + 0.4 * (a + 2 * b + c)
        np.testing.assert_allclose(out[name], wanted.ravel(), rtol=3e-6, atol=3e-6)
    base, deltas, _ = exact(pool, "embed")
    wanted = base + 0.4 * (deltas[0] + 2 * deltas[1] + deltas[2])
    np.testing.assert_allclose(out["embed"], wanted.ravel(), rtol=1e-6, atol=1e-6)


def test_cat_finds_the_largest_algebraic_eigenvalues_of_an_indefinite_matrix() -> None:
    """Largest in magnitude, or first of an ascending solver, would be the wrong end."""
    rng = np.random.default_rng(4)
    deltas = rng.standard_normal((2, 1300, 6))
    grams = [np.eye(6), 50 * np.eye(6)]
    grams[0][0, 0] = 500.0
    basis = cat_module.removal_basis(deltas, grams, 0, 4, 1.0)
    whole = deltas[1] @ (grams[0] - grams[1]) @ deltas[1].T
    assert basis.shape == (1300, 1)
    value = float(basis[:, 0] @ whole @ basis[:, 0])
    assert value == pytest.approx(np.linalg.eigvalsh(whole)[-1], rel=1e-9)


# RegMean (methods.md §6)


def test_regmean_with_identical_grams_is_the_mean() -> None:
    rng = np.random.default_rng(0)
    values, x = [rng.standard_normal((3, 4)) for _ in range(3)], rng.standard_normal((9, 4))
    out = merged("regmean", "gram", values, [x, x, x])
    np.testing.assert_allclose(out, np.mean(values, axis=0), atol=1e-6)


def test_regmean_without_off_diagonals_weighs_columns() -> None:
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((3, 4)) for _ in range(2)]
    features = [rng.standard_normal((n, 4)) for n in (7, 9)]
    out = merged("regmean", "gram", values, features, off_diagonal=0.0)
    energy = [np.square(x).mean(axis=0) for x in features]
    wanted = (values[0] * energy[0] + values[1] * energy[1]) / (energy[0] + energy[1])
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [0.1, 0.9, 1.0])
def test_regmean_against_the_dense_inverse(pool: Any, factor: float) -> None:
    reference, experts, statistics = pool
    notes: dict[str, Any] = {}
    out = run("regmean", reference, experts, statistics=statistics, off_diagonal=factor,
              notes=notes)  # fmt: skip
    for name in ("l.0.q.weight", "l.0.v.weight"):
        _, _, features = exact(pool, name)
        weights = [e[name].astype(np.float64) for e in experts.values()]
        wanted = oracle.regmean(weights, features, factor)
        np.testing.assert_allclose(out[name], wanted.ravel(), rtol=2e-6, atol=2e-6)
        assert notes[name]["solver"] == "cholesky" and notes[name]["condition"] > 1
    for name in ("l.0.n.weight", "l.0.q.bias", "embed"):
        wanted = np.mean([e[name].astype(np.float64) for e in experts.values()], axis=0)
        np.testing.assert_allclose(out[name], wanted.ravel(), rtol=1e-6, atol=1e-6)


def test_regmean_weighs_grams_and_scales_the_task_vector(pool: Any) -> None:
    """More tokens by √w are a Gram times w; elsewhere the weighted mean."""
    reference, experts, statistics = pool
    given, scale = (1.7, 1.0, 0.4), 1.3
    out = run(
        "regmean", reference, experts, statistics=statistics, weight=given, **{"lambda": scale}
    )
    for name in ("l.0.q.weight", "l.0.v.weight", "l.0.n.weight", "l.0.q.bias", "embed"):
        base, deltas, features = exact(pool, name)
        moved = np.average(deltas, axis=0, weights=given)
        if statistics.measured(name) == "gram":
            louder = [x * np.sqrt(w) for x, w in zip(features, given, strict=True)]
            moved = oracle.regmean(deltas, louder, 0.9)
        np.testing.assert_allclose(out[name], (base + scale * moved).ravel(), rtol=4e-6, atol=4e-6)
    twice = run("regmean", reference, experts, statistics=statistics, weight=(2.0,) * 3)
    plain = run("regmean", reference, experts, statistics=statistics)
    assert all((twice[name] == plain[name]).all() for name in plain)


def test_regmean_refuses_settings_that_have_no_meaning() -> None:
    def problems(
        weight: tuple[float, ...], scale: float, reference: bool, **more: Any
    ) -> list[str]:
        settings = {"weight": weight, "lambda": scale, "gram": "exemplars", "ridge": 0.0, **more}
        site = Site("t", 2, 0, 1, ("A", "B"), settings, 0, (1, 2), "gram")
        return operator("regmean").with_reference(reference).check([site])

    assert problems((1.0, 0.5), 1.0, False) == problems((1.0, 0.0), 1.5, True) == []
    (problem,) = problems((1.0, 1.0), 1.5, False)
    assert "without base_model" in problem
    (problem,) = problems((0.0, 0.0), 1.0, True)
    assert "t are all zero" in problem
    (problem,) = problems((1.0, 1.0), 1.0, True, ridge=0.1)
    assert "read with gram: task_vector" in problem
    (problem,) = problems((1.0, 1.0), 1.0, True, gram="task_vector")
    assert "one for all tensors" in problem


def test_regmean_near_singularity_does_what_is_asked() -> None:
    values, features = [[[1, 7]], [[-1, 9]]], [[[2, 0]], [[1, 0]]]
    notes: dict[str, Any] = {}
    out = merged("regmean", "gram", values, features, singular="jitter", notes=notes)
    assert notes["t"]["solver"] == "jitter" and notes["t"]["ridge"] > 0
    np.testing.assert_allclose(out, [[0.6, 0]], atol=1e-5)
    with pytest.raises(PoolError, match="t: its Grams are near singular"):
        merged("regmean", "gram", values, features, singular="error")
    with pytest.raises(PoolError, match="no exemplar of any expert reaches it"):
        merged("regmean", "gram", values, [[[0, 0]], [[0, 0]]])


def test_regmean_says_beforehand_that_tokens_are_too_few() -> None:
    settings = {"singular": "error", "off_diagonal": 1.0}
    site = Site("t", 2, 0, 1, ("A", "B"), settings, 0, (1, 3), "gram")
    few = Measured({"t": "gram"}, {n: {"t": np.ones((1, 3))} for n in "AB"})
    (problem,) = operator("regmean").check_statistics([site], few)
    assert "t: its Grams are singular, 2 tokens for 3 channels" in problem


# Fisher (methods.md §6)

PLAIN: dict[str, Any] = {"normalize": "none", "floor": 0.0}


def test_fisher_examples() -> None:
    def out(information: Any, **given: Any) -> float:
        return float(merged("fisher", "fisher", [[1.0], [3.0]], information, **given)[0])

    assert out([[3.0], [1.0]], **PLAIN) == pytest.approx(1.5)
    assert out([[2.0], [2.0]], **PLAIN) == pytest.approx(2.0)
    assert out([[3e-9], [1e-9]], **PLAIN) == pytest.approx(1.5)
    assert out([[0.0], [0.0]], **PLAIN) == pytest.approx(2.0)
    assert out([[3.0], [1.0]], weight=(1, 3), **PLAIN) == pytest.approx(2.0)
    assert out([[3.0], [1.0]], normalize="none", floor=5.0) == pytest.approx(2.0)


def test_fisher_normalised_no_expert_dominates_by_size() -> None:
    values, information = [[1.0, 0.0], [3.0, 1.0]], [[3e6, 4e6], [4.0, 3.0]]
    out = merged("fisher", "fisher", values, information, floor=0.0)
    np.testing.assert_allclose(out, [(0.6 + 3 * 0.8) / 1.4, 0.6 / 1.4], rtol=1e-6)


@pytest.mark.parametrize("normalize", ["none", "global_l2"])
@pytest.mark.parametrize("floor", [0.0, 1e-3])
def test_fisher_against_its_oracle(pool: Any, normalize: str, floor: float) -> None:
    reference, experts, _ = pool
    rng = np.random.default_rng(9)
    data = {e: {n: rng.gamma(0.3, 1, v.shape) for n, v in reference.items() if n != "embed"}
            for e in experts}  # fmt: skip
    statistics = Measured(dict.fromkeys(next(iter(data.values())), "fisher"), data)
    weights = [1.0, 0.5, 2.0]
    out = run("fisher", reference, experts, statistics=statistics, weight=tuple(weights),
              normalize=normalize, floor=floor)  # fmt: skip
    norms = [statistics.fisher_norm(e) if normalize == "global_l2" else 1.0 for e in experts]
    for name in statistics.kinds:
        values = [e[name].astype(np.float64) for e in experts.values()]
        information = [data[e][name].astype(np.float32) for e in experts]
        wanted = oracle.fisher(values, information, weights, norms, floor)
        np.testing.assert_allclose(out[name], wanted.ravel(), rtol=1e-5, atol=1e-6)
    wanted = np.mean([e["embed"] for e in experts.values()], axis=0)
    np.testing.assert_allclose(out["embed"], wanted.ravel(), rtol=1e-6, atol=1e-6)


# All of them


@pytest.mark.parametrize("method", ["regmean", "lot", "cat"])
def test_threads_do_not_change_a_bit(method: str) -> None:
    """Tensors larger than a tile, many of them, that share their inputs."""
    rng = np.random.default_rng(1)
    names = [f"l.{i}.w.weight" for i in range(6)]
    reference = {n: rng.standard_normal((300, 240)).astype(np.float32) for n in names}
    experts, data = {}, {}
    for expert in "AB":
        experts[expert] = {
            n: v + np.float32(0.1) * rng.standard_normal(v.shape, np.float32)
            for n, v in reference.items()
        }
        data[expert] = {n: rng.standard_normal((500, 240)) for n in names}
    kinds = dict.fromkeys(names, "gram")
    one, many = (
        run(method, reference, experts, statistics=Measured(kinds, data), threads=threads)
        for threads in (1, 4)
    )
    for name in names:
        assert np.array_equal(one[name], many[name])


class Packed(Measured):
    """Grams as files hold them: read anew each time, and no derived matrices kept."""

    def __init__(self, tensor: str, grams: Mapping[str, Array]) -> None:
        super().__init__({tensor: "gram"}, {})
        self.triangles = {expert: packed(gram) for expert, gram in grams.items()}

    def triangle(self, expert: str, tensor: str) -> Array:
        return self.triangles[expert].copy()

    def rows(self, expert: str, tensor: str) -> int:
        return 700

    def once(self, tensor: str, key: Hashable, make: Callable[[], Any]) -> Any:
        return make()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["regmean", "lot", "cat"])
@pytest.mark.parametrize("shape", [(600, 200), (150, 300)])
def test_memory_stays_below_what_a_dry_run_says(method: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    reference = {"w": np.zeros(shape, np.float32)}
    names = ("A", "B", "C")
    experts = {n: {"w": rng.standard_normal(shape).astype(np.float32)} for n in names}
    features = {n: rng.standard_normal((700, shape[1])) for n in names}
    statistics = Packed("w", {n: x.T @ x for n, x in features.items()})
    tracemalloc.start()
    try:
        run(method, reference, experts, statistics=statistics)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bound = peak_bytes(len(names), shape)
    assert bound / 5 < peak < bound


@pytest.mark.parametrize("shape", [(5, 9), (7, 7)])
def test_weights_that_are_stored_the_other_way_round(shape: tuple[int, int]) -> None:
    """GPT-2's (in, out): the same merge as of the transposed weights, against dense oracles."""
    rng = np.random.default_rng(8)
    inputs, outputs = shape
    base = rng.standard_normal(shape)
    deltas = [rng.standard_normal(shape) for _ in range(3)]
    features = [rng.standard_normal((20 + 4 * k, inputs)) for k in range(3)]
    reference = {"c": base.astype(np.float32)}
    experts = {n: {"c": (base + d).astype(np.float32)} for n, d in zip("ABC", deltas, strict=True)}
    data = {n: {"c": x} for n, x in zip("ABC", features, strict=True)}
    statistics = Measured({"c": "gram"}, data, turned={"c"})

    def out(method: str, **given: Any) -> Array:
        made = run(method, reference, experts, statistics=statistics, notes=notes, **given)
        return made["c"].reshape(shape)

    notes: dict[str, Any] = {}
    turned = [d.T for d in deltas]
    wanted = oracle.regmean([(base + d).T for d in deltas], features, 0.9).T
    np.testing.assert_allclose(out("regmean"), wanted, rtol=2e-5, atol=2e-5)
    wanted = base + oracle.lot(turned, features).T
    np.testing.assert_allclose(out("lot"), wanted, rtol=2e-5, atol=2e-5)
    assert notes["c"] == {"rank": inputs, "of": inputs}
    wanted = base + 0.4 * sum(oracle.cat(turned, features, 2, 0.4)).T  # type: ignore[union-attr]
    cat = out("cat", rank=2, trade_off=0.4)
    np.testing.assert_allclose(cat, wanted, rtol=2e-5, atol=2e-5)
    assert outputs == cat.shape[1] and max(notes["c"]["rank"].values()) > 0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("method", ["regmean", "lot", "cat"])
def test_matrices_of_a_stack_are_merged_one_by_one(
    method: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if each were a tensor of its own; the last, which no token reached, as one without
    statistics. Two lie in a tile."""
    monkeypatch.setattr(stream, "TILE", 2 * 15)
    rng = np.random.default_rng(4)
    stack = rng.standard_normal((3, 5, 3)).astype(np.float32)
    experts = {e: {"s": stack + rng.standard_normal((3, 5, 3)).astype(np.float32)} for e in "AB"}
    data = {
        e: {f"s[{i}]": rng.standard_normal((0 if i == 2 else 9 + i, 5 if turned else 3))
            for i in range(3)}
        for e in "AB"
    }  # fmt: skip
    data["A"]["s[0]"] = data["A"]["s[0]"][:0]
    stacked = Measured({"s": "gram"}, data, {"s"} if turned else ())
    got = run(method, {"s": stack}, experts, statistics=stacked)
    kinds = {"s[0]": "gram", "s[1]": "gram"}
    apart = {e: {f"s[{i}]": every["s"][i] for i in range(3)} for e, every in experts.items()}
    alone = Measured(kinds, data, kinds if turned else ())
    wanted = run(method, {f"s[{i}]": stack[i] for i in range(3)}, apart, statistics=alone)
    for i in range(3):
        np.testing.assert_array_equal(got["s"].reshape(3, 15)[i], wanted[f"s[{i}]"])
        assert np.isfinite(wanted[f"s[{i}]"]).all()


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("regmean", "mean of the experts"),
        ("lot", "mean of the task vectors"),
        ("cat", "task vectors added untrimmed"),
        ("fisher", "mean of the experts"),
    ],
)
def test_a_block_s_matrix_without_statistics_is_named(method: str, words: str) -> None:
    """Stacked experts of a mixture; norms, biases and what lies outside have their own rules."""
    values = {"l.0.experts": (2, 4, 3), "l.0.n.weight": (3,), "embed": (5, 3)}
    reference = {n: np.zeros(shape, np.float32) for n, shape in values.items()}
    experts = {e: {n: v + 1 for n, v in reference.items()} for e in "AB"}
    notes: dict[str, Any] = {}
    run(method, reference, experts, statistics=Measured({}, {}), notes=notes,
        blocks={"l.0.experts": 0, "l.0.n.weight": 0})  # fmt: skip
    assert notes == {"l.0.experts": {"fallback": words}}


@pytest.mark.parametrize("method", ["fisher", "regmean", "lot", "cat"])
def test_lines_scales_their_task_vectors_with_depth(pool: Any, method: str) -> None:
    reference, experts, statistics = pool
    if method == "fisher":
        data = {e: {n: np.ones(v.shape) for n, v in reference.items()} for e in experts}
        statistics = Measured(dict.fromkeys(reference, "fisher"), data)
    blocks = {n: 0 for n in reference if n.startswith("l.")}
    plain = run(method, reference, experts, statistics=statistics, blocks=blocks)
    half = run("lines", reference, experts, on=method, statistics=statistics, blocks=blocks,
               alpha=0.5, beta=0.0)  # fmt: skip
    auto = run("lines", reference, experts, on=method, statistics=statistics, blocks=blocks)
    for name, base in reference.items():
        vector = plain[name] - base.ravel()
        np.testing.assert_allclose(half[name] - base.ravel(), 0.5 * vector, atol=1e-6)
        assert np.isfinite(auto[name]).all()


def test_cat_gives_up_soon_where_no_direction_counts() -> None:
    """Features that all experts share, at the usual trade-off: eigenvalues crowd below zero."""
    rng = np.random.default_rng(5)
    axes = np.linalg.qr(rng.standard_normal((280, 280)))[0]
    shared = (axes * np.arange(1.0, 281) ** -1.5) @ axes.T
    deltas = rng.standard_normal((5, 1030, 280))

    class Counted(ProcessorAlgebra):
        applied = 0

        def matrix(self, values: Any) -> Any:
            self.applied += 1
            assert self.applied < 500
            return super().matrix(values)

    grams = [shared * scale for scale in (1, 0.9, 1.1, 1, 1.05)]
    basis = cat_module.removal_basis(deltas, grams, 0, 4, 5.0, Counted())
    assert basis.shape == (1030, 0)
