"""Programs in Triton beside the compiled loops: the same bits, on a GPU or interpreted."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sigmerge.core import claim, products, select
from sigmerge.core import merge as loops
from sigmerge.core.claim import Admission, Settlement, TileTable
from sigmerge.core.dtypes import (
    BF16,
    CODE,
    F16,
    F32,
    MEMORY,
    NARROW,
    STORAGE,
    Span,
    address_of,
    load_rows,
    table,
)
from sigmerge.core.merge import ALL, ANY_TIES, DISJOINT, DROP, LEAD, NORM, TRIM, Formula, formula
from sigmerge.core.partial_sums import PartSums
from sigmerge.core.products import signature
from sigmerge.engine import stream
from sigmerge.engine.gpu import Gpu
from sigmerge.gpu import chunk_passes, triton_passes
from sigmerge.gpu.memory import no_flag
from tests.devices import DEVICE, interpreted, needs_programs, some

pytestmark = needs_programs

STORED = ("bf16", "f16", "f32")
START = 10
WEIGHTS = np.array([0.3, 0.5, 0.7], np.float32)
CUTS = np.array([[0x39D1B717, 0], [0x399D4952, ANY_TIES], [ALL, 0]], np.int64)
"""0.0004 and 0.0003."""
TIES = np.array([[0x3A000000, 5], [0, 40], [0x3A000000, 0]], np.int64)
"""2⁻¹¹, of which bfloat16 has many, and zero; the first of these stay."""
DRAWS = np.array([[123456789, 987654321, 1 << 31], [5, 4000000000, 1 << 30], [1, 2, ALL]], np.int64)
RESCALE = np.array([[2.0, 1.0], [1.0, 0.3], [1.0, 1.0]], np.float32)
FORMULAS = {
    "sum": formula(WEIGHTS, vectors=False),
    "vectors": formula(WEIGHTS, divisor=3.0, factor=0.3).plus_reference(1.0),
    "trim": formula(
        WEIGHTS, thin=TRIM, cuts=CUTS, combine=DISJOINT, normalize=True, weighted=True
    ).plus_reference(1.0),
    "trim, level": formula(
        WEIGHTS, thin=TRIM, cuts=CUTS, combine=DISJOINT, cancelled=-1.0, factor=0.3
    ).plus_reference(1.0),
    "trim, some ties": formula(
        WEIGHTS, thin=TRIM, cuts=TIES, combine=DISJOINT, normalize=True
    ).plus_reference(1.0),
    "drop": formula(WEIGHTS, thin=DROP, draws=DRAWS, rescale=RESCALE).plus_reference(1.0),
    "drop, elected": formula(
        WEIGHTS, thin=DROP, draws=DRAWS, rescale=RESCALE, combine=DISJOINT, normalize=True
    ).plus_reference(0.7),
}


@pytest.fixture(autouse=True)
def _short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)


class Parameter(NamedTuple):
    num: int
    is_constexpr: bool


class Rows:
    """Three experts and their reference, as the loops and as programs read them."""

    def __init__(self, size: int, dtypes: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        base = rng.normal(0, 0.02, size)
        values = [base + rng.normal(0, 5e-4, size) for _ in range(3)]
        names = dtypes.split() * (1 if " " in dtypes else 4)
        self.stored = [narrowed(*row) for row in zip(names, (*values, base), strict=True)]
        self.size = size

    @cached_property
    def there(self) -> torch.Tensor:
        rows = stream.StoredRows("w", 0, ("",) * 4, [Span.of(row) for row in self.stored])
        return Gpu(DEVICE, 0)._copies(rows, again=False)

    def some(self, reference: bool) -> tuple[Any, torch.Tensor]:
        stop = None if reference else -1
        return table(self.stored[:stop]), self.there[:stop]


def narrowed(name: str, values: Any) -> Any:
    stored = np.empty(values.size, STORAGE[name.upper()])
    assert NARROW[name.upper()](values.astype(np.float32), stored)
    return stored


def merged(way: Formula, rows: torch.Tensor, tile: int, kind: int) -> torch.Tensor | None:
    """None if the flag says that something is not finite."""
    flag = no_flag(rows.device)
    found = chunk_passes.merge(way, rows, START, tile, kind, flag)
    return None if flag.item() else found


ALL_CASES = (
    ("bf16", 5000, 4096), ("bf16", 2049, 1003), ("f16", 1500, 1024), ("f32", 1, 64),
    ("bf16 f32 f16 bf16", 2049, 1003), ("bf16 f32 f16 bf16", 90, 96),
)  # fmt: skip
"""Types, coordinates, a tile's; where types differ, those of the experts and the reference."""
CASES = pytest.mark.parametrize(("dtype", "size", "tile"), some(ALL_CASES, ALL_CASES[-1]))


@CASES
@pytest.mark.parametrize("name", some(FORMULAS, "vectors", "trim, some ties", "drop, elected"))
def test_merges_are_those_of_the_loops(dtype: str, size: int, tile: int, name: str) -> None:
    rows, way = Rows(size, dtype), FORMULAS[name]
    given_table, there = rows.some(way.reads_reference)
    kinds = ((BF16, np.uint16), (F16, np.float16), (F32, np.float32))
    for kind, stored in some(kinds, kinds[0]):
        out = np.zeros(size, stored)
        where = (START, size, tile, tile, np.array([kind, -1, address_of(out)]), np.zeros(1))
        assert loops.merge(way, given_table, *where)[:2] == (True, True)
        found = merged(way, there, tile, kind)
        assert found is not None
        assert found.cpu().view(torch.uint8).numpy().tobytes() == out.tobytes()
    for kind in (NORM, LEAD) if way.combine == DISJOINT else (NORM,):
        by_loops, by_triton = np.zeros(1), np.zeros(1)
        nowhere = np.array([kind, -1, 0])
        loops.merge(way, given_table, START, size, tile, tile, nowhere, by_loops)
        number = merged(way, there, tile, kind)
        assert number is not None
        chunk_passes.add_number(number, by_triton)
        assert by_triton == by_loops and by_loops != 0


def test_draws_depend_on_the_place_in_a_tensor() -> None:
    rows, way, start = Rows(7, "f32"), FORMULAS["drop"], 2**34 + 1
    given_table, there = rows.some(True)
    out = np.zeros(7, np.float32)
    where = (start, 7, 64, 64, np.array([F32, MEMORY, address_of(out)]), np.zeros(1))
    loops.merge(way, given_table, *where)
    found = chunk_passes.merge(way, there, start, 64, F32, no_flag(there.device))
    assert found.tolist() == out.tolist()


@CASES
def test_sums_are_those_of_the_loops(dtype: str, size: int, tile: int) -> None:
    rows = Rows(size, dtype)
    given_table, there = rows.some(True)
    given, unmarked = (FORMULAS["drop"], tile, tile), np.zeros((0, 3, 0), np.uint8)
    expected, found = np.zeros((2, 3)), one_part(2, 3)
    loops.norms_of_thinning(given_table, START, size, *given, expected, unmarked)
    assert chunk_passes.COUNTERPARTS[loops.norms_of_thinning](there, START, *given, found, unmarked)
    assert (found.sums[0] == expected).all() and expected.any()
    dots, mass, by_part = np.zeros((3, 3)), np.zeros(2), (one_part(3, 3), one_part(2))
    signature(given_table, START, size, tile, dots, mass)
    assert chunk_passes.COUNTERPARTS[signature](there, START, tile, *by_part)
    assert (by_part[0].sums[0] == dots).all() and (by_part[1].sums[0] == mass).all()
    assert dots.any()
    for vectors, count, read in some(((True, 3, 4), (False, 4, 4)), (False, 2, 2)):
        gram, found = np.zeros((count, count)), one_part(count, count)
        products.gram(given_table[:read], START, size, vectors, tile, gram)
        assert chunk_passes.COUNTERPARTS[products.gram](there[:read], START, vectors, tile, found)
        assert (found.sums[0] == gram).all()


def one_part(*shape: int) -> PartSums:
    """Sums of a chunk that is one part."""
    return PartSums(np.zeros((1, *shape)), 1 << 20)


@CASES
@pytest.mark.parametrize("every", some([1, 2], 2))
def test_counts_are_those_of_the_loops(dtype: str, size: int, tile: int, every: int) -> None:
    rows, experts = Rows(size, dtype), np.array([0, 2])
    given_table, there = rows.some(True)
    counts = [np.zeros((2, select.HIGH_PLACES), np.uint32) for _ in range(2)]
    select.count_high(given_table, START, size, experts, every, counts[0])
    assert chunk_passes.count_high(there, START, experts, every, counts[1])
    assert (counts[0] == counts[1]).all() and counts[0].any()
    for ranges in (
        np.array([[0x39D00000, 1, 0], [0x399D0000, 40000, 0]]),
        np.array([[0x39400000, 1 << 22, 7], [0x39900000, 1 << 20, 5]]),
    ):
        places = max(((length - 1) >> shift) + 1 for _, length, shift in ranges.tolist())
        found = [
            (np.zeros((2, places), np.uint32), np.zeros((2, places), np.uint16),
             np.zeros(2, np.int64))
            for _ in range(2)
        ]  # fmt: skip
        select.count_inside(given_table, START, size, experts, every, ranges, *found[0])
        assert chunk_passes.count_inside(there, START, experts, every, ranges, *found[1])
        assert all((a == b).all() for a, b in zip(*found, strict=True))


@CASES
@pytest.mark.parametrize("share", some([0.0, 0.2, 1.0], 0.2))
def test_selected_magnitudes_are_those_of_a_sort(
    dtype: str, size: int, tile: int, share: float
) -> None:
    rows, experts = Rows(size, dtype), np.array([0, 2])
    ranks = np.array([max(1, int(share * size)), size])
    found = chunk_passes.selected(rows.some(True)[1], experts, ranks)
    values = np.empty((4, size), np.float32)
    assert found is not None and load_rows(table(rows.stored), table([]), values)
    for expert, rank, numbers in zip(experts, ranks, found.tolist(), strict=True):
        patterns = np.sort(np.abs(values[expert] - values[3]).view(np.uint32))[::-1]
        at = patterns[rank - 1]
        assert numbers == [at, rank - (patterns > at).sum(), (patterns == at).sum()]


def test_what_is_not_finite_is_left_to_the_loops() -> None:
    rows = Rows(300, "bf16")
    rows.stored[1][250] = 0x7F80  # infinity
    _, there = rows.some(True)
    assert merged(FORMULAS["vectors"], there, 300, BF16) is None
    assert not chunk_passes.COUNTERPARTS[signature](there, START, 300, one_part(3, 3), one_part(2))
    counts = np.zeros((1, select.HIGH_PLACES), np.uint32)
    assert not chunk_passes.count_high(there, START, np.array([1]), 1, counts)
    assert chunk_passes.selected(there, np.array([0, 1]), np.array([5, 5])) is None
    assert not counts.any()


class Claims:
    """Three tiles of a block, and both ways to claim them."""

    EDGES = np.array([0, 300, 1400, 2000], np.int64)
    WIDE = np.array([0, 304, 1408, 2000], np.int64)
    """Tiles that threads load sixteen coordinates of at once."""

    def __init__(
        self, dtype: str, key: tuple[int, int, int] = (0, 0, 0), edges: Any = EDGES
    ) -> None:
        """Of the dtype "mixed" no two tiles side by side are stored alike, nor two members'."""
        rng, self.edges = np.random.default_rng(1), edges
        base = rng.normal(0, 0.02, 2000)
        values = [*(base + rng.normal(0, 5e-4, 2000) for _ in range(3)), base]
        names = tuple(STORED) if dtype == "mixed" else (dtype,) * 3
        self.stored = [
            [narrowed(names[(member + tile) % 3], row[edges[tile] : edges[tile + 1]])
             for tile in range(3)]
            for member, row in enumerate(values)
        ]  # fmt: skip
        of = [*self.stored, self.stored[0]]  # the first expert is the anchor too
        self.sources = np.array(
            [[(CODE[tile.dtype], MEMORY, address_of(tile)) for tile in row] for row in of], np.int64
        )
        self.key = np.array(key, np.int64)
        self.by_loops = claim.free_map(2000)
        self.triton: Any = Gpu(DEVICE, 1 << 20).claims()
        self.by_triton = self.triton.free_map(2000)

    def table(self, domain: int) -> TileTable:
        return TileTable(self.edges, self.sources[domain], self.sources[3], self.key)

    def both(self, loop: str, table: Any, *given: Any, results: list[Any]) -> None:
        """Run a loop in both ways: equal results, equal owners."""
        copies = [each.copy() for each in results]
        first = getattr(claim, loop)(table, self.by_loops, 0, 3, *given, *results)
        second = getattr(self.triton, loop)(table, self.by_triton, 0, 3, *given, *copies)
        assert first == second
        assert all((a == b).all() for a, b in zip(results, copies, strict=True))
        assert (self.by_triton.cpu().numpy() == self.by_loops).all()

    def marked(self, table: TileTable, before: Settlement, threshold: int, counts: Any) -> None:
        """`mark` in both ways, whatever mass they find."""
        again, mass = counts.copy(), np.zeros(3)
        claim.mark(table, self.by_loops, 0, 3, before, threshold, counts, mass)
        self.triton.mark(table, self.by_triton, 0, 3, before, threshold, again, mass)
        assert (again == counts).all()
        assert (self.by_triton.cpu().numpy() == self.by_loops).all()


SCORE, RANDOM = (0, 0, 0), (1, 77, 4000000000)
CLAIMS = itertools.product((*STORED, "mixed"), (SCORE, RANDOM), (False, True))
FORMS = ((claim.ADD, 0.3), (claim.SPARSE, 3.0), (claim.REPLACE, 0.7), (claim.REPLACE, 1.0))


@pytest.mark.parametrize(
    ("dtype", "key", "together"),
    some(CLAIMS, ("mixed", SCORE, False), ("f16", RANDOM, True)),
)
def test_claims_are_those_of_the_loops(
    dtype: str, key: tuple[int, int, int], together: bool
) -> None:
    """Members that were copied together, or each when it is read first."""
    edges = Claims.WIDE if dtype == "f16" or key[0] else Claims.EDGES
    claims, before = Claims(dtype, key, edges), claim.SETTLED
    if together:
        claims.triton.bring(claims.sources, claims.edges)
        assert len(claims.triton._copies._whole) == 4
    for domain in some(range(3), *range(1 if key[0] else 2)):
        table = claims.table(domain)
        magnitudes = np.zeros(select.HIGH_PLACES, np.uint32)
        for every in (1, 2):
            claims.both("count_high", table, every, before, results=[magnitudes])
        place, _ = select.bin_of_rank(magnitudes, int(magnitudes.sum()) // 5)
        low = np.zeros(select.LOW_BINS, np.uint32)
        claims.both("count_low", table, 1, before, place // 2, results=[low])
        threshold = select.threshold_of(place // 2, max(0, select.bin_of_rank(low, 3)[0]))
        counts, mass = np.zeros((3, 2), np.int64), np.zeros(3)
        if domain == 0:  # a wrong guess, whose marks are free for the right one
            claims.marked(table, before, threshold - 1, np.zeros((3, 2), np.int64))
        if not key[0]:
            claims.both("mark", table, before, threshold, results=[counts, mass])
        else:  # the mass of random bits says nothing
            claims.marked(table, before, threshold, counts)
        assert counts[:, 0].any()
        ties = np.array([counts[0, 1], counts[1, 1] // 2, 0])
        before = Settlement(domain, ties, counts)
    claims.both("settle", claims.edges, before, results=[])
    support, mass = np.zeros(3, np.int64), np.zeros(3)
    plain = claims.table(0)._replace(key=np.zeros(3, np.int64))
    claims.both("tally", plain, 0, results=[support, mass])
    assert support.any()
    for form, scale in some(FORMS, FORMS[1], FORMS[2]):
        keys = np.array([[1, 2], [3, 4000000000], [5, 6]], np.int64)
        update = Admission(form, scale, np.arange(3), 1 << 30, keys)
        for kind, stored in some(((BF16, np.uint16), (F32, np.float32)), (F16, np.float16)):
            out, again = np.zeros(2000, stored), np.zeros(2000, stored)
            of, rest = (update, claims.edges), (0, 3, claims.sources)
            for way, owner, to in (
                (claim, claims.by_loops, out), (claims.triton, claims.by_triton, again)
            ):  # fmt: skip
                target = np.array([kind, MEMORY, address_of(to)], np.int64)
                assert way.admit(*of, owner, *rest, target)[:2] == (True, True)
            assert again.tobytes() == out.tobytes()


ONE = 0x3F800000
JUST_MORE = np.nextafter(np.float32(1), np.float32(2))
HALF = np.float32(2**29)
"""Half of the bound for thresholds from 1 on and below 2: 2⁵³ units of 2⁻²³."""


BOUNDS: list[Any] = [
    (ONE, [HALF, HALF - 32, *[JUST_MORE] * 31], False, True),  # below the bound by 1 − 31 units
    (ONE, [HALF, HALF], True, True),
    (ONE, [*[JUST_MORE] * 999, 2 * HALF], True, False),
    (ONE - 1, [HALF, *[JUST_MORE] * 99], True, True),  # a smaller unit, and half the bound
    (0, [2**-97, 2**-149], False, True),
    (0, [2**-96, 2**-149], True, False),
    (0, [0.1, 2**-149, 3.0], True, False),
    (5, [2**-149 * 7] * 900, False, True),
    (0x7FFFFF, [2**-97, 2**-126], False, True),  # the largest number that is not normal
    (0x7FFFFF, [2**-60, *[2**-126 + 2**-149] * 99], True, False),
]


@pytest.mark.parametrize(
    ("threshold", "entries", "in_order", "exact"), some(BOUNDS, BOUNDS[0], BOUNDS[2])
)
def test_masses_of_claims_are_those_of_the_loops_at_the_bound(
    threshold: int,
    entries: list[Any],
    in_order: bool,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum that may be rounded, and only such a one, is added in the order of the loops."""
    claims = Claims("f32")
    for tile in itertools.chain(*claims.stored):
        tile[:] = 0
    claims.stored[0][1][: len(entries)] = entries
    tallied, again = claims.triton._tallied, []

    def noted(rows: Any, *given: Any) -> Any:
        again.extend(rows[:, 2].tolist())
        return tallied(rows, *given)

    monkeypatch.setattr(claims.triton, "_tallied", noted)
    counts, mass = np.zeros((3, 2), np.int64), np.zeros(3)
    claims.both("mark", claims.table(0), claim.SETTLED, threshold, results=[counts, mass])
    assert counts[:, 0].tolist() == [0, len(entries), 0]
    assert again == ([300] if in_order else [])
    true = sum(map(Fraction, map(float, entries)))
    assert (Fraction(float(mass[1])) == true) == exact


def test_a_large_sample_of_claims_is_that_of_some_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 coordinates, of which a sample of one strip in 2 would have 1000; 500 are enough."""
    monkeypatch.setattr("sigmerge.gpu.triton_claims.ENOUGH", 500)
    claims = Claims("bf16")
    counts = [np.zeros(select.HIGH_PLACES, np.uint32) for _ in range(2)]
    for tile in (0, 2):
        given = (claims.by_loops, tile, tile + 1, 2, claim.SETTLED)
        claim.count_high(claims.table(0), *given, counts[0])
    claims.triton.count_high(claims.table(0), claims.by_triton, 0, 3, 2, claim.SETTLED, counts[1])
    assert (counts[0] == counts[1]).all() and counts[0].sum() == 900


def test_threads_compile_a_program_once() -> None:
    """Two threads that launch it first at the same time; a constant makes another program."""
    passes: Any = triton_passes
    running: list[int] = []

    class Program:
        __name__ = "program"
        params = (Parameter(0, is_constexpr=False), Parameter(1, is_constexpr=True))

        def __getitem__(self, grid: Any) -> Any:
            return self.run

        def run(self, rows: torch.Tensor, constant: int) -> None:
            running.append(constant)
            time.sleep(0.02)
            alone = running.count(constant) == 1
            running.remove(constant)
            seen.append((constant, alone))

    program, rows, seen = Program(), torch.zeros(1), list[tuple[int, bool]]()
    with ThreadPoolExecutor(2) as pool:
        for constant in (1, 2):
            jobs = [pool.submit(passes.launch, program, (1,), rows, constant) for _ in range(2)]
            for job in jobs:
                job.result()
    assert seen == [(1, True), (1, True), (2, True), (2, True)]
    assert {key[-1] for key in passes._compiled if key[0] == "program"} == {1, 2}
