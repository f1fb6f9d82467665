import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.errors import SigmergeError
from sigmerge.method import conflict, controls, deficit
from tests.oracles import oracle_budget

DOMAINS = ("math", "instruction", "coding", "multilingual", "safety")
C_MIN, C_MAX = 0.10, 0.45
LAYERS = 6

VIEWS = dict(zip(conflict.VIEWS, np.random.default_rng(0).random((3, LAYERS)), strict=True))
GAPS = np.array([0.12, 0.3, 0.0, 0.05, 0.21])
COORDINATES = np.arange(1000, 1000 + LAYERS)


def allocated(variant="default", seed=0, views=VIEWS, gaps=GAPS, **options):
    constants = {"c_min": C_MIN, "c_max": C_MAX} | options
    return controls.allocate(
        views, gaps, COORDINATES, DOMAINS, variant=variant, seed=seed, **constants
    )


def quotas_of(result):
    """⌈C_i ρ_d n_i⌉ of the result's own capacities and shares, in rational arithmetic."""
    return [
        [oracle_budget.quota(c, rho, int(n)) for rho in result.share]
        for c, n in zip(result.capacity, COORDINATES, strict=True)
    ]


DEFAULT = allocated()
FACTORS = ("conflict", "capacity", "share", "order", "selection", "update")

CHANGES = {
    "default": set(),
    "uniform_capacity": {"capacity"},
    "equal_share": {"share", "order"},
    "sparse_update": {"update"},
    "inverted_capacity": {"capacity"},
    "slope_inverted_capacity": {"capacity"},
    "permuted_capacity": {"capacity"},
    "inverted_share": {"share", "order"},
    "random_share": {"share", "order"},
    "random_mask": {"selection"},
    "all_random": {"capacity", "share", "order", "selection"},
    "view_representation": {"conflict", "capacity"},
    "view_direction": {"conflict", "capacity"},
    "view_sign": {"conflict", "capacity"},
    "order_random": {"order"},
    "order_reverse": {"order"},
}


def test_default_is_the_equations_in_a_row():
    score, warnings = conflict.conflict_score(VIEWS)
    capacity = conflict.capacity(score, C_MIN, C_MAX)
    share = deficit.shares(GAPS)
    assert np.array_equal(DEFAULT.conflict, score)
    assert np.array_equal(DEFAULT.capacity, capacity)
    assert np.array_equal(DEFAULT.share, share)
    assert DEFAULT.quota.tolist() == quotas_of(DEFAULT)
    assert DEFAULT.order == ("instruction", "safety", "math", "multilingual", "coding")
    assert (DEFAULT.selection, DEFAULT.update) == ("magnitude", "dense")
    assert DEFAULT.warnings == warnings == ()


def test_the_table_is_complete():
    assert set(controls.VARIANTS) == set(CHANGES)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_variant_changes_its_part_and_nothing_else(name):
    result = allocated(name, seed=1)
    differs = {
        field
        for field in FACTORS
        if not np.array_equal(getattr(result, field), getattr(DEFAULT, field))
    }
    assert differs == CHANGES[name]
    assert np.array_equal(result.deficit, GAPS)
    assert result.quota.tolist() == quotas_of(result)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_seeds_matter_exactly_where_the_table_says_so(name):
    variant = controls.VARIANTS[name]
    plans = [drawn(allocated(name, seed)) for seed in range(5)]
    here = any(plan != plans[0] for plan in plans)
    later = variant.selection == "random" or variant.update == "sparse"
    assert (here or later) == (len(variant.seeds) > 1)
    assert drawn(allocated(name, 3)) == drawn(allocated(name, 3))


def drawn(result):
    """All that a seed can change, as plain values."""
    return [np.asarray(getattr(result, name)).tolist() for name in (*FACTORS, "quota")]


def test_the_papers_seeds():
    seeds = {name: variant.seeds for name, variant in controls.VARIANTS.items()}
    assert seeds.pop("all_random") == (0, 1, 2, 3, 4)
    three = {"sparse_update", "permuted_capacity", "random_share", "random_mask", "order_random"}
    assert {name for name, s in seeds.items() if s == (0, 1, 2)} == three
    assert {name for name, s in seeds.items() if s == (0,)} == set(seeds) - three


@pytest.mark.parametrize("name", ["inverted_capacity", "permuted_capacity", "all_random"])
@pytest.mark.parametrize("seed", range(5))
def test_capacity_controls_keep_the_multiset(name, seed):
    capacity = allocated(name, seed).capacity
    assert np.array_equal(np.sort(capacity), np.sort(DEFAULT.capacity))


@pytest.mark.parametrize("name", sorted(CHANGES))
@pytest.mark.parametrize("seed", range(3))
def test_shares_stay_on_the_simplex_and_capacity_in_its_range(name, seed):
    result = allocated(name, seed)
    assert result.share.sum() == pytest.approx(1.0)
    assert (result.share >= 0).all()
    assert ((result.capacity >= C_MIN - 1e-15) & (result.capacity <= C_MAX + 1e-15)).all()


def test_uniform_capacity_opens_the_mean():
    assert allocated("uniform_capacity").capacity == pytest.approx(
        [DEFAULT.capacity.mean()] * LAYERS
    )


def test_equal_share_includes_domains_without_deficit_and_claims_in_given_order():
    result = allocated("equal_share")
    assert result.share == pytest.approx([0.2] * 5)
    assert result.order == DOMAINS


def test_slope_inversion_mirrors_every_capacity():
    result = allocated("slope_inverted_capacity")
    assert result.capacity == pytest.approx(C_MIN + C_MAX - DEFAULT.capacity)


def test_inverted_share_by_hand():
    result = allocated("inverted_share", gaps=np.array([0.1, 0.4, 0.0, 0.2, 0.3]))
    assert result.share == pytest.approx([0.3, 0.0, 0.4, 0.2, 0.1])
    assert result.order == ("coding", "math", "multilingual", "safety", "instruction")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_rank_reversal_keeps_the_multiset_and_turns_the_order(values):
    before = np.array(values, dtype=np.float64)
    after = controls.rank_reversed(before)
    assert sorted(after) == sorted(before)
    for i in range(before.size):
        for j in range(before.size):
            if before[i] < before[j]:
                assert after[i] >= after[j]


def test_reverse_order_serves_the_smallest_share_first():
    assert allocated("order_reverse").order == DEFAULT.order[::-1]


def test_single_views_read_one_view():
    for name in conflict.VIEWS:
        result = allocated(f"view_{name}")
        assert np.array_equal(result.conflict, conflict.min_max(VIEWS[name]))
        assert set(result.views) == set(VIEWS)


@pytest.mark.parametrize("seed", range(3))
def test_all_random_is_its_three_parts_under_the_same_seed(seed):
    result = allocated("all_random", seed)
    assert np.array_equal(result.capacity, allocated("permuted_capacity", seed).capacity)
    assert np.array_equal(result.share, allocated("random_share", seed).share)
    assert result.selection == allocated("random_mask", seed).selection == "random"


def test_random_shares_are_uniform_on_the_simplex():
    """Under Dirichlet(1) on five domains a share exceeds t with probability (1 − t)⁴."""
    shares = np.array([allocated("random_share", seed).share for seed in range(400)])
    for threshold in (0.1, 0.2, 0.5):
        expected = (1 - threshold) ** 4
        assert (shares > threshold).mean() == pytest.approx(expected, abs=0.05)


def test_purposes_do_not_share_random_numbers():
    one = controls.generator(0, "random share").random(4)
    assert np.array_equal(one, controls.generator(0, "random share").random(4))
    assert not np.isclose(one, controls.generator(0, "claim order").random(4)).any()
    assert not np.isclose(one, controls.generator(1, "random share").random(4)).any()


@settings(deadline=None)
@given(
    st.sampled_from(sorted(CHANGES)),
    st.integers(0, 4),
    st.lists(st.integers(0, 100), min_size=5, max_size=5).filter(any),
)
def test_every_variant_is_feasible_where_theorem_1_says_so(name, seed, gaps):
    result = controls.allocate(
        VIEWS,
        np.array(gaps) / 100,
        np.full(LAYERS, 8),
        DOMAINS,
        c_min=C_MIN,
        c_max=C_MAX,
        variant=name,
        seed=seed,
    )
    assert (result.quota.sum(axis=1) <= 8).all()


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_without_deficit_nothing_is_opened_in_any_variant(name):
    result = allocated(name, gaps=np.zeros(5))
    assert not result.quota.any()
    assert not result.share.any()
    assert "returned unchanged" in result.warnings[-1]


def test_admission_of_the_most_deficient_only():
    result = allocated(admit=2)
    assert result.share == pytest.approx([0, 0.3 / 0.51, 0, 0, 0.21 / 0.51])
    assert np.array_equal(result.deficit, GAPS)
    assert result.quota.sum() == pytest.approx((DEFAULT.capacity * COORDINATES).sum(), abs=12)


def test_without_the_representation_view_the_other_two_are_averaged_and_it_is_said():
    rest = {name: VIEWS[name] for name in ("direction", "sign")}
    result = allocated(views=rest)
    assert np.array_equal(result.conflict, conflict.conflict_score(rest, tuple(rest))[0])
    assert result.warnings == ("Conflict is the mean of these views only: direction, sign.",)
    with pytest.raises(SigmergeError, match="view_representation needs the representation view"):
        allocated("view_representation", views=rest)


@pytest.mark.parametrize(("c_min", "c_max"), [(0.5, 0.4), (-0.1, 0.4), (0.1, 1.2)])
def test_capacity_constants_out_of_range(c_min, c_max):
    with pytest.raises(SigmergeError, match="c_min ≤ c_max"):
        allocated(c_min=c_min, c_max=c_max)


def test_quotas_that_do_not_fit_name_the_layer():
    coordinates = COORDINATES.copy()
    coordinates[2] = 3
    with pytest.raises(SigmergeError, match="layer 2: the domains claim 4 of 3"):
        controls.allocate(VIEWS, GAPS, coordinates, DOMAINS, c_min=0.1, c_max=0.45)
