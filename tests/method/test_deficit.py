import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sigmerge.method import deficit

DOMAINS = ["math", "coding", "safety"]
EXPERTS = {
    "math": {"math": 0.6, "coding": 0.2, "safety": 0.3},
    "coding": {"math": 0.7, "coding": 0.5, "safety": 0.1},
    "safety": {"math": 0.1, "coding": 0.2, "safety": 0.9},
}
ANCHOR = {"math": 0.5, "coding": 0.6, "safety": 0.4}

fractions = st.integers(0, 1000).map(lambda n: n / 1000)
gap_vectors = st.lists(fractions, min_size=1, max_size=20).map(np.array)


def table(scores):
    """A score table {expert: {domain: q}} of a square matrix."""
    names = [f"d{i}" for i in range(len(scores))]
    return names, {
        e: dict(zip(names, row, strict=True)) for e, row in zip(names, scores, strict=True)
    }


def test_strongest_may_be_another_domains_expert_own_never():
    assert deficit.strongest(EXPERTS, DOMAINS).tolist() == [0.7, 0.5, 0.9]
    assert deficit.best_scores(EXPERTS) == dict(zip(DOMAINS, [0.7, 0.5, 0.9], strict=True))
    assert deficit.own(EXPERTS, DOMAINS).tolist() == [0.6, 0.5, 0.9]
    assert deficit.deficits(EXPERTS, ANCHOR, DOMAINS) == pytest.approx([0.2, 0, 0.5])
    assert deficit.deficits(EXPERTS, ANCHOR, DOMAINS, "own") == pytest.approx([0.1, 0, 0.5])


def test_vectors_follow_the_order_of_the_domains():
    backwards = DOMAINS[::-1]
    assert deficit.deficits(EXPERTS, ANCHOR, backwards) == pytest.approx([0.5, 0, 0.2])


@given(st.lists(st.tuples(fractions, fractions), min_size=1))
def test_gap_is_what_is_missing_and_never_negative(pairs):
    reference, anchor = np.array(pairs).T
    gap = deficit.residual_gap(reference, anchor)
    for g, (q, base) in zip(gap, pairs, strict=True):
        assert g == (q - base if q > base else 0.0)


def test_a_gap_that_rounding_made_is_none():
    """Ruling 21: 0.85 as the mean of three benchmarks, summed in two orders."""
    once, twice = (0.8 + 0.9 + 0.85) / 3, (0.85 + 0.9 + 0.8) / 3
    assert once != twice
    gap = deficit.residual_gap(np.array([max(once, twice)]), np.array([min(once, twice)]))
    assert gap.tolist() == [0.0]
    assert deficit.shares(gap).tolist() == [0.0]


@pytest.mark.parametrize(("missing", "gap"), [(0.99e-9, 0.0), (1.01e-9, 1.01e-9), (-0.5, 0.0)])
def test_the_smallest_gap(missing, gap):
    assert deficit.residual_gap(np.array([missing]), np.zeros(1)).tolist() == [gap]


def test_gaps_by_name_cover_the_domains_that_both_sides_have():
    gaps = deficit.residual_gaps(
        {"one": {"x": 0.5, "y": 0.9}, "two": {"x": 0.8, "z": 1.0}}, {"y": 0.95, "x": 0.6, "w": 0.1}
    )
    assert list(gaps) == ["y", "x"]
    assert gaps == pytest.approx({"x": 0.2, "y": 0.0})
    assert deficit.residual_gaps({}, {"x": 0.5}) == {}


@given(st.lists(st.lists(fractions, min_size=3, max_size=3), min_size=4, max_size=4))
def test_gaps_by_name_are_the_deficits(rows):
    names, experts = table(rows[:-1])
    anchor = dict(zip(names, rows[-1], strict=True))
    gaps = deficit.residual_gaps(experts, anchor)
    assert list(gaps.values()) == deficit.deficits(experts, anchor, names).tolist()


@pytest.mark.parametrize(
    ("values", "order"),
    [
        ([0.2, 0.3, 0.2 + 1e-16], [1, 0, 2]),
        ([0.2, 0.2 + 0.9e-9, 0.2 + 0.4e-9], [0, 1, 2]),
        ([0.2, 0.2 + 1.1e-9], [1, 0]),
        ([0.0, 0.8e-9, 1.6e-9], [1, 2, 0]),
    ],
)
def test_equal_within_the_tolerance_keeps_the_order_given(values, order):
    assert deficit.descending(np.array(values)).tolist() == order


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=12), st.data())
def test_rounding_does_not_change_an_order(ticks, data):
    noise = st.floats(0, 4e-10)
    shaken = [n / 100 + data.draw(noise) for n in ticks]
    plain = [i for _, i in sorted((-n, i) for i, n in enumerate(ticks))]
    assert deficit.descending(np.array(shaken)).tolist() == plain


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ({"x": 0.85, "y": (0.1 + 0.2) / 3}, "level"),
        ({"x": 0.85 + 2.1e-9, "y": 0.1}, "better"),
        ({"x": 0.85 - 2.1e-9, "y": 0.1}, "worse"),
        ({"x": 0.85 + 1.9e-9, "y": 0.1}, "level"),
        ({"x": 0.95, "y": 0.0, "other": 1.0}, "level"),
        ({"x": 0.75, "y": 0.3}, "better"),
    ],
)
def test_the_verdict_on_a_mean_allows_for_rounding(after, verdict):
    assert deficit.compare(after, {"x": 0.85, "y": 0.1}) == verdict


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(
            st.lists(fractions, min_size=n, max_size=n), min_size=n + 1, max_size=n + 1
        )
    )
)
def test_strongest_deficit_is_at_least_the_own_deficit(rows):
    names, experts = table(rows[:-1])
    anchor = dict(zip(names, rows[-1], strict=True))
    strongest = deficit.deficits(experts, anchor, names)
    own = deficit.deficits(experts, anchor, names, "own")
    assert (strongest >= own).all()
    assert deficit.check_scores(experts, anchor, names) == []


@given(gap_vectors)
def test_shares_are_proportional_and_on_the_simplex(gaps):
    assume(gaps.any())
    share = deficit.shares(gaps)
    assert share.sum() == pytest.approx(1.0)
    assert share * math.fsum(gaps) == pytest.approx(gaps)
    assert np.array_equal(share == 0, gaps == 0)


@given(gap_vectors)
def test_shares_are_the_same_in_percent(gaps):
    assert deficit.shares(100 * gaps) == pytest.approx(deficit.shares(gaps))


def test_no_deficit_gives_no_share():
    assert deficit.shares(np.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@given(gap_vectors, st.integers(1, 25))
def test_most_deficient_keeps_the_largest(gaps, count):
    kept = deficit.most_deficient(gaps, count)
    assert sorted(kept, reverse=True)[:count] == sorted(gaps, reverse=True)[:count]
    assert np.count_nonzero(kept) == min(count, np.count_nonzero(gaps))
    assert ((kept == gaps) | (kept == 0)).all()


def test_most_deficient_breaks_ties_in_domain_order():
    assert deficit.most_deficient(np.array([0.2, 0.3, 0.2]), 2).tolist() == [0.2, 0.3, 0.0]
    later = 0.2 + 1e-16 * 3
    assert later > 0.2
    assert deficit.most_deficient(np.array([0.2, 0.3, later]), 2).tolist() == [0.2, 0.3, 0.0]


def changed(path, value):
    """EXPERTS and ANCHOR with one entry replaced, or removed where value is None."""
    experts = {expert: dict(row) for expert, row in EXPERTS.items()}
    anchor = dict(ANCHOR)
    row = anchor if path[0] == "anchor" else experts[path[0]]
    row[path[1]] = value
    if value is None:
        del row[path[1]]
    return experts, anchor


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("math", "coding"), None, "experts.math.coding: missing"),
        (("anchor", "safety"), None, "anchor.safety: missing"),
        (("math", "codng"), 0.1, "experts.math.codng: unknown domain"),
        (("anchor", "speed"), 0.1, "anchor.speed: unknown domain"),
        (("coding", "math"), math.nan, "experts.coding.math: nan is not a number"),
        (("coding", "math"), math.inf, "experts.coding.math: inf is not a number"),
        (("coding", "math"), "0.5", "experts.coding.math: '0.5' is not a number"),
        (("coding", "math"), True, "experts.coding.math: True is not a number"),
        (("anchor", "math"), -0.1, "anchor.math: -0.1 is below 0"),
        (("anchor", "math"), 51.2, "anchor.math: 51.2 looks like percent, other scores are fr"),
        (("anchor", "math"), 51.2, "give fractions (0.512)"),
    ],
)
def test_a_wrong_entry_is_the_only_problem_and_named(path, value, problem):
    problems = deficit.check_scores(*changed(path, value), DOMAINS)
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_table_in_percent_is_refused_entry_by_entry():
    experts = {e: {d: 100 * q for d, q in row.items()} for e, row in EXPERTS.items()}
    problems = deficit.check_scores(experts, {d: 100 * q for d, q in ANCHOR.items()}, DOMAINS)
    assert len(problems) == 12
    assert all("give fractions" in p and "other scores" not in p for p in problems)


@pytest.mark.parametrize(
    ("scores", "beside"),
    [
        ((1.5, 60.0, 0.0), False),  # just above 1 is percent already, and 0 is on every scale
        ((1.0, 60.0, 0.0), True),  # exactly 1 is a fraction
    ],
)
def test_where_percent_begins(scores, beside):
    row = dict(zip(DOMAINS, scores, strict=True))
    problems = deficit.check_scores(dict.fromkeys(DOMAINS, row), row, DOMAINS)
    assert len(problems) == 4 * sum(score > 1 for score in scores)
    assert all(("other scores are fractions" in problem) == beside for problem in problems)


def test_missing_and_unknown_experts():
    experts = {"math": EXPERTS["math"], "coding": EXPERTS["coding"], "saftey": EXPERTS["safety"]}
    problems = deficit.check_scores(experts, ANCHOR, DOMAINS)
    assert problems == [
        "experts.saftey: unknown expert, the pool has math, coding, safety",
        "experts.safety: missing",
    ]


def test_own_needs_only_each_experts_own_score():
    diagonal = {d: {d: EXPERTS[d][d]} for d in DOMAINS}
    assert deficit.check_scores(diagonal, ANCHOR, DOMAINS, "own") == []
    assert len(deficit.check_scores(diagonal, ANCHOR, DOMAINS, "strongest")) == 6
    assert deficit.check_scores({**diagonal, "math": {"coding": 0.1}}, ANCHOR, DOMAINS, "own") == [
        "experts.math.math: missing"
    ]
