"""mergekit's other methods against the float64 oracles, over their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sigmerge.errors import PoolError
from sigmerge.operators.slerp import MultiSlerp, NuSlerp
from tests.operators.driver import run
from tests.operators.test_against_oracle import bf16
from tests.oracles import oracle_geometry as oracle
from tests.oracles.oracle_operators import elect_and_merge, philox_block

SHAPES = {
    "embed": (40, 24),
    "layers.0.w": (300, 257),
    "conv": (3, 4, 5),
    "norm": (33,),
    "one": (1,),
}
BLOCKS = {"layers.0.w": 0, "conv": 1}
WEIGHTS = (0.5, 0.75, 0.3125)
SEED = 7
Pool = tuple[dict[str, Any], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def pool() -> Pool:
    """bfloat16 values, whose differences tie; the first tensor is larger than a tile."""
    rng = np.random.default_rng(11)
    reference = {n: bf16(rng.standard_normal(s)) for n, s in SHAPES.items()}
    experts = {
        name: {n: bf16(v + 0.2 * rng.standard_normal(v.shape)) for n, v in reference.items()}
        for name in ("math", "coding", "safety")
    }
    return reference, experts


def first(pool: Pool, count: int) -> Pool:
    return pool[0], dict(list(pool[1].items())[:count])


def wide(pool: Pool, name: str) -> tuple[Any, list[Any]]:
    """Reference and experts in float64, and so exact."""
    return pool[0][name].astype(np.float64), [e[name].astype(np.float64) for e in pool[1].values()]


def changes(pool: Pool, name: str) -> list[Any]:
    """Task vectors are float32 differences."""
    return [(e[name] - pool[0][name]).astype(np.float64) for e in pool[1].values()]


def check(pool: Pool, method: str, wanted: Callable[[str], Any], **given: Any) -> None:
    one = run(method, *pool, blocks=BLOCKS, seed=SEED, **given)
    many = run(method, *pool, blocks=BLOCKS, seed=SEED, threads=3, **given)
    for name, values in one.items():
        np.testing.assert_array_equal(values, many[name])
        np.testing.assert_allclose(values, wanted(name).ravel(), rtol=1e-6, atol=1e-6, err_msg=name)


def moved(pool: Pool, merged: Callable[[list[Any]], Any]) -> Callable[[str], Any]:
    """The oracle's merged task vector, added to the reference."""
    return lambda name: pool[0][name].astype(np.float64) + merged(changes(pool, name))


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 1.4])
def test_slerp(pool: Pool, t: float) -> None:
    two = first(pool, 1)
    check(two, "slerp", lambda n: oracle.slerp(*_pair(two, n), t), t=t)


def test_slerp_of_nearly_parallel_models_is_linear(pool: Pool) -> None:
    near = {n: v * np.float32(1.01) for n, v in pool[0].items()}
    two = pool[0], {"near": near}
    check(two, "slerp", lambda n: (1 - 0.3) * pool[0][n] + 0.3 * near[n].astype(np.float64), t=0.3)


@pytest.mark.parametrize("cosine", [0.9993, 0.9997])
def test_where_slerp_becomes_linear(cosine: float) -> None:
    rng = np.random.default_rng(3)
    base, across = (np.linalg.qr(rng.standard_normal((400, 2)))[0] * 20).T
    other = cosine * base + np.sqrt(1 - cosine**2) * across
    two: Pool = ({"w": base.astype(np.float32)}, {"one": {"w": other.astype(np.float32)}})
    apart = np.abs(oracle.slerp(base, other, 0.5) - (base + other) / 2).max()
    assert (apart > 1e-4) == (cosine < 0.9995)
    check(two, "slerp", lambda n: oracle.slerp(*_pair(two, n), 0.5), t=0.5)


def _pair(pool: Pool, name: str) -> tuple[Any, Any]:
    base, (other,) = wide(pool, name)
    return base, other


@pytest.mark.parametrize(
    ("flatten", "row_wise", "axis"), [(True, False, None), (False, False, -1), (False, True, 0)]
)
def test_nuslerp(pool: Pool, flatten: bool, row_wise: bool, axis: int | None) -> None:
    two, t = first(pool, 2), 0.75 / 1.25
    how = {"nuslerp_flatten": flatten, "nuslerp_row_wise": row_wise, "weight": WEIGHTS[:2]}
    check(two, "nuslerp", moved(two, lambda vs: oracle.nuslerp(*vs, t, axis)), **how)


def test_nuslerp_and_multislerp_can_do_without_a_base() -> None:
    for operator in (NuSlerp(), MultiSlerp()):
        assert operator.needs_reference and operator.gives_vector
        alone = operator.with_reference(False)
        assert not alone.needs_reference and not alone.gives_vector


def test_nuslerp_of_opposite_weights_takes_the_middle(pool: Pool) -> None:
    two = first(pool, 2)
    middle = run("nuslerp", *two, weight=(1.0, 1.0))
    for name, values in run("nuslerp", *two, weight=(1.0, -1.0)).items():
        np.testing.assert_array_equal(values, middle[name])


def test_multislerp(pool: Pool) -> None:
    check(pool, "multislerp", moved(pool, lambda v: oracle.multislerp(v, WEIGHTS)), weight=WEIGHTS)


def test_multislerp_of_one_expert_is_that_expert(pool: Pool) -> None:
    one = first(pool, 1)
    check(one, "multislerp", lambda n: wide(one, n)[1][0], weight=(0.3,))


def test_multislerp_of_directions_that_add_up_to_zero(pool: Pool) -> None:
    """Two are added up as they are, as in mergekit; more have no mean direction."""
    way, base = pool[0]["norm"], np.zeros(33, np.float32)
    signs = {"a": way, "b": -2 * way, "c": 0 * way}
    two: Pool = ({"w": base}, {name: {"w": signs[name]} for name in "ab"})
    check(two, "multislerp", lambda n: 0.5 * signs["a"] + 0.5 * signs["b"], weight=(0.3, 0.3))
    with pytest.raises(PoolError, match="w: multislerp has no mean direction"):
        run("multislerp", {"w": base}, {n: {"w": v} for n, v in signs.items()}, weight=(1, 1, 1))


def test_karcher(pool: Pool) -> None:
    check(pool, "karcher", lambda n: oracle.karcher(wide(pool, n)[1]))
    check(pool, "karcher", lambda n: oracle.karcher(wide(pool, n)[1], steps=1), max_iter=1)


def test_karcher_of_a_zero_tensor_and_of_opposite_ones(pool: Pool) -> None:
    """A zero tensor has no direction, but a length; of opposite ones the first is taken."""
    blank = pool[0], {**first(pool, 2)[1], "blank": {n: 0 * v for n, v in pool[0].items()}}
    check(blank, "karcher", lambda n: oracle.karcher(wide(blank, n)[1][:2]) * 2 / 3)
    expert = pool[1]["math"]
    across = pool[0], {"one": expert, "other": {n: -3 * v for n, v in expert.items()}}
    check(across, "karcher", lambda n: 2 * expert[n].astype(np.float64), max_iter=0)


@pytest.mark.parametrize("rows", [False, True])
def test_model_stock(pool: Pool, rows: bool) -> None:
    wanted = moved(pool, lambda vectors: oracle.model_stock(vectors, rows))
    check(pool, "model_stock", wanted, filter_wise=rows)


@pytest.mark.parametrize("rescale", ["none", "l1"])
@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties"])
@pytest.mark.parametrize("densities", [(0.9, 0.5, 0.2), (1.0, 0.999, 0.0)])
def test_breadcrumbs(pool: Pool, method: str, rescale: str, densities: Any) -> None:
    gammas = (0.01, 0.1, 0.02)

    def wanted(vectors: list[Any]) -> Any:
        left = []
        for vector, density, gamma in zip(vectors, densities, gammas, strict=True):
            thinned = oracle.breadcrumbs(vector, density, gamma)
            left.append(oracle.match_l1(vector, thinned) if rescale == "l1" else thinned)
        if method == "breadcrumbs":
            return sum(w * v for w, v in zip(WEIGHTS, left, strict=True))
        flat = [v.ravel() for v in left]
        return elect_and_merge(flat, WEIGHTS, True, False).reshape(vectors[0].shape)

    how = {"density": densities, "gamma": gammas, "rescale": rescale, "weight": WEIGHTS}
    check(pool, method, moved(pool, wanted), **how)


def draws(expert: str, tensor: str, size: int) -> Any:
    """Uniform numbers of [0, 1), from the oracle's Philox."""
    from hashlib import sha256

    digest = sha256("\0".join([str(SEED), "della", expert, tensor]).encode()).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    words = [word for counter in range(-(-size // 4)) for word in philox_block(counter, key)]
    return np.array(words[:size]) / 2**32


@pytest.mark.parametrize("rescale", ["none", "l1", "inverse"])
@pytest.mark.parametrize("method", ["della_linear", "della"])
def test_della(pool: Pool, method: str, rescale: str) -> None:
    small = {n: v for n, v in pool[0].items() if n != "layers.0.w"}
    names = list(pool[1])

    def wanted(name: str) -> Any:
        def keep(d: int, odds: Any) -> Any:
            return (draws(names[d], name, odds.size) < odds.ravel()).reshape(odds.shape)

        vectors = changes(pool, name)
        elects = method == "della"
        tau = oracle.della(vectors, WEIGHTS, 0.5, 0.2, keep, rescale, elects)
        return pool[0][name].astype(np.float64) + tau

    how = {"density": 0.5, "epsilon": 0.2, "rescale": rescale, "weight": WEIGHTS}
    check((small, pool[1]), method, wanted, **how)


def test_della_keeps_large_entries_rather_than_small_ones(pool: Pool) -> None:
    one, name = first(pool, 1), "layers.0.w"
    (vector,) = changes(one, name)
    how = {"density": 0.5, "epsilon": 0.4, "rescale": "none"}
    kept = np.zeros(vector.shape)
    for seed in range(8):
        merged = run("della_linear", *one, seed=seed, **how)[name].reshape(vector.shape)
        kept += merged != one[0][name]
    odds = oracle.della_odds(vector, 0.5, 0.4)
    for low in (0.1, 0.3, 0.5, 0.7):
        here = (odds >= low) & (odds < low + 0.2) & (vector != 0)
        assert abs(kept[here].mean() / 8 - odds[here].mean()) < 0.01


def test_della_keeps_the_same_entries_whether_or_not_it_matches_their_norm() -> None:
    """On several strips and tiles of rows that fill no byte of marks."""
    values = np.random.default_rng(0).standard_normal((301, 333)).astype(np.float32)
    model = {"w": np.zeros_like(values)}, {"a": {"w": values}, "b": {"w": values[::-1].copy()}}
    how = {"density": 0.5, "epsilon": 0.2}
    for weight in ((1, 0), (0, 1)):
        plain, matched = (
            run("della_linear", *model, weight=weight, rescale=rescale, **how)["w"]
            for rescale in ("none", "l1")
        )
        np.testing.assert_array_equal(matched != 0, plain != 0)
        assert np.abs(matched).sum() == pytest.approx(np.abs(values).sum(), rel=1e-5)


def test_della_of_density_one_drops_nothing(pool: Pool) -> None:
    plain = run("task_arithmetic", *pool, weight=WEIGHTS)
    for name, values in run("della_linear", *pool, weight=WEIGHTS, density=1.0).items():
        np.testing.assert_array_equal(values, plain[name])
    for name, values in run("della_linear", *pool, weight=WEIGHTS, density=0.0).items():
        np.testing.assert_array_equal(values, pool[0][name].ravel())


@pytest.mark.parametrize("share", [1.0, 0.5, 0.05, 0.0])
def test_sce(pool: Pool, share: float) -> None:
    wanted = moved(pool, lambda vectors: oracle.sce(vectors, share))
    check(pool, "sce", wanted, select_topk=share)


def test_sce_of_small_changes_weighs_experts_alike(pool: Pool) -> None:
    near = {n: {t: pool[0][t] + (v - pool[0][t]) * np.float32(2**-12) for t, v in e.items()}
            for n, e in pool[1].items()}  # fmt: skip
    small = pool[0], near
    check(small, "sce", moved(small, lambda vectors: oracle.sce(vectors, 0.5)), select_topk=0.5)


def test_arcee_fusion(pool: Pool) -> None:
    one = first(pool, 1)
    check(one, "arcee_fusion", lambda n: oracle.arcee_fusion(*_pair(one, n)))


@pytest.mark.parametrize("t", [0.0, 0.05, 10.0])
def test_nearswap(pool: Pool, t: float) -> None:
    one = first(pool, 1)
    check(one, "nearswap", lambda n: oracle.nearswap(*_pair(one, n), t), t=t)


@pytest.mark.parametrize("epsilon", [1e-5, 0.1, 10.0])
def test_ram(pool: Pool, epsilon: float) -> None:
    check(pool, "ram", moved(pool, lambda v: oracle.ram(v, epsilon)), epsilon=epsilon)
    plus = moved(pool, lambda v: oracle.ram(v, epsilon, 0.3, 0.4))
    check(pool, "ramplus_tl", plus, epsilon=epsilon, r=0.3, alpha=0.4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("epsilon", [-0.1, 0.0])
def test_ram_without_a_bound_is_the_mean(pool: Pool, epsilon: float) -> None:
    """Every entry counts as changed, and none stands alone."""
    reference, experts = pool
    moving = {n: {t: v + np.float32(9) for t, v in e.items()} for n, e in experts.items()}
    other = reference, moving
    check(other, "ramplus_tl", moved(other, lambda v: np.mean(v, axis=0)), epsilon=epsilon)


def test_ram_counts_no_fewer_lone_entries_than_its_bound() -> None:
    """mergekit's clamp: one lone entry and one shared one, and a bound of four."""
    a, b = np.float32([5, 5, 0]), np.float32([5, 0, 0])
    model = {"w": np.zeros_like(a)}, {"a": {"w": a}, "b": {"w": b}}
    merged = run("ramplus_tl", *model, epsilon=4.0, r=1.0, alpha=1.0)["w"]
    np.testing.assert_array_equal(merged, [5, 5 * 1.25, 0])


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.25])
def test_passthrough(pool: Pool, scale: float) -> None:
    one = first(pool, 1)
    check(one, "passthrough", lambda n: scale * wide(one, n)[1][0], scale=scale)
