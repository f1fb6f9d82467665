"""The compiled merge of a chunk against NumPy's float32, strip by strip and in one go."""

import itertools

import numpy as np
import pytest

from sigmerge.kernels import merge
from sigmerge.kernels.philox import fill
from sigmerge.kernels.stored import BF16, CODE, F32, address_of, members
from sigmerge.kernels.thinning import ALL, ANY_TIES
from tests.kernels.test_stored import KINDS, SIZE, make, spoil

WEIGHTS = np.array([0.3, -0.4, 0.9], np.float32)


def merged(formula, rows, *, strip=100, tile=SIZE, start=0):
    out, norms = np.full(SIZE, np.nan, np.float32), np.zeros(1)
    where = (start, SIZE, tile, strip, np.uint64(address_of(out)), F32)
    fine, stored = merge.merge(formula, *members(rows), *where, norms)
    assert fine and stored
    return out


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)))
@pytest.mark.parametrize("vectors", [True, False])
def test_sums_round_after_every_operation(kinds, vectors):
    rows = [make(kinds[i % 2], i) for i in range(4)]
    values = [wide - rows[3][1] if vectors else wide for _, wide in rows[:3]]
    total = values[0] * WEIGHTS[0]
    for value, weight in zip(values[1:], WEIGHTS[1:], strict=True):
        total = total + value * weight
    total = total / np.float32(0.7) * np.float32(1.1)
    formula = merge.formula(WEIGHTS, vectors=vectors, divisor=0.7, factor=1.1)
    stored = [raw for raw, _ in rows]
    assert np.array_equal(merged(formula, stored[: 3 + vectors]), total)
    after = (total + rows[3][1] * np.float32(-1.0)) * np.float32(0.5)
    formula = formula.plus_reference(-1.0).times(0.5)
    assert formula.reads_reference
    assert np.array_equal(merged(formula, stored), after)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_sum_reports_which_side_is_not_finite(kind, vectors, value):
    rows = [make(kind, i)[0] for i in range(4)]
    formula = merge.formula(np.array([0, -0.4, 0.9], np.float32), vectors=vectors)
    formula = formula.plus_reference(1.0)
    out = np.empty(SIZE, np.uint16)
    how = (0, SIZE, SIZE, 100, np.uint64(address_of(out)), BF16, np.zeros(1))
    for member in range(4):
        spoiled = [spoil(row, kind, value) if d == member else row for d, row in enumerate(rows)]
        assert merge.merge(formula, *members(spoiled), *how) == (False, False)
    assert merge.merge(formula, *members(rows), *how) == (True, True)
    large = [np.full(SIZE, 3e38, np.float32), *(np.zeros(SIZE, np.float32) for _ in range(3))]
    assert merge.merge(formula.times(1e10), *members(large[::-1]), *how) == (True, False)


def test_a_sum_keeps_the_sign_of_zero():
    row = np.where(np.arange(SIZE) % 2, np.float32(-0.0), np.float32(0.0))
    out = merged(merge.formula(WEIGHTS[:1], vectors=False), [row])
    assert np.array_equal(np.signbit(out), np.signbit(row))


def trimmed(cut):
    """One expert's entries from a cut on, by the loop of TIES: each other one takes seconds to
    compile, so these tests use those that operators have."""
    how = {"thin": merge.TRIM, "combine": merge.DISJOINT}
    return merge.formula(np.ones(1, np.float32), cuts=np.array([cut]), **how)


@pytest.mark.parametrize("ties", [0, 1, 5, 40, 10**6, ANY_TIES])
def test_trimming_keeps_the_first_ties(ties):
    row = (np.random.default_rng(0).integers(-4, 5, SIZE) * 0.5).astype(np.float32)
    cut = int(np.float32(1.0).view(np.uint32))
    table = np.array([[cut, ties]])
    formula, rows = trimmed(table[0]), [row, np.zeros(SIZE, np.float32)]
    tied = np.abs(row) == 1
    kept = (np.abs(row) > 1) | (tied & (np.cumsum(tied) <= ties))
    assert np.array_equal(merged(formula, rows), np.where(kept, row, np.float32(0)))
    everything = np.array([[ALL, ANY_TIES]])
    band = {"thin": merge.BAND, "combine": merge.SUM}
    rest = formula._replace(cuts=everything, outliers=table, **band)
    assert np.array_equal(merged(rest, rows), np.where(kept, np.float32(0), row))


def test_nothing_and_everything_can_be_kept():
    row = make("F32", 0)[0]
    for cut, kept in (((0x7FFFFFFF, 0), 0), ((ALL, ANY_TIES), 1)):
        rows = [row, np.zeros(SIZE, np.float32)]
        assert np.array_equal(merged(trimmed(cut), rows), row * np.float32(kept))


ENTRIES = np.array([0, -0.0, 1, -1, 0.25, -0.25, 1e-45, 3e38, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("experts", [1, 2, 3, 5])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("cancelled", [1.0, -1.0])
def test_an_election_adds_what_agrees_expert_by_expert(experts, weighted, normalize, cancelled):
    """Entries cancel, underflow and overflow, or are not numbers; shares cancel, too."""
    rows = np.random.default_rng(experts).choice(ENTRIES, (experts, SIZE))
    weights = np.array([-0.75, 0.75, 0.75, 0.3, 0.0], np.float32)[:experts]
    zeros = np.zeros(SIZE, np.float32)
    with np.errstate(all="ignore"):
        entries = rows * weights[:, None]
        sums = sum(entries if weighted else rows, zeros)
        sign = np.where(sums == 0, np.float32(cancelled), np.sign(sums))
        agree = entries * sign > 0
        total = sum(np.where(agree, entries, np.float32(0)), zeros)
        share = sum(np.where(agree, weights[:, None], np.float32(0)), zeros)
        expected = total / np.where(share == 0, np.float32(1), share) if normalize else total
    how = {"weighted": weighted, "normalize": normalize, "cancelled": cancelled}
    cuts = np.array([[ALL, ANY_TIES]] * experts)
    thin = {"thin": merge.TRIM, "cuts": cuts}
    formula = merge.formula(weights, combine=merge.DISJOINT, **thin, **how)
    out = np.empty(SIZE, np.float32)
    where = (0, SIZE, SIZE, 100, np.uint64(address_of(out)), F32, np.zeros(1))
    merge.merge(formula, *members([*rows, zeros]), *where)
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


DRAWS = np.array([[1, 2, 1 << 31]] * 3)


@pytest.mark.parametrize(
    "thin",
    [
        {"thin": merge.DROP, "draws": DRAWS, "combine": merge.DISJOINT, "normalize": True},
        {"thin": merge.PRUNE, "groups": (1, 4, 0)},
        {
            "thin": merge.RANK,
            "draws": DRAWS,
            "odds": np.array([[0.2, 0.8]] * 3),
            "axis": (20, 5, True),
        },
    ],
)
def test_strips_leave_no_trace(thin):
    rows = [make("BF16", i)[0] for i in range(4)]
    formula = merge.formula(WEIGHTS, **thin)
    whole = merged(formula, rows, strip=SIZE, start=4096)
    assert np.array_equal(merged(formula, rows, strip=100, start=4096), whole)
    assert np.array_equal(merged(formula, rows, strip=100, tile=300, start=4096), whole)


@pytest.mark.parametrize("strip", [24, 64, 1000])
def test_a_norm_is_added_in_lanes_whatever_the_strips(strip):
    row = np.random.default_rng(0).lognormal(0, 20, SIZE).astype(np.float32)
    formula, norms = merge.formula(np.ones(1, np.float32)), np.zeros(1)
    where = (0, SIZE, 600, strip, np.uint64(0), merge.NORM)
    zeros = np.zeros(SIZE, np.float32)  # members are addresses
    merge.merge(formula, *members([row, zeros]), *where, norms)
    total = 0.0
    for tile in (row[:600], row[600:]):
        lanes = np.zeros(64)
        for i, value in enumerate(tile.astype(np.float64)):
            lanes[i % 64] += abs(value)
        tile_total = 0.0
        for lane in lanes:
            tile_total += float(lane)
        total += tile_total
    assert norms[0] == total


@pytest.mark.parametrize("member", range(4))
def test_what_is_not_finite_is_reported(member):
    rows = [make("F32", i)[0] for i in range(4)]
    rows[member][SIZE - 1] = np.nan
    out = np.empty(SIZE, np.float32)
    where = (0, SIZE, SIZE, 100, np.uint64(address_of(out)), CODE[out.dtype])
    fine, _ = merge.merge(merge.formula(WEIGHTS), *members(rows), *where, np.zeros(1))
    assert not fine


RANKED = {
    "equal": np.ones(SIZE, np.float32),
    "zeros": np.zeros(SIZE, np.float32),
    "few bits": np.arange(SIZE, dtype=np.float32) % 37 - 18,
    "many bits": np.exp(np.linspace(-60, 60, SIZE, dtype=np.float32))[np.arange(SIZE) * 7 % SIZE],
}


@pytest.mark.parametrize("values", RANKED.values(), ids=RANKED)
def test_an_entry_stays_with_the_odds_of_its_rank(values):
    """The same draws as for equal odds; ranks by NumPy's stable sort."""
    length, inner, key = 20, 5, (3, 4)
    draws, drawn = np.array([[*key, 1]], np.int64), np.empty(SIZE, np.uint32)
    fill(key, 0, drawn)
    ranks = abs(values).reshape(-1, length, inner).argsort(1, kind="stable").argsort(1)
    kept = drawn / 2**32 < (0.2 + 0.6 / (length - 1) * ranks).reshape(-1)
    how = {"draws": draws, "odds": np.array([[0.2, 0.8]]), "axis": (length, inner, False)}
    formula = merge.formula(np.ones(1, np.float32), thin=merge.RANK, **how)
    zeros = np.zeros(SIZE, np.float32)
    assert SIZE % (length * inner) == 0
    assert np.array_equal(merged(formula, [values, zeros]), np.where(kept, values, 0))


def test_a_rank_keeps_as_many_draws_as_its_odds_say():
    """Of 2^32 draws: half, three quarters, all; and one where that is the odds."""
    axis, few = np.array([3, 1], np.int64), 2.0**-32
    odds = np.array([[0.5, 1.0], [few, few]])
    formula = merge.formula(np.ones(2, np.float32), thin=merge.RANK, axis=axis, odds=odds)
    by_rank, highest = merge._odds_by_rank(formula)
    assert by_rank.tolist() == [[0.5, 0.75, 1.0], [few] * 3]
    assert highest.tolist() == [[2**31 - 1, 3 * 2**30 - 1, 2**32 - 1], [0] * 3]
