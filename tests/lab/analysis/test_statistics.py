"""Each statistic against SciPy, a brute-force computation or a closed form."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sigmerge.lab.analysis import statistics as ours


def test_relative_gain_is_the_mean_of_ratios_not_the_ratio_of_means() -> None:
    assert ours.relative_gain([0.1, 0.8], [0.2, 0.8]) == pytest.approx(0.5)  # (1 + 0) / 2
    assert ours.relative_gain([0.5], [0.25]) == pytest.approx(-0.5)


def exact_signed_rank(difference: np.ndarray) -> float:
    """Two-sided p by listing all sign patterns; equal sizes share their mean rank."""
    difference = difference[difference != 0]
    ranks = stats.rankdata(np.abs(difference))
    total = ranks.sum()

    def extreme(signs) -> float:
        plus = float(ranks[np.array(signs, dtype=bool)].sum())
        return max(plus, total - plus)

    seen = extreme(difference > 0)
    patterns = list(itertools.product([False, True], repeat=difference.size))
    return sum(extreme(p) >= seen for p in patterns) / len(patterns)


@pytest.mark.parametrize("seed", range(4))
def test_wilcoxon_is_exact_and_two_sided(seed: int) -> None:
    difference = np.random.default_rng(seed).normal(0.3, 1, 9)
    found = ours.wilcoxon(np.zeros(9), difference)
    assert found == pytest.approx(exact_signed_rank(difference))


@pytest.mark.parametrize("seed", range(4))
def test_wilcoxon_is_exact_with_ties_and_zeros(seed: int) -> None:
    """Against all sign patterns, and against SciPy's test, which lists them too."""
    draw = np.random.default_rng(seed)
    steps = draw.integers(-3, 5, 10)
    before = draw.integers(20, 60, 10)
    found = ours.wilcoxon(before / 48000, (before + steps) / 48000)
    assert found == pytest.approx(exact_signed_rank(steps.astype(float)))
    kept = steps[steps != 0]
    listed = stats.wilcoxon(kept, method=stats.PermutationMethod(n_resamples=2**10 + 1))
    assert found == pytest.approx(listed.pvalue)


def test_wilcoxon_with_ties_of_more_pairs_than_can_be_listed() -> None:
    steps = np.array([2.0] * 30 + [-2.0] * 5)  # all ranks equal: it is the sign test
    found = ours.wilcoxon(np.zeros(35), steps / 480)
    assert found == pytest.approx(stats.binomtest(5, 35).pvalue)


def test_wilcoxon_where_all_pairs_improve() -> None:
    before = np.linspace(0.3, 0.5, 21)
    assert ours.wilcoxon(before, before + np.linspace(0.01, 0.03, 21)) == pytest.approx(2 / 2**21)
    assert math.isnan(ours.wilcoxon(before, before))


def test_spearman_is_pearson_of_ranks_and_shares_ranks_between_ties() -> None:
    x, y = [1.0, 2.0, 2.0, 5.0, 9.0], [0.1, 0.4, 0.3, 0.2, 0.9]
    by_hand = np.corrcoef([1, 2.5, 2.5, 4, 5], [1, 4, 3, 2, 5])[0, 1]
    assert ours.spearman(x, y) == pytest.approx(by_hand)
    assert math.isnan(ours.spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(ours.spearman([1, 2], [1, 2]))


def test_fractions() -> None:
    assert ours.recovered_fraction([0.2, 0.0], [0.05, 0.05]) == pytest.approx(0.5)
    assert math.isnan(ours.recovered_fraction([0.0], [0.1]))
    assert ours.retained_fraction(0.45, 0.40, 0.60) == pytest.approx(0.25)
    assert ours.retained_fraction(0.40, 0.40, 0.60) == 0
    assert ours.retained_fraction(0.60, 0.40, 0.60) == 1
    assert math.isnan(ours.retained_fraction(0.5, 0.4, 0.4))
    assert math.isnan(ours.retained_fraction(0.5, 0.4, 0.3))  # no part of a loss is a gain
    assert math.isnan(ours.retained_fraction(0.5, 0.3, 0.1 + 0.2))  # rounding gains nothing


def test_t_interval_is_the_one_of_students_test() -> None:
    sample = [0.1, 0.4, 0.35, 0.2, 0.3]
    mean, error = np.mean(sample), np.std(sample, ddof=1) / math.sqrt(5)
    low, high = ours.t_interval(sample)
    assert (low, high) == pytest.approx((mean - 2.7764451 * error, mean + 2.7764451 * error))
    test = stats.ttest_1samp(sample, 0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((test.low, test.high))
    assert ours.t_interval([0.3, 0.3]) == (0.3, 0.3)
    assert all(map(math.isnan, ours.t_interval([0.3])))


def test_seed_summary_divides_by_n_minus_one() -> None:
    found = ours.seed_summary([1.0, 2.0, 6.0])
    assert (found.mean, found.std, found.range) == pytest.approx((3.0, math.sqrt(7.0), 5.0))
    assert math.isnan(ours.seed_summary([1.0]).std)


def test_ranks_within_cells() -> None:
    assert ours.cell_ranks({"a": 0.3, "b": 0.5, "c": 0.3}) == {"a": 2.5, "b": 1.0, "c": 2.5}
    cells = [{"a": 0.9, "b": 0.1}, {"a": 0.2, "b": 0.8}, {"a": 0.5, "b": 0.4}]
    assert ours.average_ranks(cells) == pytest.approx({"a": 4 / 3, "b": 5 / 3})
    assert ours.first_places(cells) == {"a": 2, "b": 1}
    assert ours.first_places([{"a": 0.5, "b": 0.5}]) == {"a": 1, "b": 1}


def test_what_only_rounding_tells_apart_is_equal() -> None:
    """0.1 + 0.2 is 0.30000000000000004: a rank that follows it would follow no item."""
    low, high = 0.3, 0.1 + 0.2
    assert low < high
    assert ours.spearman([1, 2, 3, 4], [low, high, 0.4, 0.5]) == ours.spearman(
        [1, 2, 3, 4], [low, low, 0.4, 0.5]
    )
    assert math.isnan(ours.spearman([1, 2, 3], [low, high, low]))
    assert ours.cell_ranks({"a": low, "b": high, "c": 0.2}) == {"a": 1.5, "b": 1.5, "c": 3.0}
    assert ours.first_places([{"a": low, "b": high, "c": 0.2}]) == {"a": 1, "b": 1, "c": 0}
    assert ours.wins([high], [low]) == ours.Count(0, 1)
    assert ours.wins([0.3 + 4e-13, 0.3 + 2e-12], [0.3]) == ours.Count(1, 2)
    assert ours.rank_preservation([low, high], [0.1, 0.2]) == ours.Count(0, 1)
    assert ours.regret([low, high, 0.2], [0.9, 0.5, 0.1]).strongest == 0
    assert ours.share_order({"a": low, "b": high, "c": 0.4}) == ["c", "a", "b"]
    tied = ours.wilcoxon([0, 0, 0.5], [low, high, 0])
    assert tied == exact_signed_rank(np.array([0.3, 0.3, -0.5]))


def test_wins_counts_every_pair_and_no_ties() -> None:
    assert ours.wins([0.5, 0.7], [0.4, 0.5, 0.9]) == ours.Count(3, 6)
    assert str(ours.Count(3, 6)) == "3 of 6"


def test_view_correlations_take_every_pair_once() -> None:
    views = {"r": [1.0, 2.0, 3.0], "p": [3.0, 2.0, 1.0], "s": [1.0, 3.0, 2.0]}
    found = ours.view_correlations(views)
    assert found == pytest.approx({("r", "p"): -1.0, ("r", "s"): 0.5, ("p", "s"): -0.5})


def test_entropy_and_gini() -> None:
    assert ours.entropy([0.25] * 4) == pytest.approx(math.log(4))
    assert ours.entropy([1.0, 0.0]) == 0
    assert ours.gini([0.2] * 5) == pytest.approx(0, abs=1e-15)
    assert ours.gini([1, 0, 0, 0, 0]) == pytest.approx(0.8)  # 1 − 1/n
    assert (ours.entropy([0, 0]), ours.gini([0, 0])) == (0, 0)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_gini_by_the_sorted_formula(values: list[float]) -> None:
    ordered, n = sorted(values), len(values)
    weighted = sum((k + 1) * v for k, v in enumerate(ordered))
    expected = 2 * weighted / (n * sum(values)) - (n + 1) / n
    assert ours.gini(values) == pytest.approx(expected, abs=1e-9)


def test_the_nine_statistics_of_an_anchor() -> None:
    found = ours.anchor_statistics([0.2, 0.5, 0.8], [0.3, 0.1, 0.0])
    assert found == pytest.approx(
        {
            "macro": 0.5,
            "gap mean": 0.4 / 3,
            "gap max": 0.3,
            "gap min": 0.0,
            "gap std": float(np.std([0.3, 0.1, 0.0], ddof=1)),
            "domains without gap": 1,
            "share entropy": -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)),
            "share gini": 0.5,
            "score range": 0.6,
        }
    )
    assert len(found) == 9
    assert ours.anchor_statistics([0.5], [0.3])["gap std"] == 0  # one domain does not deviate


def test_rank_preservation_counts_concordant_pairs() -> None:
    before, after = np.random.default_rng(5).random((2, 7))
    found = ours.rank_preservation(before, after)
    tau = stats.kendalltau(before, after).statistic  # (concordant − discordant) / all
    assert found == ours.Count(round((1 + tau) / 2 * 21), 21)
    assert ours.rank_preservation([1, 1, 2], [1, 2, 3]) == ours.Count(2, 3)
    assert ours.rank_preservation([2, 1], [1, 1]) == ours.Count(0, 1)


def test_regret_of_the_three_rules() -> None:
    """The weakest anchor before the repair is not the one that ends lowest."""
    found = ours.regret([0.5, 0.9, 0.1, 0.4], [0.8, 0.7, 0.55, 0.3])
    assert found.strongest == pytest.approx(0.1)
    assert found.random == pytest.approx((0.0 + 0.1 + 0.25 + 0.5) / 4)
    assert found.weakest == pytest.approx(0.25)


def test_shares_under_another_partition() -> None:
    primary, other = {"a": 0.6, "b": 0.3, "c": 0.1}, {"a": 0.47, "b": 0.38, "c": 0.15}
    assert ours.share_shift(primary, other) == pytest.approx(0.13)
    assert ours.share_order(primary) == ours.share_order(other) == ["a", "b", "c"]
    assert ours.share_order({"a": 0.1, "b": 0.1, "c": 0.8}) == ["c", "a", "b"]
