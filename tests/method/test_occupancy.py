"""Claiming against the brute-force oracle, and Theorem 1 statement by statement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.core import SAMPLE_RUN, TILE, dtypes, philox
from sigmerge.core.claim import MAX_DOMAINS, admit
from sigmerge.core.dtypes import CODE, F32, address_of
from sigmerge.method import occupancy
from sigmerge.method.occupancy import Update, admission, claim, edges_of
from tests.oracles import oracle_occupancy as oracle

FREE = 255
NASTY = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-13, -(2.0**-13), 3 * 2.0**-13, 1.0, -1.0, 3e38]


@dataclass(frozen=True)
class Pool:
    """A block in memory, stored as float32 or bfloat16; without a reference, it is zero."""

    experts: np.ndarray
    tiles: Sequence[tuple[int, int]]
    reference: np.ndarray | None = None
    index: int = 3

    @property
    def domains(self) -> list[str]:
        return [f"d{domain}" for domain in range(len(self.experts))]

    @property
    def size(self) -> int:
        return int(self.experts.shape[1])

    @property
    def deltas(self) -> np.ndarray:
        return self.experts if self.reference is None else self.experts - self.reference

    @cached_property
    def members(self) -> list[np.ndarray]:
        reference = np.zeros_like(self.experts[0]) if self.reference is None else self.reference
        return [np.ascontiguousarray(row) for row in (*self.experts, reference)]

    @cached_property
    def sources(self) -> np.ndarray:
        return np.stack([rows_of(row, self.tiles) for row in self.members])

    def not_finite(self, domain: int, tile: int) -> None:
        raise ArithmeticError(f"{self.domains[domain]} in tile {tile}")


def rows_of(row: np.ndarray, tiles: Sequence[tuple[int, int]]) -> np.ndarray:
    """Where the tiles of a member in memory lie."""
    places = [address_of(row) + row.itemsize * start for start, _ in tiles]
    return np.array([(CODE[row.dtype], -1, place) for place in places], np.int64)


def cut(size: int, at: Sequence[int]) -> list[tuple[int, int]]:
    """Tiles of a block that is cut at these places."""
    edges = [0, *sorted(set(at) - {0, size}), size]
    return list(itertools.pairwise(edges))


def even(size: int, tile: int) -> list[tuple[int, int]]:
    return cut(size, range(0, size, tile))


def stored(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as bit patterns."""
    raw = np.empty(values.size, np.uint16)
    assert dtypes.NARROW["BF16"](values.astype(np.float32).ravel(), raw)
    return raw.reshape(values.shape)


def wide(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def bf16_members(domains: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Experts and reference as bfloat16 bit patterns."""
    rng = np.random.default_rng(seed)
    reference = stored(rng.normal(0, 0.02, size))
    experts = [stored(wide(reference) + rng.normal(0, 5e-4, size)) for _ in range(domains)]
    return np.stack(experts), reference


def bf16_pool(domains: int, size: int, seed: int = 0) -> np.ndarray:
    """Task vectors of bfloat16 experts: few distinct values, many of them zero."""
    experts, reference = bf16_members(domains, size, seed)
    return wide(experts) - wide(reference)


@st.composite
def pools(draw, max_domains=10, max_size=40, values=None):
    """(deltas, order, quota, tiles): task vectors of some values, any feasible quotas and tiling.

    To draw every entry by itself takes longer than to claim it.
    """
    domains = draw(st.integers(1, max_domains))
    size = draw(st.integers(1, max_size))
    if values is None:
        values = st.sampled_from(NASTY) | st.floats(width=32, allow_nan=False, allow_infinity=False)
    some = np.array(draw(st.lists(values, min_size=1, max_size=20)), np.float32)
    picked = draw(st.binary(min_size=domains * size, max_size=domains * size))
    deltas = some[np.frombuffer(picked, np.uint8) % some.size].reshape(domains, size)
    order = draw(st.permutations(range(domains)))
    quota, left = [0] * domains, size
    for domain in draw(st.permutations(range(domains))):
        quota[domain] = draw(st.integers(0, left))
        left -= quota[domain]
    tiles = cut(size, draw(st.lists(st.integers(0, size), max_size=6)))
    return deltas, order, quota, tiles


def masks(claims: occupancy.Claims) -> list[frozenset[int]]:
    return [
        frozenset(np.flatnonzero(claims.owner == domain).tolist())
        for domain in range(len(claims.claimed))
    ]


# Against the oracle


@settings(max_examples=60, deadline=None)
@given(pools())
def test_owner_map_is_the_oracles(pool):
    deltas, order, quota, tiles = pool
    claims = claim(Pool(deltas, tiles), order, quota)
    assert np.array_equal(claims.owner, oracle.claim(deltas, order, quota))


@pytest.mark.parametrize("domains", [1, 5, 20])
@pytest.mark.parametrize("capacity", [0.05, 0.45, 0.97, 1.0])
def test_massive_ties(domains, capacity):
    size = 40_000
    deltas = bf16_pool(domains, size)
    share = np.linspace(2, 1, domains) / np.linspace(2, 1, domains).sum()
    quota = np.floor(capacity * share * size).astype(int).tolist()
    if capacity == 1:
        quota[-1] = size - sum(quota[:-1])
    order = range(domains)
    expected = oracle.claim(deltas, order, quota)
    claims = claim(Pool(deltas, even(size, 777)), order, quota)
    assert np.array_equal(claims.owner, expected)
    for domain, mask in enumerate(masks(claims)):
        assert claims.mass[domain] == pytest.approx(oracle.mass(deltas, domain, mask), rel=1e-14)
        assert claims.support[domain] == np.count_nonzero(deltas[domain, sorted(mask)])


@pytest.mark.parametrize("mask_seed", [None, 1])
def test_bfloat16_is_claimed_as_stored(mask_seed):
    """Tiles of many runs, so that thresholds are guessed from a sample."""
    size = 40 * SAMPLE_RUN + 1234
    experts, reference = bf16_members(4, size)
    quota = [size // 5, size // 7, size // 3, 0]
    order = [2, 0, 3, 1]
    tiles = cut(size, [999, 999 + 17 * SAMPLE_RUN])
    raw = claim(Pool(experts, tiles, reference), order, quota, mask_seed=mask_seed)
    deltas = wide(experts) - wide(reference)
    widened = claim(Pool(deltas, tiles), order, quota, mask_seed=mask_seed)
    assert np.array_equal(raw.owner, widened.owner)
    assert (raw.support, raw.mass) == (widened.support, widened.mass)
    if mask_seed is None:
        assert np.array_equal(raw.owner, oracle.claim(deltas, order, quota))
    bf16 = Pool(experts, tiles, reference)
    values = updated(bf16, raw.owner, np.zeros(size, np.float32), Update(1.0, "replace"))
    for domain in range(3):
        mine = raw.owner == domain
        assert np.array_equal(values[mine], wide(experts)[domain, mine])


@pytest.mark.parametrize("kind", [np.uint16, np.float32])
@pytest.mark.parametrize("member", ["expert", "reference"])
@pytest.mark.parametrize("mask_seed", [None, 1])
def test_what_is_not_finite_is_told(kind, member, mask_seed):
    experts, reference = bf16_members(2, 3 * SAMPLE_RUN)
    if kind == np.float32:
        experts, reference = wide(experts), wide(reference)
    bad = experts[1] if member == "expert" else reference
    bad[2 * SAMPLE_RUN + 5] = 0x7F80 if kind == np.uint16 else np.nan
    pool = Pool(experts, even(3 * SAMPLE_RUN, 2 * SAMPLE_RUN), reference)
    told = "d1 in tile 1" if member == "expert" else "d0 in tile 1"
    with pytest.raises(ArithmeticError, match=told):
        claim(pool, [0, 1], [10, 10], mask_seed=mask_seed)


def test_ties_go_to_the_lowest_flat_index_across_tiles_and_signs():
    deltas = np.array([[1.0, -0.0, -2.0, 0.0, 1.0, -1.0, -0.0, 1.0]], np.float32)
    claims = claim(Pool(deltas, even(8, 3)), [0], [3])
    assert np.flatnonzero(claims.owner == 0).tolist() == [0, 2, 4]
    claims = claim(Pool(deltas, even(8, 3)), [0], [6])
    assert np.flatnonzero(claims.owner == 0).tolist() == [0, 1, 2, 4, 5, 7]
    assert (claims.claimed, claims.support, claims.mass) == ((6,), (5,), (6.0,))


def test_denormals_are_told_from_zero():
    deltas = np.array([[0.0, 1e-45, -3e-45, -0.0]], np.float32)
    claims = claim(Pool(deltas, [(0, 4)]), [0], [2])
    assert claims.owner.tolist() == [FREE, 0, 0, FREE]
    assert claims.support == (2,)


def test_one_coordinate():
    claims = claim(Pool(np.zeros((2, 1), np.float32), [(0, 1)]), [1, 0], [0, 1])
    assert claims.owner.tolist() == [1]
    assert claims.support == (0, 0)


@pytest.mark.parametrize("guess", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_wrong_guess_is_mended(kind, guess):
    """The runs that are sampled hold one magnitude alone, which the rest of the block denies.

    With 0 and 1 too much lies above the guess, with 5 too little is at it or above.
    """
    size = 2 * occupancy.SAMPLE * SAMPLE_RUN
    deltas = np.full((1, size), 2.0, np.float32)
    deltas[0].reshape(-1, SAMPLE_RUN)[:: occupancy.SAMPLE] = guess
    wanted = size // 2
    pool = Pool(deltas if kind == "float32" else stored(deltas), [(0, size)])
    claims = claim(pool, [0], [wanted])
    assert np.array_equal(claims.owner, oracle.claim(deltas, [0], [wanted]))
    assert claims.mass[0] == pytest.approx(oracle.mass(deltas, 0, masks(claims)[0]))
    assert claims.support == (wanted,)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_guess_is_taken_up_to_its_last_tie(more):
    """Quotas around the edge between two magnitudes, of which the sample sees both."""
    size = 2 * occupancy.SAMPLE * SAMPLE_RUN
    deltas = np.tile(np.array([1.0, 3.0], np.float32), size // 2)[None]
    wanted = size // 2 + more
    claims = claim(Pool(deltas, [(0, size)]), [0], [wanted])
    assert np.array_equal(claims.owner, oracle.claim(deltas, [0], [wanted]))
    assert claims.mass[0] == oracle.mass(deltas, 0, masks(claims)[0])


@pytest.mark.parametrize("part", [4, 2])
def test_a_right_guess_saves_the_exact_passes(monkeypatch, part):
    """The quota's last entry is one of many equal ones, or their last, which the sample finds."""
    passes, threshold = [], occupancy._Step.threshold

    def watched(step, every):
        passes.append(every)
        return threshold(step, every)

    monkeypatch.setattr(occupancy._Step, "threshold", watched)
    size = 2 * occupancy.SAMPLE * SAMPLE_RUN
    deltas = np.tile(np.array([1.0, 3.0], np.float32), size // 2)[None]
    claim(Pool(deltas, [(0, size)]), [0], [size // part])
    assert passes == [occupancy.SAMPLE]


def test_the_exact_threshold_reads_every_run():
    """No value repeats, so no guess is worth a try; the large ones lie in every second run."""
    size = 4 * SAMPLE_RUN
    deltas = np.arange(1, size + 1, dtype=np.float32)[None]
    deltas[0].reshape(-1, SAMPLE_RUN)[1::2] += size
    claims = claim(Pool(deltas, [(0, size)]), [0], [size // 3])
    assert np.array_equal(claims.owner, oracle.claim(deltas, [0], [size // 3]))


def test_as_many_domains_as_an_owner_map_has_names():
    most = int(MAX_DOMAINS)
    deltas = np.eye(most, dtype=np.float32)
    claims = claim(Pool(deltas, [(0, most)]), range(most), [1] * most)
    assert claims.owner.tolist() == list(range(most))


# Theorem 1


@settings(max_examples=60, deadline=None)
@given(pools())
def test_masks_are_disjoint_and_of_the_quotas_size(pool):
    deltas, order, quota, tiles = pool
    claims = claim(Pool(deltas, tiles), order, quota)
    sets = masks(claims)
    assert [len(mask) for mask in sets] == quota == list(claims.claimed)
    assert len(frozenset().union(*sets)) == sum(quota)
    assert np.count_nonzero(claims.owner == FREE) == deltas.shape[1] - sum(quota)


@settings(max_examples=60, deadline=None)
@given(pools())
def test_support_bounds(pool):
    deltas, order, quota, tiles = pool
    claims = claim(Pool(deltas, tiles), order, quota)
    for domain, mask in enumerate(masks(claims)):
        chosen = deltas[domain, sorted(mask)]
        assert claims.support[domain] == np.count_nonzero(chosen) <= quota[domain]
        if chosen.all():
            assert claims.support[domain] == quota[domain]
    assert sum(claims.support) <= sum(quota)


@settings(max_examples=60, deadline=None)
@given(pools(max_domains=3, max_size=9, values=st.integers(-4, 4).map(float)))
def test_no_other_mask_admits_more_mass_at_its_step(pool):
    deltas, order, quota, tiles = pool
    claims = claim(Pool(deltas, tiles), order, quota)
    sets, free = masks(claims), frozenset(range(deltas.shape[1]))
    for domain in order:
        best = max(
            oracle.mass(deltas, domain, other)
            for other in oracle.masks_of_size(sorted(free), quota[domain])
        )
        assert claims.mass[domain] == oracle.mass(deltas, domain, sets[domain]) == best
        free -= sets[domain]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_unique_lexicographic_maximiser_under_strict_separation(data):
    size, domains = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    # Distinct magnitudes within a domain separate every cutoff.
    rows = [data.draw(st.permutations(range(1, size + 1))) for _ in range(domains)]
    deltas = np.array(rows, np.float32) * data.draw(st.sampled_from([1, -1]))
    order = data.draw(st.permutations(range(domains)))
    quota = [size // (domains + 1)] * domains
    claims = claim(Pool(deltas, [(0, size)]), order, quota)

    def utility(family: Sequence[frozenset[int]]) -> tuple[float, ...]:
        return tuple(oracle.mass(deltas, domain, family[domain]) for domain in order)

    ours = tuple(masks(claims))
    for family in oracle.families(size, quota):
        theirs = utility(family)
        assert family == ours or theirs < utility(ours)
        # Pareto efficiency: nobody gains without somebody losing.
        pairs = list(zip(theirs, utility(ours), strict=True))
        assert any(a < b for a, b in pairs) or all(a == b for a, b in pairs)


@settings(max_examples=60, deadline=None)
@given(
    domains=st.sampled_from([5, 10, 20]),
    capacity=st.floats(0.1, 0.45),
    size=st.integers(35, 400),
    seed=st.integers(0, 99),
)
def test_available_set_does_not_shrink_with_the_pool(domains, capacity, size, seed):
    """Scaling to more domains: |R_r|/n > 1 − C − m₊/n at every step, by the masks themselves."""
    rng = np.random.default_rng(seed)
    share = np.sort(rng.dirichlet(np.ones(domains)))[::-1]
    quota = [math.ceil(capacity * part * size) for part in share]
    assert (1 - capacity) * size >= domains - 1
    assert capacity * size <= sum(quota) * (1 + 1e-12) <= capacity * size + domains <= size + 1
    deltas = rng.integers(-3, 4, (domains, size)).astype(np.float32)
    claims = claim(Pool(deltas, even(size, 50)), range(domains), quota)
    taken = 0
    for mask in masks(claims):
        assert (size - taken) / size > 1 - capacity - domains / size
        taken += len(mask)


# Tiles, threads, rounds


@settings(max_examples=60, deadline=None)
@given(pools(max_domains=4), st.lists(st.integers(0, 60), max_size=8), st.none() | st.just(5))
def test_tiling_does_not_matter(pool, places, mask_seed):
    deltas, order, quota, tiles = pool
    size = deltas.shape[1]
    other = cut(size, [place for place in places if place < size])
    first = claim(Pool(deltas, tiles), order, quota, mask_seed=mask_seed)
    second = claim(Pool(deltas, other), order, quota, mask_seed=mask_seed)
    assert np.array_equal(first.owner, second.owner)
    assert first.support == second.support
    # Sums are rounded tile by tile, so only they may differ, in the last place.
    assert first.mass == pytest.approx(second.mass, rel=1e-14)


@pytest.mark.parametrize("mask_seed", [None, 1])
def test_threads_do_not_matter(mask_seed):
    size = 3 * TILE + 12_345
    pool = Pool(bf16_pool(3, size), even(size, TILE // 8))
    quota = [size // 5, size // 7, size // 3]
    alone = claim(pool, [2, 0, 1], quota, mask_seed=mask_seed)
    with ThreadPoolExecutor(4) as threads:
        together = claim(pool, [2, 0, 1], quota, mask_seed=mask_seed, run=threads.map)
    assert np.array_equal(alone.owner, together.owner)
    assert alone.support == together.support
    assert alone.mass == together.mass


def test_tiles_go_to_the_threads_in_few_parts():
    """A call of a kernel costs more than a short tile."""
    parts = []

    def run(task, some):
        handed = list(some)
        parts.append(len(handed))
        assert handed[0][0] == 0 and handed[-1][1] == len(pool.tiles)
        return map(task, handed)

    pool = Pool(bf16_pool(2, 4000), even(4000, 20))
    claims = claim(pool, [1, 0], [1200, 800], run=run)
    assert np.array_equal(claims.owner, claim(pool, [1, 0], [1200, 800]).owner)
    assert len(pool.tiles) == 200
    counted, marked = -(-200 // occupancy.COUNTING.least), -(-200 // occupancy.MARKING.least)
    assert counted < occupancy.COUNTING.most and marked < occupancy.MARKING.most
    # A sample and the marks of each, and what the last claimed.
    assert parts == [counted, marked, counted, marked, marked]


def test_a_large_block_is_cut_into_no_more_parts(monkeypatch):
    monkeypatch.setattr(occupancy, "MARKING", occupancy.Parts(7, 2))
    parts = []
    pool = Pool(bf16_pool(1, 1000), even(1000, 20))
    claim(
        pool,
        [0],
        [300],
        run=lambda task, some: parts.append(given := list(some)) or map(task, given),
    )
    assert [len(some) for some in parts[1:]] == [7, 7]


@pytest.mark.parametrize("mask_seed", [None, 1])
def test_a_second_round_claims_from_what_is_left(mask_seed):
    size = 5000
    deltas = bf16_pool(3, size)
    pool = Pool(deltas, even(size, 700))
    first = claim(pool, [0, 1, 2], [900, 500, 0], mask_seed=mask_seed)
    before = first.owner.copy()
    second = claim(pool, [2, 0, 1], [300, 0, 800], owner=first.owner, mask_seed=mask_seed)
    taken = before != FREE
    assert second.owner is first.owner
    assert np.array_equal(second.owner[taken], before[taken])
    fresh = np.where(taken, FREE, second.owner)
    assert [np.count_nonzero(fresh == domain) for domain in range(3)] == [300, 0, 800]
    for domain in range(3):
        chosen = deltas[domain, fresh == domain]
        assert second.support[domain] == np.count_nonzero(chosen)
        assert second.mass[domain] == pytest.approx(
            np.abs(chosen).astype(np.float64).sum(), rel=1e-14
        )
    if mask_seed is None:
        left = np.flatnonzero(~taken)
        expected = oracle.claim(deltas[:, left], [2, 0, 1], [300, 0, 800])
        assert np.array_equal(second.owner[left], expected)


def test_random_mask_is_the_top_of_its_draws():
    size = 3000
    deltas = bf16_pool(2, size)
    quota = [1000, 700]
    claims = claim(Pool(deltas, even(size, 401)), [1, 0], quota, mask_seed=9)
    draws = np.empty((2, size), np.uint32)
    for domain, name in enumerate(["d0", "d1"]):
        philox.fill(philox.key_of(9, "mask", "3", name), 0, draws[domain])
    expected = oracle.claim(draws & 0x7FFFFFFF, [1, 0], quota)
    assert np.array_equal(claims.owner, expected)
    for domain, mask in enumerate(masks(claims)):
        assert claims.support[domain] == np.count_nonzero(deltas[domain, sorted(mask)])
        assert claims.mass[domain] == pytest.approx(oracle.mass(deltas, domain, mask), rel=1e-14)


def test_random_masks_differ_by_seed_and_block():
    deltas = bf16_pool(1, 2000)
    tiles = [(0, 2000)]
    found = [
        claim(Pool(deltas, tiles, index=index), [0], [600], mask_seed=seed).owner.tobytes()
        for index, seed in [(0, 0), (0, 1), (1, 0)]
    ]
    assert len(set(found)) == 3


# What is wrong


def test_a_quota_beyond_what_is_free_names_layer_and_domain():
    pool = Pool(np.ones((2, 10), np.float32), [(0, 10)])
    owner = np.full(10, FREE, np.uint8)
    with pytest.raises(ValueError, match=r"layer 3: domain 'd1' is to claim 5 .* 4 of 10 are free"):
        claim(pool, [0, 1], [6, 5], owner=owner)
    assert (owner == FREE).all()
    with pytest.raises(ValueError, match="'d0' is to claim -1"):
        claim(pool, [0, 1], [-1, 5])


@pytest.mark.parametrize(("order", "quota"), [([0], [1]), ([0, 0], [1, 1]), ([0, 1], [1, 1, 1])])
def test_order_and_quota_must_name_every_domain(order, quota):
    pool = Pool(np.ones((2, 10), np.float32), [(0, 10)])
    with pytest.raises(ValueError, match="each of the 2 domains once"):
        claim(pool, order, quota)


def test_too_many_domains():
    pool = Pool(np.ones((254, 1), np.float32), [(0, 1)])
    with pytest.raises(ValueError, match="at most 253"):
        claim(pool, range(254), [0] * 254)


def test_owner_map_of_another_block():
    pool = Pool(np.ones((1, 4), np.float32), [(0, 4)])
    with pytest.raises(ValueError, match="has 3 coordinates, not 4"):
        claim(pool, [0], [1], owner=np.full(3, FREE, np.uint8))


# The update


def updated(pool: Pool, owner: np.ndarray, anchor: np.ndarray, update: Update) -> np.ndarray:
    table = np.concatenate([pool.sources, rows_of(anchor, pool.tiles)[None]])
    values = np.empty_like(anchor)
    found = admit(
        admission(pool, [0, 1, 2], update), edges_of(pool), owner, 0, len(pool.tiles), table,
        np.array([F32, -1, address_of(values)], np.int64),
    )  # fmt: skip
    assert found.fine and found.stored
    return values


@pytest.fixture
def repaired() -> tuple[Pool, np.ndarray, np.ndarray]:
    """(pool, anchor, owner map) with two domains that own something and one that does not."""
    size = 5000
    deltas = bf16_pool(3, size)
    reference = np.random.default_rng(5).normal(0, 0.02, size).astype(np.float32)
    pool = Pool(reference + deltas, even(size, 701), reference)
    anchor = np.random.default_rng(6).normal(0, 0.02, size).astype(np.float32)
    return pool, anchor, claim(pool, [0, 1, 2], [1500, 0, 900]).owner


def test_add(repaired):
    pool, anchor, owner = repaired
    values = updated(pool, owner, anchor, Update(0.6))
    assert np.allclose(values, oracle.add(anchor, pool.deltas, owner, 0.6), rtol=1e-6, atol=1e-9)
    untouched = owner == FREE
    assert values[untouched].tobytes() == anchor[untouched].tobytes()


def test_sparse_drops_by_flat_index_and_rescales(repaired):
    pool, anchor, owner = repaired
    update = Update(0.6, "sparse", drop=0.75, seed=4)
    values = updated(pool, owner, anchor, update)
    for domain in (0, 2):
        draws = np.empty(pool.size, np.uint32)
        philox.fill(philox.key_of(4, "sparse", "3", f"d{domain}"), 0, draws)
        kept = (owner == domain) & (draws >= 0.75 * 2**32)
        dropped = (owner == domain) & ~kept
        assert abs(kept.sum() / (owner == domain).sum() - 0.25) < 0.06
        assert np.array_equal(values[dropped], anchor[dropped])
        expected = anchor[kept] + np.float32(2.4) * pool.deltas[domain, kept]
        assert np.array_equal(values[kept], expected)
    one_tile = Pool(pool.deltas, [(0, pool.size)])
    assert np.array_equal(values, updated(one_tile, owner, anchor, update))


def test_sparse_without_dropping_is_add(repaired):
    pool, anchor, owner = repaired
    sparse = updated(pool, owner, anchor, Update(0.6, "sparse", drop=0.0))
    assert np.array_equal(sparse, updated(pool, owner, anchor, Update(0.6)))


def test_replace(repaired):
    pool, anchor, owner = repaired
    values = updated(pool, owner, anchor, Update(1.0, "replace"))
    half = updated(pool, owner, anchor, Update(0.5, "replace"))
    for domain in (0, 2):
        mine = owner == domain
        assert np.array_equal(values[mine], pool.experts[domain, mine])
        assert np.allclose(half[mine], (anchor[mine] + pool.experts[domain, mine]) / 2, rtol=1e-5)
    assert np.array_equal(values[owner == FREE], anchor[owner == FREE])


def test_drop_of_everything_is_refused():
    with pytest.raises(ValueError, match="drop"):
        Update(0.6, "sparse", drop=1.0)
