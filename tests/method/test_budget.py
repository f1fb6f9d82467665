"""Theorem 1 as far as it concerns quotas, and "Scaling to more domains"."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sigmerge.method import budget
from tests.oracles import oracle_budget

SLACK = 1e-9
"""Ruling 5's guard: the theorem's bounds hold up to this much, relatively."""

weights = st.lists(st.integers(0, 100), min_size=1, max_size=20).filter(any)
capacities = st.integers(1, 999).map(lambda n: n / 1000)


def shares_of(parts):
    return np.array(parts) / sum(parts)


def quotas_of(capacity, share, n):
    return budget.quotas(np.array([capacity]), share, np.array([n]))[0]


@given(st.lists(capacities, min_size=1, max_size=5).map(np.array), weights)
def test_budget_has_rank_one_and_opens_the_capacity(capacity, parts):
    share = shares_of(parts)
    table = budget.budget(capacity, share)
    for i, c in enumerate(capacity):
        for d, part in enumerate(parts):
            assert table[i, d] == pytest.approx(c * part / sum(parts))
    assert table.sum(axis=1) == pytest.approx(capacity)
    assert np.linalg.matrix_rank(table) == 1


@given(st.integers(0, 1000), weights, st.integers(1, 10**9))
def test_quota_is_the_ceiling_of_the_exact_product(thousandths, parts, n):
    """Decimals that float64 cannot hold are still rounded as decimals."""
    quota = quotas_of(thousandths / 1000, shares_of(parts), n)
    for part, k in zip(parts, quota, strict=True):
        share = Fraction(part, sum(parts))
        exact = Fraction(thousandths, 1000) * share * n
        expected = oracle_budget.quota(Fraction(thousandths, 1000), share, n)
        # A target that lies above an integer by less than the guard is that integer.
        if 0 < exact - math.floor(exact) <= SLACK * exact:
            expected = round(exact)
        assert k == expected


@pytest.mark.parametrize(
    ("capacity", "share", "n", "quota"),
    [
        (0.45, 0.2, 100, 9),  # 9.000000000000002 in float64
        (0.1, 0.3, 100, 3),  # exactly 3.0
        (0.7, 0.1, 100, 7),  # 6.999999999999999
        (0.45, 0.2, 101, 10),
        (0.45, 1e-9, 10, 1),  # a positive share claims at least one coordinate
        (0.45, 0.0, 10**9, 0),
        (0.0, 1.0, 10, 0),
    ],
)
def test_quota_by_hand(capacity, share, n, quota):
    assert quotas_of(capacity, np.array([share]), n).tolist() == [quota]


def test_quota_far_beyond_the_guard_stays_within_half_a_coordinate():
    """At billions of coordinates the relative guard is wider than one; rounding is to nearest."""
    target = 0.45 * 10**10 + 0.45 * 3
    assert abs(quotas_of(0.45, np.array([1.0]), 10**10 + 3)[0] - target) < 1


@given(capacities, weights, st.integers(1, 10**6))
def test_theorem_1_feasibility_and_occupancy_bounds(capacity, parts, n):
    share = shares_of(parts)
    positive = np.count_nonzero(share)
    assume((1 - capacity) * n >= positive - 1)
    quota = quotas_of(capacity, share, n)
    total = int(quota.sum())
    assert total <= n
    assert budget.infeasible(quota[None], np.array([n])) == []
    assert capacity * n * (1 - SLACK) <= total < capacity * n + positive
    for rho, k in zip(share, quota, strict=True):
        if rho > 0:
            assert capacity * rho * n * (1 - SLACK) <= k < capacity * rho * n + 1
        else:
            assert k == 0


@given(st.integers(8, 10**6), st.lists(st.integers(0, 100), min_size=5, max_size=5).filter(any))
def test_eight_coordinates_suffice_for_five_domains_at_the_papers_c_max(n, parts):
    assert quotas_of(0.45, shares_of(parts), n).sum() <= n


@pytest.mark.parametrize(("domains", "enough"), [(5, 8), (10, 17), (20, 35)])
def test_scaling_enough_coordinates_for_more_domains(domains, enough):
    """The appendix's 17 coordinates for 10 domains and 35 for 20, at C_max = 0.45."""
    assert math.ceil((domains - 1) / (1 - Fraction(45, 100))) == enough
    for n in range(enough, enough + 40):
        assert quotas_of(0.45, np.full(domains, 1 / domains), n).sum() <= n


@given(capacities, weights, st.integers(1, 10**6))
def test_scaling_available_set_is_bounded_below(capacity, parts, n):
    """|R_r| / n > 1 − C − m₊/n at every step, whatever the number of domains."""
    share = shares_of(parts)
    positive = np.count_nonzero(share)
    assume((1 - capacity) * n >= positive - 1)
    quota = quotas_of(capacity, share, n)
    claimed_before = 0
    for d in budget.claim_order(share):
        assert n - claimed_before > n * (1 - capacity) - positive
        assert n - claimed_before >= quota[d]
        claimed_before += quota[d]


@given(capacities, weights, st.integers(1, 10**6))
def test_scaling_average_quota_is_within_one_of_the_target(capacity, parts, n):
    share = shares_of(parts)
    average = quotas_of(capacity, share, n).mean()
    target = capacity * n / share.size
    assert target * (1 - SLACK) <= average < target + np.count_nonzero(share) / share.size


@given(st.lists(capacities, min_size=1, max_size=6), weights, st.data())
def test_layers_do_not_see_one_another(capacity, parts, data):
    sizes = data.draw(
        st.lists(st.integers(1, 10**6), min_size=len(capacity), max_size=len(capacity))
    )
    share = shares_of(parts)
    together = budget.quotas(np.array(capacity), share, np.array(sizes))
    for row, c, n in zip(together, capacity, sizes, strict=True):
        assert np.array_equal(row, quotas_of(c, share, n))


def test_infeasible_layers_are_named():
    quota = np.array([[2, 2], [1, 1], [3, 0]])
    problems = budget.infeasible(quota, np.array([3, 2, 2]))
    assert problems == [
        "layer 0: the domains claim 4 of 3 coordinates",
        "layer 2: the domains claim 3 of 2 coordinates",
    ]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_claim_order_is_decreasing_share_then_domain_order(parts):
    order = budget.claim_order(np.array(parts, dtype=np.float64)).tolist()
    assert order == [d for _, d in sorted((-part, d) for d, part in enumerate(parts))]


def test_equal_deficits_claim_in_the_recipes_order_however_they_were_summed():
    """Ruling 21: 0.3 and 0.1 + 0.2 are one deficit; the later domain must not claim first."""
    deficit = np.array([0.3, 0.1 + 0.2, 0.4])
    assert deficit[1] > deficit[0]
    assert budget.claim_order(deficit / deficit.sum()).tolist() == [2, 0, 1]
