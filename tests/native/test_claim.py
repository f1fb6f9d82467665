import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from sigmerge._native import ReadFailed
from sigmerge.core import SAMPLE_RUN, STRIP, claim, philox, select
from sigmerge.core.dtypes import F32, MEMORY, address_of

SIZES = [1, 2, 63, 64, 65, 1000, STRIP + 1, 3 * STRIP - 1, SAMPLE_RUN + 1]

WINDOW_SIZE = 1 << 15
"""Coordinates of every member that a loop reads at a time."""


def tile(size: int, seed: int = 0) -> np.ndarray:
    """Few distinct values, zeros of both signs and denormals, as differences of bfloat16 give."""
    rng = np.random.default_rng(seed)
    values = (rng.integers(-5, 6, size) * 2.0**-13).astype(np.float32)
    rare = rng.random(size)
    values[rare < 0.1] = -0.0
    values[rare > 0.95] = 1e-42
    values[rare > 0.97] = 1e-45  # the last bit alone
    return values


def owners(size: int, seed: int = 1) -> np.ndarray:
    codes = np.array([0, 1, claim.ABOVE, claim.TIED, claim.FREE], np.uint8)
    return np.random.default_rng(seed).choice(codes, size)


def row_of(values: np.ndarray) -> np.ndarray:
    return np.array([[F32, MEMORY, address_of(values)]], np.int64)


class OneTile:
    """A block of one tile whose task vector is `score`; it keeps alive what its table points to."""

    def __init__(self, score: np.ndarray, key: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.rows = [score, np.zeros_like(score)]
        self.edges = np.array([0, score.size])
        self.table = claim.TileTable(self.edges, *map(row_of, self.rows), np.array(key, np.int64))

    def mark(
        self, owner: np.ndarray, threshold: int, before: claim.Settlement = claim.SETTLED
    ) -> tuple[int, int, float]:
        counts, mass = np.zeros((1, 2), np.int64), np.zeros(1)
        assert claim.mark(self.table, owner, 0, 1, before, threshold, counts, mass) == -1
        return int(counts[0, 0]), int(counts[0, 1]), float(mass[0])

    def admit(
        self, anchor: np.ndarray, owner: np.ndarray, form: int, scale: float, below: int = 0
    ) -> np.ndarray:
        """θ̂ where domain 1 (or 0, the same expert) may own; draws have the key (3, 4)."""
        values = np.empty_like(anchor)
        members = np.stack([row_of(row) for row in (self.rows[0], *self.rows, anchor)])
        update = claim.Admission(form, scale, np.array([0, 1]), below, np.array([[3, 4], [3, 4]]))
        found = claim.admit(update, self.edges, owner, 0, 1, members, row_of(values)[0])
        assert found == (True, True, 0)
        return values


def halves(bits: np.ndarray) -> np.ndarray:
    """Where `count_high` counts: two places for an upper half, the second if the lower is not 0."""
    return 2 * (bits >> select.LOW_BITS) + (bits % select.LOW_BINS != 0)


def pattern(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize("size", SIZES)
def test_histograms_count_free_coordinates_only(size):
    score, owner = tile(size), owners(size)
    one = OneTile(score)
    free = score[owner >= claim.ABOVE]
    for high in (0, pattern(2.0**-13) >> select.LOW_BITS):
        counted = np.zeros(select.HIGH_PLACES, np.uint32), np.zeros(select.LOW_BINS, np.uint32)
        expected = np.zeros(select.HIGH_PLACES, np.int64), np.zeros(select.LOW_BINS, np.int64)
        claim.count_high(one.table, owner, 0, 1, 1, claim.SETTLED, counted[0])
        claim.count_low(one.table, owner, 0, 1, 1, claim.SETTLED, high, counted[1])
        bits = np.abs(free).view(np.uint32)
        np.add.at(expected[0], halves(bits), 1)
        np.add.at(expected[1], bits[bits >> select.LOW_BITS == high] % select.LOW_BINS, 1)
        assert np.array_equal(counted[0], expected[0])
        assert np.array_equal(counted[1], expected[1])


def test_a_sample_counts_one_run_in_so_many():
    run = SAMPLE_RUN
    score, owner = tile(7 * run - 9), owners(7 * run - 9)
    one = OneTile(score)
    seen = np.zeros(score.size, bool)
    for first in (0, 3, 6):
        seen[first * run : (first + 1) * run] = True
    counted, expected = np.zeros((2, select.HIGH_PLACES), np.uint32)
    claim.count_high(one.table, owner, 0, 1, 3, claim.SETTLED, counted)
    bits = np.abs(score[seen & (owner >= claim.ABOVE)]).view(np.uint32)
    np.add.at(expected, halves(bits), 1)
    assert np.array_equal(counted, expected)


def test_random_bits_are_ranked_by_flat_index():
    """Also those that as a float32 are not a number."""
    draws = np.empty(5000, np.uint32)
    philox.fill((7, 8), 0, draws)
    magnitude = draws & 0x7FFFFFFF
    assert (magnitude > 0x7F800000).any()
    owner = np.full(5000, claim.FREE)
    above, _, _ = OneTile(np.zeros(5000, np.float32), (1, 7, 8)).mark(owner, 0x7F800000)
    assert np.array_equal(owner == claim.ABOVE, magnitude > 0x7F800000)
    assert above == np.sum(magnitude > 0x7F800000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 1e-42, 2.0**-13, 1.0])
def test_mark(size, threshold):
    score, owner = tile(size), owners(size)
    before = owner.copy()
    above, tied, mass = OneTile(score).mark(owner, pattern(threshold))
    free, magnitude = before >= claim.ABOVE, np.abs(score)
    is_above = free & (magnitude > np.float32(threshold))
    is_tied = free & (magnitude == np.float32(threshold))
    assert np.array_equal(owner == claim.ABOVE, is_above)
    assert np.array_equal(owner == claim.TIED, is_tied)
    assert np.array_equal(owner == claim.FREE, free & ~is_above & ~is_tied)
    assert np.array_equal(owner[~free], before[~free])
    assert (above, tied) == (is_above.sum(), is_tied.sum())
    assert mass == pytest.approx(magnitude[is_above].astype(np.float64).sum(), rel=1e-15)


def test_mass_is_added_in_lanes():
    """Sixty-four float64 lanes, then lane by lane: the order is part of the result."""
    score = np.random.default_rng(0).lognormal(0, 20, 1000).astype(np.float32)
    _, _, mass = OneTile(score).mark(np.full(1000, claim.FREE), 0)
    padded = np.concatenate([score, np.zeros(24, np.float32)]).reshape(-1, 64).astype(np.float64)
    lanes = np.zeros(64)
    for row in padded:
        lanes += row
    total = 0.0
    for lane in lanes:
        total += float(lane)
    assert mass == total


@pytest.mark.parametrize("ties", range(5))
def test_settle_admits_the_first_ties(ties):
    a, t, f = claim.ABOVE, claim.TIED, claim.FREE
    owner = np.array([t, 0, a, t, f, t, 1, a, t], np.uint8)
    marks = claim.Settlement(7, np.array([ties]), np.array([[2, 4]]))
    claim.settle(np.array([0, 9]), owner, 0, 1, marks)
    tied = [7] * ties + [255] * (4 - ties)
    assert owner.tolist() == [tied[0], 0, 7, tied[1], 255, tied[2], 1, 7, tied[3]]


def test_all_ties_are_handed_out_without_reading_behind_the_owners():
    """The page behind the owner map cannot be read: a kernel that looks there ends the process."""
    page = mmap.PAGESIZE
    room = mmap.mmap(-1, 2 * page)
    whole = np.frombuffer(room, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.c_void_p(whole.ctypes.data + page)
    assert libc.mprotect(behind, ctypes.c_size_t(page), 0) == 0
    try:
        owner = whole[page - 3 : page]
        owner[:] = [claim.TIED, claim.ABOVE, claim.TIED]
        marks = claim.Settlement(7, np.array([2]), np.array([[1, 2]]))
        claim.settle(np.array([0, 3]), owner, 0, 1, marks)
        assert owner.tolist() == [7, 7, 7]
    finally:
        libc.mprotect(behind, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_marking_settles_what_was_claimed_before(size, share):
    score, owner = tile(size), owners(size)
    found = [[np.sum(owner == claim.ABOVE), np.sum(owner == claim.TIED)]]
    before = claim.Settlement(7, np.array([int(share * found[0][1])]), np.array(found))
    settled = owner.copy()
    claim.settle(np.array([0, size]), settled, 0, 1, before)
    one, cut = OneTile(score), pattern(2.0**-13)
    if share != 0.5:  # a sample may count ties that are claimed where others of their tile are not
        for count, more in ((claim.count_high, ()), (claim.count_low, (0,))):
            places = select.LOW_BINS if more else select.HIGH_PLACES
            late, early = np.zeros((2, places), np.uint32)
            count(one.table, owner, 0, 1, 1, before, *more, late)
            count(one.table, settled, 0, 1, 1, claim.SETTLED, *more, early)
            assert np.array_equal(late, early)
    assert one.mark(owner, cut, before) == one.mark(settled, cut)
    assert np.array_equal(owner, settled)


@pytest.mark.parametrize("size", SIZES)
def test_tally(size):
    delta, owner = tile(size), owners(size)
    one, support, mass = OneTile(delta), np.zeros(1, np.int64), np.zeros(1)
    assert claim.tally(one.table, owner, 0, 1, 1, support, mass) == -1
    assert support[0] == np.count_nonzero(delta[owner == 1])
    assert mass[0] == pytest.approx(np.abs(delta[owner == 1]).astype(np.float64).sum(), rel=1e-15)


@pytest.mark.parametrize("size", SIZES)
def test_add_rounds_product_and_sum_in_float32(size):
    delta, owner = tile(size), owners(size)
    anchor = np.random.default_rng(2).normal(0, 0.02, size).astype(np.float32)
    anchor[0] = -0.0
    values = OneTile(delta).admit(anchor, owner, claim.ADD, 0.6)
    expected = np.where(owner < 2, anchor + np.float32(0.6) * delta, anchor)
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("size", SIZES)
def test_add_sparse(size):
    delta, owner = tile(size), owners(size)
    draws = np.empty(size, np.uint32)
    philox.fill((3, 4), 0, draws)
    anchor = np.full(size, -0.0, np.float32)
    drawn = map(int, draws[owner < 2][:1])  # a draw that is the bound itself keeps its entry
    for below in (0, 1 << 31, *drawn, 1 << 32):
        values = OneTile(delta).admit(anchor, owner, claim.SPARSE, 6.0, below)
        kept = (owner < 2) & (draws.astype(np.int64) >= below)
        expected = np.where(kept, anchor + np.float32(6) * delta, anchor)
        assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_replace_takes_the_experts_value_at_scale_one():
    anchor, expert = np.full(2, 1.0, np.float32), np.full(2, 1e-9, np.float32)
    owner = np.array([0, claim.FREE], np.uint8)
    values = OneTile(expert).admit(anchor, owner, claim.REPLACE, 1.0)
    assert values.tolist() == [expert[0], anchor[1]]


@pytest.mark.parametrize("size", SIZES)
def test_replace_moves_to_the_experts_value_by_the_scale(size):
    expert, owner = tile(size), owners(size)
    anchor = np.random.default_rng(2).normal(0, 0.02, size).astype(np.float32)
    values = OneTile(expert).admit(anchor, owner, claim.REPLACE, 0.25)
    expected = np.where(owner < 2, anchor + np.float32(0.25) * (expert - anchor), anchor)
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


class TileInFile:
    """The tile of a `OneTile` in a file, with nothing in memory where its table points to."""

    def __init__(self, tile: OneTile, anchor: np.ndarray, file: Path) -> None:
        rows = [*tile.rows, anchor]
        file.write_bytes(b"odd" + b"".join(row.tobytes() for row in rows))
        self.descriptor = os.open(file, os.O_RDONLY)
        starts = np.cumsum([3, *(row.nbytes for row in rows)])
        self.members = np.array([[(F32, self.descriptor, start)] for start in starts[:-1]])
        self.table = tile.table._replace(expert=self.members[0], reference=self.members[1])
        self.edges = tile.edges

    def admit(self, owner: np.ndarray, out: np.ndarray) -> claim.Admitted:
        update = claim.Admission(claim.ADD, 0.5, np.array([0]), 0, np.array([[3, 4]]))
        return claim.admit(update, self.edges, owner, 0, 1, self.members, row_of(out)[0])


@pytest.mark.parametrize("size", [1, STRIP + 1, WINDOW_SIZE, 2 * WINDOW_SIZE + 77])
def test_a_tile_in_a_file_is_the_one_in_memory(size, tmp_path):
    score, anchor, owner = tile(size), tile(size, 5), owners(size)
    here, threshold = OneTile(score), int(np.float32(2.0**-12).view(np.int32))
    there = TileInFile(here, anchor, tmp_path / "in")
    for every in (1, 2):
        found = np.zeros((2, select.HIGH_PLACES), np.uint32)
        low = np.zeros((2, select.LOW_BINS), np.uint32)
        for i, table in enumerate((here.table, there.table)):
            how = (table, owner, 0, 1, every, claim.SETTLED)
            claim.count_high(*how, found[i])
            claim.count_low(*how, threshold >> select.LOW_BITS, low[i])
        assert (found[0] == found[1]).all() and (low[0] == low[1]).all()
    for loop, given in ((claim.mark, (claim.SETTLED, threshold)), (claim.tally, (1,))):
        both = []
        for table in (here.table, there.table):
            mine, mass = owner.copy(), np.zeros(1)
            counts = np.zeros((1, 2) if loop is claim.mark else 1, np.int64)
            assert loop(table, mine, 0, 1, *given, counts, mass) == -1
            both.append((mine.tobytes(), counts.tobytes(), mass.tobytes()))
        assert both[0] == both[1]
    owner = np.where(owner == 1, np.uint8(0), owner)
    out = np.empty(size, np.float32)
    assert there.admit(owner, out) == (True, True, 0)
    assert out.tobytes() == here.admit(anchor, owner, claim.ADD, 0.5).tobytes()


def test_a_tile_that_cannot_be_read_stops_every_loop(tmp_path):
    """Also one that does not look whether all is finite."""
    size = 2 * WINDOW_SIZE
    owner, mass = np.zeros(size, np.uint8), np.zeros(1)
    upper, lower = (np.zeros(n, np.uint32) for n in (select.HIGH_PLACES, select.LOW_BINS))
    there = TileInFile(OneTile(tile(size)), tile(size, 5), tmp_path / "in")
    os.truncate(tmp_path / "in", 4 * size)
    how = (there.table, owner, 0, 1)
    for loop, given in (
        (claim.count_high, (1, claim.SETTLED, upper)),
        (claim.count_low, (1, claim.SETTLED, 0, lower)),
        (claim.mark, (claim.SETTLED, 0, np.zeros((1, 2), np.int64), mass)),
        (claim.tally, (1, np.zeros(1, np.int64), mass)),
    ):
        with pytest.raises(ReadFailed):
            loop(*how, *given)
    with pytest.raises(ReadFailed):
        there.admit(owner, np.empty(size, np.float32))
