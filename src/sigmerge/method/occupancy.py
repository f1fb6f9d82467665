"""Sequential occupancy (Algorithm 1, lines 11–18; Eq. occupancy; Theorem 1).

Domain by domain, in the claim order π, the k_d largest |Δ_d| among the coordinates that are still
free are claimed, ties from the lowest flat index on. Then each claimed coordinate takes its owner's
update. A block is processed tile by tile; only the owner map is as long as the block.

Notation: order = π, quota[d] = k_d, free = |R_r|, {j : owner[j] = d} = G_d, mass[d] = u_d(G_d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from sigmerge.core import claim as compiled
from sigmerge.core import philox
from sigmerge.core.select import (
    HIGH_PLACES,
    LOW_BINS,
    SAMPLE,
    WORTH_A_GUESS,
    counters,
    joined,
    occupied,
    place_of_rank,
    threshold_of,
)
from sigmerge.method.shapes import Float64, Int64, UInt8, UInt32

Sources: TypeAlias = Int64[np.ndarray, "members tiles 3"]
Owner: TypeAlias = UInt8[Any, "n"]
"""One byte a coordinate, in memory or on a device."""
Counts: TypeAlias = Int64[np.ndarray, "3 places"]
"""Places that have a count, ascending; their counts; nothing."""
MapLike: TypeAlias = Callable[..., Iterable[Any]]
"""Like `map`: applies a function to every item and returns the results in the items' order."""


class Parts(NamedTuple):
    """A pass over a block is cut into `most` items for `run`, of at least so many tiles.

    Threads that take short items wait for one another between them.
    """

    most: int
    least: int


MARKING = Parts(16, 20)
COUNTING = Parts(8, 40)
"""Every item makes a histogram of its own."""


@runtime_checkable
class Block(Protocol):
    """Layer i: its coordinates in flat order (ruling 3), cut into tiles, and its experts there."""

    @property
    def index(self) -> int:
        """The layer's number i."""

    @property
    def domains(self) -> Sequence[str]:
        """Names of the domains; a domain is an index into them."""

    @property
    def size(self) -> int:
        """n_i, the number of coordinates."""

    @property
    def tiles(self) -> Sequence[tuple[int, int]]:
        """(start, stop) of every tile in flat order; together they cover the block."""

    @property
    def sources(self) -> Sources:
        """Where each tile lies: a row for every domain, then the reference's; see TileTable."""

    def not_finite(self, domain: int, tile: int) -> None:
        """Called for a tile on which θ_d or θ_ref holds NaN or infinity; may raise."""


@dataclass(frozen=True)
class Claims:
    """What one round of claiming did: |G_d|, |supp V_d| and u_d(G_d) by domain, and the map."""

    owner: Owner
    claimed: tuple[int, ...]
    support: tuple[int, ...]
    mass: tuple[float, ...]


@dataclass(frozen=True)
class Update:
    """What a claimed coordinate takes from its owner.

    `add`: scale · Δ_d is added (Eq. occupancy). `sparse`: each admitted entry is dropped with
    probability `drop` and the rest divided by 1 − drop (ruling 17). `replace` (ours): the value
    moves to the owner's own by `scale`, θ_base + scale · (θ_d − θ_base).
    """

    scale: float
    form: Literal["add", "sparse", "replace"] = "add"
    drop: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop must lie in [0, 1), not {self.drop}")


def claim(
    block: Block,
    order: Sequence[int],
    quota: Sequence[int],
    *,
    owner: Owner | None = None,
    mask_seed: int | None = None,
    run: MapLike = map,
    loops: Any = compiled,
) -> Claims:
    """Lines 12–17 of Algorithm 1 for one layer, without the update.

    With `owner`, a further round (ours): what it holds stays claimed, and it is continued in place.
    With `mask_seed`, the equal-budget random mask (ruling 16): the same quotas, by random score.
    `loops` pass over the tiles, compiled ones or others by the same names.
    """
    free = block.size
    if owner is None:
        owner = loops.free_map(block.size)
    else:
        free = sum(loops.count_free(owner[a:b]) for a, b in block.tiles)
    _check(block, order, quota, owner, free)
    support, mass = [0] * len(quota), [0.0] * len(quota)
    step, how = None, (edges_of(block), mask_seed, run, loops)
    for domain in order:
        if quota[domain]:
            before = step.left if step else compiled.SETTLED
            step = _Step(block, owner, domain, quota[domain], free, *how, before)
            support[domain], mass[domain] = step.claim()
        free -= quota[domain]
    if step:
        step.settle()
    return Claims(owner, tuple(quota), tuple(support), tuple(mass))


def admission(block: Block, owners: Sequence[int], update: Update) -> compiled.Admission:
    """Line 15 of Algorithm 1 as the kernel `admit` reads it.

    `owners` are the domains that claimed anything in the block.
    """
    names = [str(block.domains[domain]) for domain in owners]
    keys = [philox.key_of(update.seed, "sparse", str(block.index), name) for name in names]
    sparse = update.form == "sparse"
    return compiled.Admission(
        {"add": compiled.ADD, "sparse": compiled.SPARSE, "replace": compiled.REPLACE}[update.form],
        update.scale / (1 - update.drop) if sparse else update.scale,
        np.array(owners, np.int64),
        philox.keep_below(update.drop),
        np.array(keys, np.int64).reshape(-1, 2),
    )


def edges_of(block: Block) -> Int64[np.ndarray, _]:
    """Where tiles begin, and the end of the last."""
    return np.array([*(start for start, _ in block.tiles), block.size], np.int64)


def _check(
    block: Block, order: Sequence[int], quota: Sequence[int], owner: Owner, free: int
) -> None:
    """Refuse what cannot be claimed before the owner map is touched."""
    if sorted(order) != list(range(len(block.domains))) or len(quota) != len(order):
        raise ValueError(
            f"layer {block.index}: the claim order {list(order)} and the {len(quota)} quotas must "
            f"name each of the {len(block.domains)} domains once"
        )
    if len(block.domains) > compiled.MAX_DOMAINS:
        raise ValueError(
            f"layer {block.index}: {len(block.domains)} domains, but an owner map of one byte per "
            f"coordinate holds at most {compiled.MAX_DOMAINS}"
        )
    if len(owner) != block.size:
        raise ValueError(
            f"layer {block.index}: the owner map has {len(owner)} coordinates, not {block.size}"
        )
    for domain in order:
        if not 0 <= quota[domain] <= free:
            raise ValueError(
                f"layer {block.index}: domain {block.domains[domain]!r} is to claim "
                f"{quota[domain]} coordinates, but {free} of {block.size} are free for it; "
                f"lower the capacity"
            )
        free -= quota[domain]


class _Marks(NamedTuple):
    """By tile: free coordinates above and tied with the threshold; Σ|score| of those above."""

    counts: Int64[np.ndarray, "tiles 2"]
    mass: Float64[np.ndarray, tiles]


@dataclass
class _Step:
    """Step r of the claim order: one domain takes its quota from the free coordinates R_r.

    `left` is what is left to settle: of the step before, and once it has claimed, its own.
    """

    block: Block
    owner: Owner
    domain: int
    wanted: int
    free: int
    edges: Int64[np.ndarray, _]
    mask_seed: int | None
    run: MapLike
    loops: Any
    left: compiled.Settlement

    def claim(self) -> tuple[int, float]:
        """Claim, and return the support and the admitted mass."""
        threshold, marks = self.mark()
        room = self.wanted - int(marks.counts[:, 0].sum())
        before = np.cumsum(marks.counts[:, 1]) - marks.counts[:, 1]
        ties = np.clip(room - before, 0, marks.counts[:, 1])
        if self.mask_seed is not None:
            return self.settle_mask(marks, ties)
        self.left = compiled.Settlement(self.domain, ties, marks.counts)
        # What lies above a threshold is not zero, and the ties all have its value.
        value = float(np.uint32(threshold).view(np.float32))
        tied = int(ties.sum())
        support = self.wanted if threshold else self.wanted - tied
        return support, math.fsum([*marks.mass.tolist(), tied * value])

    def settle(self) -> None:
        """Settle what is left in a pass of its own."""
        left, self.left = self.left, compiled.SETTLED
        if left.ties.size:
            self.each(MARKING, lambda *part: self.loops.settle(self.edges, *part, left))

    def settle_mask(self, marks: _Marks, ties: Int64[np.ndarray, tiles]) -> tuple[int, float]:
        """A random score says nothing about Δ, so support and mass are read off what it chose."""
        self.left = compiled.Settlement(int(compiled.ABOVE), ties, marks.counts)
        self.settle()
        support = np.zeros(len(ties), np.int64)
        found = (int(compiled.ABOVE), support, marks.mass)
        delta = self.table._replace(key=_NO_KEY)
        self.each(MARKING, lambda *part: self.check(self.loops.tally(delta, *part, *found)))
        nothing = np.zeros_like(marks.counts)
        self.left = compiled.Settlement(self.domain, np.zeros_like(ties), nothing)
        return int(support.sum()), math.fsum(marks.mass.tolist())

    def mark(self) -> tuple[int, _Marks]:
        """The magnitude of the quota's last entry, and the tiles marked by it.

        Differences of bfloat16 numbers take few values, so the threshold is one that a good part
        of the block has, and a sample finds it. The marks prove a guess right or wrong, and the
        exact threshold costs two passes over the block that a right guess saves.
        """
        if self.wanted == self.free:
            return 0, self.marked(0)
        guess, share = self.threshold(SAMPLE) if self.mask_seed is None else (0, 0.0)
        if share >= WORTH_A_GUESS:
            marks = self.marked(guess)
            above, tied = marks.counts.sum(axis=0)
            if above < self.wanted <= above + tied:
                return guess, marks
        self.settle()
        exact, _ = self.threshold(1)
        return exact, self.marked(exact)

    def threshold(self, every: int) -> tuple[int, float]:
        """The magnitude at the quota's place in one strip of `every`, and the share that has it."""
        high = self.histogram(HIGH_PLACES, self.loops.count_high, every, self.left)
        seen = int(high[1].sum())
        if not seen:
            return 0, 0.0
        rank = -(-self.wanted * seen // self.free)
        place, rank, level = place_of_rank(high, rank)
        upper, others = divmod(place, 2)
        if not others:
            return threshold_of(upper, 0), level / seen
        low = self.histogram(LOW_BINS, self.loops.count_low, every, self.left, upper)
        lower, _, level = place_of_rank(low, rank)
        return threshold_of(upper, lower), level / seen

    def marked(self, threshold: int) -> _Marks:
        tiles = len(self.block.tiles)
        marks = _Marks(np.zeros((tiles, 2), np.int64), np.zeros(tiles))
        found = (self.left, threshold, *marks)
        self.each(MARKING, lambda *part: self.check(self.loops.mark(self.table, *part, *found)))
        self.left = compiled.SETTLED
        return marks

    def check(self, tile: int) -> None:
        """What a kernel returns: a tile that is not finite, or -1."""
        if tile >= 0:
            self.block.not_finite(self.domain, tile)

    def histogram(self, bins: int, count: Callable[..., None], *arguments: Any) -> Counts:
        """The places of all tiles that have a count; those of a part fit into 32 bits."""

        def part(*some: Any) -> UInt32[np.ndarray, "3 places"]:
            counts = counters(1, bins)
            count(self.table, *some, *arguments, counts[0])
            return occupied(counts, _NOTHING_LEFT_OUT)[0]

        return joined(self.each(COUNTING, part))

    def each(self, parts: Parts, task: Callable[[Owner, int, int], Any]) -> list[Any]:
        """The results of task(owner, first tile, last tile) for all tiles in order.

        Loops that take many tiles side by side themselves say how few parts they want.
        """
        most = min(parts.most, getattr(self.loops, "most_parts", parts.most))
        length = max(parts.least, -(-len(self.block.tiles) // most))
        firsts = range(0, len(self.block.tiles), length)
        lasts = (min(first + length, len(self.block.tiles)) for first in firsts)
        return list(self.run(lambda part: task(self.owner, *part), zip(firsts, lasts, strict=True)))

    @cached_property
    def table(self) -> compiled.TileTable:
        """Where the domain's entries lie, and what ranks them: Δ_d, or random bits."""
        block, key = self.block, _NO_KEY
        if self.mask_seed is not None:
            name = str(block.domains[self.domain])
            words = philox.key_of(self.mask_seed, "mask", str(block.index), name)
            key = np.array([1, *words], np.int64)
        return compiled.TileTable(self.edges, block.sources[self.domain], block.sources[-1], key)


_NO_KEY = np.zeros(3, np.int64)
_NOTHING_LEFT_OUT = np.empty((0, 0), np.uint16)
