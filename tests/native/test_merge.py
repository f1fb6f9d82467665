"""The compiled merge of a chunk against NumPy's float32, strip by strip and in one go."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from sigmerge import _native
from sigmerge.core import STRIP, TILE, merge
from sigmerge.core.dtypes import BF16, CODE, F16, F32, table
from sigmerge.core.merge import ALL, ANY_TIES
from sigmerge.core.philox import fill
from tests.core.test_dtypes import KINDS, SIZE, make, spoil
from tests.native.pools import NUMPY, Pool, file_target

WEIGHTS = np.array([0.3, -0.4, 0.9], np.float32)


def merged(formula, rows, *, strip=100, tile=SIZE, start=0):
    out = np.full(SIZE, np.nan, np.float32)
    where = (start, SIZE, tile, strip, target(out), np.zeros(1))
    assert merge.merge(formula, table(rows), *where)[:2] == (True, True)
    return out


def target(out, kind=None):
    return np.array([CODE[out.dtype] if kind is None else kind, -1, out.ctypes.data])


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
    how = (0, SIZE, SIZE, 100, target(out), np.zeros(1))
    for member in range(4):
        spoiled = [spoil(row, kind, value) if d == member else row for d, row in enumerate(rows)]
        assert merge.merge(formula, table(spoiled), *how)[:2] == (False, False)
    assert merge.merge(formula, table(rows), *how)[:2] == (True, True)
    large = [np.full(SIZE, 3e38, np.float32), *(np.zeros(SIZE, np.float32) for _ in range(3))]
    assert merge.merge(formula.times(1e10), table(large[::-1]), *how)[:2] == (True, False)


def test_a_sum_keeps_the_sign_of_zero():
    row = np.where(np.arange(SIZE) % 2, np.float32(-0.0), np.float32(0.0))
    out = merged(merge.formula(WEIGHTS[:1], vectors=False), [row])
    assert np.array_equal(np.signbit(out), np.signbit(row))


def trimmed(cut):
    """One expert's entries from a cut on."""
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
    where = (0, SIZE, SIZE, 100, target(out), np.zeros(1))
    merge.merge(formula, table([*rows, zeros]), *where)
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
    where = (0, SIZE, 600, strip, target(norms, merge.NORM))
    zeros = np.zeros(SIZE, np.float32)  # members are addresses
    merge.merge(formula, table([row, zeros]), *where, norms)
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
    where = (0, SIZE, SIZE, 100, target(out), np.zeros(1))
    assert not merge.merge(merge.formula(WEIGHTS), table(rows), *where)[0]


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


FORMULAS = {
    "sum": merge.formula(WEIGHTS).plus_reference(1.0),
    "values": merge.formula(WEIGHTS, vectors=False).plus_reference(0.5),
    "drop": merge.formula(WEIGHTS, thin=merge.DROP, draws=DRAWS).plus_reference(1.0),
    "elect": merge.formula(WEIGHTS, combine=merge.DISJOINT, normalize=True).plus_reference(1.0),
    "select": merge.formula(WEIGHTS, thin=merge.SELECT, cuts=np.array([[0x3F800000, 3]])),
}
WINDOW, DRAINED = 1 << 15, 1 << 18
SIZES = [0, 1, STRIP + 5, 2 * WINDOW + 77, DRAINED + WINDOW + 3]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("kinds", [[BF16] * 4, [F32] * 4, [BF16, F16, F32, BF16]])
@pytest.mark.parametrize("size", SIZES)
def test_a_merge_from_a_file_into_a_file_is_the_one_in_memory(name, kinds, size, tmp_path):
    formula, number = FORMULAS[name], np.zeros(1)
    how, kind = (0, size, TILE, STRIP), kinds[0]
    wanted = np.empty(size, NUMPY[kind])
    pool = Pool(kinds, size, tmp_path)
    made = merge.merge(formula, pool.table, *how, target(wanted, kind), number)
    assert made[:2] == (True, True)
    filed = Pool(kinds, size, tmp_path, (0, 2, 3))
    row, path = file_target(tmp_path, kind, 5)
    found = merge.merge(formula, filed.table, *how, row, number)
    assert path.read_bytes()[5:] == wanted.tobytes()
    assert found == (True, True, _native.checksum(wanted))
    os.close(row[1])


@pytest.mark.parametrize("name", FORMULAS)
def test_faults_of_files_are_errors(name, tmp_path):
    size, number = 2 * WINDOW, np.zeros(1)
    pool, out = Pool([BF16] * 4, size, tmp_path, (0, 1, 2, 3)), np.empty(size, np.uint16)
    os.truncate(tmp_path / "members", (tmp_path / "members").stat().st_size - 2)
    with pytest.raises(_native.ReadFailed) as failed:
        merge.merge(FORMULAS[name], pool.table, 0, size, TILE, STRIP, target(out, BF16), number)
    assert failed.value.shrank and failed.value.descriptor == pool.file.fileno()
    pool = Pool([BF16] * 4, size, tmp_path)
    if Path("/dev/full").exists():
        row = np.array([BF16, os.open("/dev/full", os.O_RDWR), 0])
        with pytest.raises(_native.WriteFailed, match="No space left"):
            merge.merge(FORMULAS[name], pool.table, 0, size, TILE, STRIP, row, number)
        os.close(row[1])


@pytest.mark.parametrize("name", ["sum", "values", "elect"])
def test_a_value_that_is_not_finite_is_not_written(name, tmp_path):
    size = 2 * DRAINED
    pool = Pool([F32] * 4, size, tmp_path)
    pool.raw[0][3] = np.inf
    row, path = file_target(tmp_path, F32, 0)
    made = merge.merge(FORMULAS[name], pool.table, 0, size, TILE, STRIP, row, np.zeros(1))
    assert made[:2] == (False, False) and path.stat().st_size == 0
    os.close(row[1])


@pytest.mark.parametrize("way", ["drop", "prune", "trim"])
@pytest.mark.parametrize("size", [SIZE, 3 * STRIP + 1])
def test_norms_before_and_after_and_what_stays(way, size, tmp_path):
    """Marks let the same merge be made without thinning again."""
    thin = {
        "drop": {"thin": merge.DROP, "draws": DRAWS},
        "prune": {"thin": merge.PRUNE, "groups": (1, 4, False)},
        "trim": {"thin": merge.TRIM, "cuts": np.array([[0x3F800000, 5]] * 3)},
    }[way]
    formula = merge.formula(WEIGHTS, **thin)
    pool, norms = Pool([BF16] * 4, size, tmp_path, (1,)), np.zeros((2, 3))
    strips = -(-size // STRIP)
    marks = np.zeros((strips, 3, STRIP // 8), np.uint8)
    assert merge.norms_of_thinning(pool.table, 7, size, formula, TILE, STRIP, norms, marks)
    outs = [np.empty(size, np.float32) for _ in range(2)]
    again = merge.formula(WEIGHTS, thin=merge.MARKED, marks=marks)
    for out, one in zip(outs, (formula, again), strict=True):
        merge.merge(one, pool.table, 7, size, TILE, STRIP, target(out), np.zeros(1))
    assert np.array_equal(*outs) and outs[0].any()
    alone, zeros = merge.formula(np.ones(1, np.float32)), np.zeros(size, np.float32)
    for d in range(3):
        own, delta = np.zeros(1), pool.values[d] - pool.values[3]
        where = (0, size, TILE, STRIP, target(own, merge.NORM))
        merge.merge(alone, table([delta, zeros]), *where, own)
        assert norms[0, d] == own[0]
        assert 0 < norms[1, d] < norms[0, d]


def rounded(values):
    return np.asarray(values, np.float32)


def by_numpy(formula, rows, base, lasts):
    """A formula of several experts, coordinate by coordinate as the operators' papers say it."""
    vectors = [rounded(row - base) if formula.vectors else row for row in rows]
    for d, row in enumerate(vectors):
        if formula.thin == merge.TRIM and formula.cuts[d, 0] != ALL:
            bits = row.view(np.uint32) & 0x7FFFFFFF
            tied = bits == formula.cuts[d, 0]
            kept = (bits > formula.cuts[d, 0]) | (tied & (np.cumsum(tied) <= formula.cuts[d, 1]))
            row = np.where(kept, row, np.float32(0))
        elif formula.thin == merge.DROP and formula.draws[d, 2] != ALL:
            row = np.where(lasts[d] < formula.draws[d, 2], row, np.float32(0))
        vectors[d] = rounded(rounded(row * formula.rescale[d, 0]) / formula.rescale[d, 1])
    entries = [rounded(row * weight) for row, weight in zip(vectors, formula.weights, strict=True)]
    if formula.combine == merge.SUM:
        out = sum(entries[1:], entries[0])
    elif formula.combine == merge.OVERLAPS:
        total = sum(entries[1:], entries[0])
        agree = [((e > 0) & (total >= 0)) | ((e < 0) & (total < 0)) for e in entries]
        count = sum(rounded(a) for a in agree)
        chosen = sum((np.where(a, e, np.float32(0)) for a, e in zip(agree, entries, strict=True)),
                     np.zeros_like(total))  # fmt: skip
        out = np.where(count > 0, chosen / np.maximum(count, np.float32(1)), np.float32(0))
    else:
        voting = entries if formula.combine == merge.DISJOINT and formula.weighted else vectors
        sums = sum(voting[1:], voting[0])
        mean = formula.combine == merge.AGREEING
        zero = np.float32(1) if mean else np.float32(formula.cancelled)
        sign = np.where(sums == 0, zero, np.sign(sums))
        agree = [(v if mean else e) * sign > 0 for v, e in zip(vectors, entries, strict=True)]
        pairs = list(zip(agree, entries, formula.weights, strict=True))
        total = sum((np.where(a, e, np.float32(0)) for a, e, _ in pairs), np.zeros_like(sums))
        share = sum((np.where(a, w, np.float32(0)) for a, _, w in pairs), np.zeros_like(sums))
        if mean:
            out = total / np.maximum(share, np.float32(1e-6))
        else:
            divisor = np.where(share == 0, np.float32(1), share)
            out = rounded(total / divisor) if formula.normalize else total
    for divisor, factor, share in formula.after:
        out = rounded(rounded(out / divisor) * factor)
        out = rounded(out + rounded(base * share)) if share else out
    return rounded(out)


@pytest.mark.parametrize("seed", range(60))
def test_any_formula_is_what_numpy_makes_of_it(seed, tmp_path):
    rng = np.random.default_rng(seed)
    experts, size = int(rng.integers(1, 7)), int(rng.integers(1, 3 * STRIP))
    kinds = rng.integers(0, 3, experts + 1).tolist()
    pool = Pool(kinds, size, tmp_path, tuple(range(0, experts + 1, 2)), seed)
    thin = int(rng.choice([merge.KEEP_ALL, merge.TRIM, merge.DROP]))
    draws = rng.integers(0, 1 << 32, (experts, 3))
    draws[rng.random(experts) < 0.2, 2] = ALL
    middle = [
        np.sort(np.abs(row - pool.values[-1]).view(np.uint32))[size // 2]
        for row in pool.values[:-1]
    ]
    cuts = np.column_stack([middle, rng.integers(0, 4, experts)]).astype(np.int64)
    lasts = [np.empty(size, np.uint32) for _ in range(experts)]
    for own, into in zip(draws, lasts, strict=True):
        fill((int(own[0]), int(own[1])), 11, into)
    formula = merge.formula(
        rng.normal(0, 1, experts).astype(np.float32),
        vectors=bool(rng.integers(2)) or thin == merge.TRIM,
        thin=thin, cuts=cuts, draws=draws,
        rescale=rng.choice([1, 0.5, 3], (experts, 2)).astype(np.float32),
        combine=int(rng.integers(0, 4)),
        weighted=rng.integers(2), normalize=rng.integers(2), cancelled=rng.choice([-1, 1]),
        divisor=rng.choice([1, 3]), factor=rng.choice([1, 0.7]),
    ).plus_reference(float(rng.choice([1, 0.25])))  # fmt: skip
    out = np.empty(size, np.float32)
    members = (11, size, TILE, STRIP, target(out), np.zeros(1))
    assert merge.merge(formula, pool.table, *members)[:2] == (True, True)
    expected = by_numpy(formula, pool.values[:-1], pool.values[-1], lasts)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("more", [0, 1])
def test_an_entry_stays_if_its_draw_lies_below_its_odds(more):
    drawn, values, out = np.empty(1, np.uint32), np.ones(1, np.float32), np.empty(1, np.float32)
    _native.draw(3, 4, 0, drawn)
    odds = np.full((1, 2), (int(drawn[0]) + more) / 2**32)
    draws = np.array([[3, 4, 1]])
    formula = merge.formula(
        np.ones(1, np.float32), vectors=False, thin=merge.RANK, draws=draws, odds=odds
    )
    merge.merge(formula, table([values]), 0, 1, TILE, STRIP, target(out), np.zeros(1))
    assert out[0] == more
