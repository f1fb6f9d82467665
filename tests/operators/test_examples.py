"""Every closed form and worked example of shared/methods.md §1, §3 and §6 for these operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.operators.driver import run, run_vectors

A = [1, -4, 2, 3, 5, 0, -1, 2]
B = [0.5, 9, -3, 1, 6, -7, 2, 1]
TIES_EXAMPLE = [[4, -1, 0.5, -3], [-2, 3, 0.2, -1], [1, 2, -6, 0.1]]


def random_pool(experts: int = 3, seed: int = 0) -> tuple[Any, Any, dict[str, int]]:
    rng = np.random.default_rng(seed)
    names = ["embed", "layers.0.w", "layers.1.w", "layers.2.w", "layers.3.w", "norm"]
    blocks = {name: int(name[7]) for name in names if name.startswith("layers")}
    reference = {name: rng.standard_normal(37).astype(np.float32) for name in names}
    tuned = {
        f"e{i}": {
            name: value + 0.1 * rng.standard_normal(37).astype(np.float32)
            for name, value in reference.items()
        }
        for i in range(experts)
    }
    return reference, tuned, blocks


# §1 CABS


def test_cabs_worked_example_with_a_first() -> None:
    merged = run_vectors("cabs", [A, B], n=1, m=4)
    np.testing.assert_array_equal(merged, [0, -4, -3, 0, 5, -7, 0, 0])
    assert float(merged @ merged) == 99 == 41 + 58


def test_cabs_worked_example_with_b_first() -> None:
    merged = run_vectors("cabs", [B, A], n=1, m=4)
    np.testing.assert_array_equal(merged, [0, 9, 0, 3, 5, -7, 0, 0])


def test_cabs_of_one_expert_with_n_equal_m_is_task_arithmetic() -> None:
    merged = run_vectors("cabs", [A], n=4, m=4, weight=0.7)
    np.testing.assert_array_equal(merged, run_vectors("task_arithmetic", [A], weight=0.7))


def test_cabs_prefers_a_free_zero_to_an_occupied_entry() -> None:
    merged = run_vectors("cabs", [[9, 0, 0, 0], [8, 0, 0, 0]], n=1, m=4)
    np.testing.assert_array_equal(merged, [9, 0, 0, 0])


@pytest.mark.parametrize(("size", "tail"), [(8, 0), (11, 3), (3, 3)])
def test_cabs_notes_the_tail_it_leaves_at_the_reference(size: int, tail: int) -> None:
    notes: dict[str, Any] = {}
    reference = np.full(size, 5, np.float32)
    merged = run("cabs", {"t": reference}, {"A": {"t": reference + 1}}, n=4, m=4, notes=notes)["t"]
    assert merged.tolist() == [6] * (size - tail) + [5] * tail
    assert notes == ({"t": {"tail": tail}} if tail else {})


def test_cabs_notes_the_tail_of_a_tensor_of_many_chunks() -> None:
    notes: dict[str, Any] = {}
    size = 5 * 2**20 + 7
    reference = np.zeros(size, np.float32)
    run("cabs", {"t": reference}, {"A": {"t": reference + 1}}, n=2, m=256, notes=notes)
    assert notes == {"t": {"tail": 7}}


def test_cabs_ties_go_to_the_lowest_index() -> None:
    merged = run_vectors("cabs", [[1, -1, 1, 1], [2, 2, 2, -2]], n=1, m=4)
    np.testing.assert_array_equal(merged, [1, 2, 0, 0])


def test_cabs_leaves_a_tail_at_the_reference() -> None:
    merged = run_vectors("cabs", [[1, 2, 3, 4, 100, 200]], n=4, m=4)
    np.testing.assert_array_equal(merged, [1, 2, 3, 4, 0, 0])


def test_cabs_fill_takes_free_entries_first_and_elects_on_overlaps() -> None:
    # n = 3 of 4: the second expert gets the one free entry and two taken ones, by magnitude.
    merged = run_vectors("cabs", [[4, 3, -2, 1], [-8, 5, 6, 0.5]], n=3, m=4, overlap="fill")
    # entry 0: +4 and -8 -> sign -, mean of agreeing -8; entry 2: -2 and 6 -> 6; entry 3: free.
    np.testing.assert_array_equal(merged, [-8, 3, 6, 0.5])


def test_cabs_defaults_are_the_papers() -> None:
    rng = np.random.default_rng(1)
    two = rng.standard_normal((2, 512)).astype(np.float32)
    merged = run_vectors("cabs", list(two))
    np.testing.assert_array_equal(merged, run_vectors("cabs", list(two), n=64, m=256))
    assert np.count_nonzero(merged) == 2 * 2 * 64


def test_cabs_fits_five_experts_by_default() -> None:
    rng = np.random.default_rng(2)
    five = rng.standard_normal((5, 256)).astype(np.float32)
    assert np.count_nonzero(run_vectors("cabs", list(five))) == 5 * 51


# §3 LiNeS


def constant_stack(depth: int) -> tuple[Any, Any, dict[str, int]]:
    names = [f"layers.{i}.w" for i in range(depth)]
    blocks = {name: i for i, name in enumerate(names)}
    reference = {name: np.zeros(4, np.float32) for name in [*names, "head"]}
    return reference, {"e": {n: np.ones(4, np.float32) for n in reference}}, blocks


def test_lines_factors_of_four_layers() -> None:
    reference, experts, blocks = constant_stack(4)
    merged = run("lines", reference, experts, blocks=blocks, alpha=0.2, beta=0.6)
    found = [float(merged[f"layers.{i}.w"][0]) for i in range(4)]
    np.testing.assert_allclose(found, [0.2, 0.4, 0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(merged["head"], 0.2, rtol=1e-6)


def test_lines_factors_of_twenty_eight_layers() -> None:
    reference, experts, blocks = constant_stack(28)
    merged = run("lines", reference, experts, blocks=blocks, alpha=0.2, beta=0.5)
    np.testing.assert_allclose(merged["layers.1.w"], 0.218519, rtol=1e-5)
    np.testing.assert_allclose(merged["layers.27.w"], 0.7, rtol=1e-6)


def test_lines_guards_a_single_layer() -> None:
    reference, experts, blocks = constant_stack(1)
    merged = run("lines", reference, experts, blocks=blocks, alpha=0.3, beta=0.5)
    np.testing.assert_allclose(merged["layers.0.w"], 0.3, rtol=1e-6)


def test_lines_with_beta_zero_is_task_arithmetic_with_coefficient_alpha() -> None:
    reference, experts, blocks = random_pool()
    merged = run("lines", reference, experts, blocks=blocks, alpha=0.25, beta=0.0)
    plain = run("task_arithmetic", reference, experts, blocks=blocks, weight=0.25)
    for name, values in plain.items():
        np.testing.assert_allclose(merged[name], values, rtol=0, atol=2e-7)


def test_lines_with_alpha_one_over_k_and_beta_zero_is_the_uniform_soup() -> None:
    reference, experts, blocks = random_pool(experts=4)
    merged = run("lines", reference, experts, blocks=blocks, alpha=0.25, beta=0.0)
    soup = run("linear", reference, experts, blocks=blocks)
    for name, values in soup.items():
        np.testing.assert_allclose(merged[name], values, rtol=0, atol=3e-7)


def test_lines_alpha_auto_is_one_over_k_for_a_plain_sum() -> None:
    reference, experts, blocks = random_pool(experts=4)
    auto = run("lines", reference, experts, blocks=blocks, beta=0.5)
    given = run("lines", reference, experts, blocks=blocks, alpha=0.25, beta=0.5)
    for name, values in given.items():
        np.testing.assert_array_equal(auto[name], values)


def test_lines_block_one_does_not_change_when_the_merged_vector_is_scaled() -> None:
    reference, experts, blocks = random_pool()
    once = run("lines", reference, experts, blocks=blocks, beta=0.5)
    scaled = run("lines", reference, experts, blocks=blocks, beta=0.5, **{"lambda": 4.0})
    np.testing.assert_allclose(scaled["layers.0.w"], once["layers.0.w"], rtol=1e-6, atol=1e-7)
    assert not np.allclose(scaled["layers.3.w"], once["layers.3.w"], rtol=1e-3)


def test_lines_with_alpha_one_and_beta_zero_gives_back_the_only_expert() -> None:
    blocks = {"layers.0.w": 0, "layers.1.w": 1}
    reference = {name: np.array([1, 2, -4], np.float32) for name in blocks}
    expert = {name: np.array([3, -1, 0.5], np.float32) for name in blocks}
    merged = run("lines", reference, {"e": expert}, blocks=blocks, alpha=1.0, beta=0.0)
    for name in blocks:
        np.testing.assert_array_equal(merged[name], expert[name])


def test_lines_with_alpha_and_beta_zero_is_the_reference() -> None:
    reference, experts, blocks = random_pool()
    merged = run("lines", reference, experts, blocks=blocks, alpha=0.0, beta=0.0)
    for name, values in reference.items():
        np.testing.assert_array_equal(merged[name], values)


# §6 anchors


def test_soup_is_task_arithmetic_with_one_over_k() -> None:
    reference, experts, _ = random_pool(experts=4)
    soup = run("linear", reference, experts)
    plain = run("task_arithmetic", reference, experts, weight=0.25)
    for name, values in soup.items():
        np.testing.assert_allclose(plain[name], values, rtol=0, atol=3e-7)


@pytest.mark.parametrize("scope", ["tensor"])
def test_ties_worked_example_mean(scope: str) -> None:
    merged = run_vectors("ties", TIES_EXAMPLE, density=0.5, scope=scope)
    np.testing.assert_array_equal(merged, [4, 2.5, -6, -3])


def test_ties_worked_example_sum() -> None:
    merged = run_vectors("ties", TIES_EXAMPLE, density=0.5, normalize=False)
    np.testing.assert_array_equal(merged, [4, 5, -6, -3])


def test_ties_worked_example_over_the_model_is_the_same_for_one_tensor() -> None:
    merged = run_vectors("ties", TIES_EXAMPLE, density=0.5, scope="model")
    np.testing.assert_array_equal(merged, [4, 2.5, -6, -3])


def test_ties_lambda_scales_the_merged_vector() -> None:
    merged = run_vectors("ties", TIES_EXAMPLE, density=0.5, **{"lambda": 0.5})
    np.testing.assert_array_equal(merged, [2, 1.25, -3, -1.5])


def test_ties_keeps_entries_of_equal_magnitude_from_the_front() -> None:
    merged = run_vectors("ties", [[1, -1, 1, -1, 1, -1]], density=0.5)
    np.testing.assert_array_equal(merged, [1, -1, 1, 0, 0, 0])


def test_ties_over_the_model_keeps_all_entries_equal_to_the_threshold() -> None:
    merged = run_vectors("ties", [[1, -1, 1, -3, 1, -1]], density=0.5, scope="model")
    np.testing.assert_array_equal(merged, [1, -1, 1, -3, 1, -1])


def test_ties_keeps_at_least_one_entry() -> None:
    merged = run_vectors("ties", [[1, -5, 3]], density=0.01)
    np.testing.assert_array_equal(merged, [0, -5, 0])


def test_ties_of_density_zero_is_the_reference() -> None:
    for scope in ("tensor", "model"):
        merged = run_vectors("ties", [[1, -5, 3]], density=0.0, scope=scope)
        np.testing.assert_array_equal(merged, [0, 0, 0])


def test_ties_zero_sum_elects_plus() -> None:
    merged = run_vectors("ties", [[2, -1], [-2, 1]])
    np.testing.assert_array_equal(merged, [2, 1])


@pytest.mark.parametrize(
    ("vectors", "merged"),
    [
        ([[2, -1, -1], [-2, -1, 0]], [-2, -1, -1]),  # two coordinates elect −, one cancels
        ([[2, -1, 1], [-2, -1, 3]], [2, -1, 2]),  # one each: + is elected
        ([[2, 1], [-2, 1]], [2, 1]),
    ],
)
@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_papers_preset_elects_the_majority_where_entries_cancel(
    method: str, vectors: list[list[float]], merged: list[float]
) -> None:
    shown = run_vectors(method, vectors, preset="paper", density=1.0)
    assert shown.tolist() == merged
    plus = run_vectors(method, vectors, preset="paper", density=1.0, cancelled="plus")
    assert plus[0] == 2


def test_the_majority_is_that_of_trimmed_vectors() -> None:
    """Untrimmed, five coordinates elect −; the cut leaves one that elects + and the cancelled."""
    rows = [[4, -1, -1, -1, -1, -1, 9], [-4, -1, -1, -1, -1, -1, 9]]
    for scope in ("tensor", "model"):
        shown = run_vectors("ties", rows, density=0.3, scope=scope, cancelled="majority")
        assert shown.tolist() == [4, 0, 0, 0, 0, 0, 9]


def test_ties_weights_count_in_the_election_only_if_asked() -> None:
    vectors = [[3.0], [-2.0]]
    weighted = run_vectors("ties", vectors, weight=[0.25, 0.5], elect="weighted")
    unweighted = run_vectors("ties", vectors, weight=[0.25, 0.5], elect="unweighted")
    np.testing.assert_array_equal([*weighted, *unweighted], [-2.0, 3.0])


def test_ties_averages_by_the_weights_of_those_that_agree() -> None:
    merged = run_vectors("ties", [[1.0], [4.0], [-1.0]], weight=[0.5, 0.25, 1.0])
    np.testing.assert_array_equal(merged, [(0.5 * 1 + 0.25 * 4) / 0.75])


def test_dare_without_dropping_is_task_arithmetic() -> None:
    reference, experts, _ = random_pool()
    for rescale in ("inverse", "l1", "none"):
        dropped = run("dare_linear", reference, experts, weight=0.3, density=1.0, rescale=rescale)
        plain = run("task_arithmetic", reference, experts, weight=0.3)
        for name, values in plain.items():
            np.testing.assert_array_equal(dropped[name], values)


def test_every_dare_survivor_is_the_entry_over_one_minus_p() -> None:
    vector = np.arange(1, 2001, dtype=np.float32)
    merged = run_vectors("dare_linear", [vector], density=0.25, rescale="inverse")
    kept = merged != 0
    np.testing.assert_array_equal(merged[kept], 4 * vector[kept])
    assert 400 < kept.sum() < 600


@pytest.mark.slow
def test_the_mean_of_dare_over_many_seeds_is_the_task_vector() -> None:
    """Of every entry, and more sharply of the ten entries of each value together."""
    vector, copies, seeds = np.array([1, -2, 3, -4, 5, -6, 7, -8], np.float32), 10, 300
    long = np.tile(vector, copies)
    runs = [
        run_vectors("dare_linear", [long], density=0.5, rescale="inverse", seed=seed)
        for seed in range(seeds)
    ]
    mean = np.mean(runs, axis=0)
    # A survivor is ±2τ or 0: standard deviation |τ|; five of its standard errors.
    assert (np.abs(mean - long) <= 5 * np.abs(long) / np.sqrt(seeds)).all()
    together = np.abs(mean.reshape(copies, -1).mean(axis=0) - vector)
    assert (together <= 5 * np.abs(vector) / np.sqrt(seeds * copies)).all()


def test_dare_l1_keeps_the_l1_norm_of_a_tensor() -> None:
    vector = np.random.default_rng(3).standard_normal(5000).astype(np.float32)
    merged = run_vectors("dare_linear", [vector], density=0.1)
    np.testing.assert_allclose(np.abs(merged).sum(), np.abs(vector).sum(), rtol=1e-5)
    assert 0.07 < np.count_nonzero(merged) / 5000 < 0.13


def test_dare_of_density_zero_is_the_reference() -> None:
    for rescale in ("inverse", "l1", "none"):
        merged = run_vectors("dare_linear", [[1, 2, 3]], density=0.0, rescale=rescale)
        np.testing.assert_array_equal(merged, [0, 0, 0])


def test_dare_draws_depend_on_seed_expert_and_tensor() -> None:
    zero = {name: np.zeros(64, np.float32) for name in ("a", "b")}
    one = {name: np.ones(64, np.float32) for name in ("a", "b")}

    def mask(expert: str, seed: int) -> dict[str, Any]:
        options: dict[str, Any] = {"density": 0.5, "rescale": "none", "seed": seed}
        return run("dare_linear", zero, {expert: one}, **options)

    base = mask("x", 0)
    assert (base["a"] != base["b"]).any()
    assert (base["a"] != mask("x", 1)["a"]).any()
    assert (base["a"] != mask("y", 0)["a"]).any()
    np.testing.assert_array_equal(base["a"], mask("x", 0)["a"])


def test_dare_ties_elects_among_survivors_and_trims_nothing() -> None:
    merged = run_vectors("dare_ties", TIES_EXAMPLE, density=1.0, normalize=True)
    np.testing.assert_allclose(merged, [2.5, 2.5, -6, -2], rtol=1e-6)
    summed = run_vectors("dare_ties", TIES_EXAMPLE, density=1.0)
    np.testing.assert_array_equal(summed, [5, 5, -6, -4])


def test_linear_may_leave_the_weights_unnormalised() -> None:
    merged = run_vectors("linear", [[1, 2], [4, 8]], weight=[1.0, 0.5], normalize=False)
    np.testing.assert_array_equal(merged, [3, 6])


def test_task_arithmetic_may_normalise_unless_the_weights_cancel() -> None:
    vectors = [[1.0, 2.0], [4.0, 8.0]]
    merged = run_vectors("task_arithmetic", vectors, weight=[1.0, 0.5], normalize=True)
    np.testing.assert_array_equal(merged, [2, 4])
    cancelled = run_vectors("task_arithmetic", vectors, weight=[1.0, -1.0], normalize=True)
    np.testing.assert_array_equal(cancelled, [-3, -6])
