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
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int64, Shaped, UInt8

from sigmerge.kernels import claim as kernels
from sigmerge.kernels import philox
from sigmerge.kernels.select import HIGH_BINS, LOW_BINS, bin_of_rank, threshold_of

Tile: TypeAlias = Float32[np.ndarray, "tile"]
Stored: TypeAlias = Shaped[np.ndarray, "_"]
"""Values as they are stored: float32, or bfloat16 as the bit patterns in uint16."""
Owner: TypeAlias = UInt8[np.ndarray, "n"]
Counts: TypeAlias = Int64[np.ndarray, "bins"]
Run: TypeAlias = Callable[..., Iterable[Any]]
"""Like `map`: applies a function to every item and returns the results in the items' order."""

PARTS = 64
"""A pass over a block is cut into this many items for `run`, if it has as many tiles."""
COUNTED_PARTS = 16
"""The same for a pass that counts: every item makes a histogram of its own."""
SAMPLE = 16
"""One strip in this many is looked at to guess a threshold."""
WORTH_A_GUESS = 1 / 1024
"""Share of a sample that must sit exactly on the guessed threshold for the guess to be tried."""


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

    def stored(self, domain: int, tile: int) -> tuple[Stored, Stored]:
        """θ_d and θ_ref on a tile, of one type; valid until the same thread calls again."""

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
    run: Run = map,
) -> Claims:
    """Lines 12–17 of Algorithm 1 for one layer, without the update.

    With `owner`, a further round (ours): what it holds stays claimed, and it is continued in place.
    With `mask_seed`, the equal-budget random mask (ruling 16): the same quotas, by random score.
    """
    if owner is None:
        owner = np.full(block.size, kernels.FREE, np.uint8)
    free = sum(int(np.count_nonzero(owner[a:b] == kernels.FREE)) for a, b in block.tiles)
    _check(block, order, quota, owner, free)
    support, mass = [0] * len(quota), [0.0] * len(quota)
    for domain in order:
        if quota[domain]:
            step = _Step(block, owner, domain, quota[domain], free, mask_seed, run)
            support[domain], mass[domain] = step.claim()
        free -= quota[domain]
    return Claims(owner, tuple(quota), tuple(support), tuple(mass))


def admit(
    block: Block, owner: Owner, owners: Iterable[int], tile: int, values: Tile, update: Update
) -> None:
    """Line 15 of Algorithm 1 on one tile: `values` is the anchor's tile and becomes θ̂'s.

    `owners` are the domains that claimed anything in the block.
    """
    start, stop = block.tiles[tile]
    mine = owner[start:stop]
    for domain in owners:
        expert, reference = block.stored(domain, tile)
        if update.form == "replace":
            kernels.replace(values, mine, domain, expert, update.scale)
        elif update.form == "add":
            kernels.add(values, mine, domain, expert, reference, update.scale)
        else:
            key = philox.key_of(update.seed, "sparse", str(block.index), block.domains[domain])
            draws = np.empty(stop - start, np.uint32)
            philox.fill(key, start, draws)
            below = philox.keep_below(update.drop)
            scale = update.scale / (1 - update.drop)
            kernels.add_sparse(values, mine, domain, expert, reference, scale, draws, below)


def _check(
    block: Block, order: Sequence[int], quota: Sequence[int], owner: Owner, free: int
) -> None:
    """Refuse what cannot be claimed before the owner map is touched."""
    if sorted(order) != list(range(len(block.domains))) or len(quota) != len(order):
        raise ValueError(
            f"layer {block.index}: the claim order {list(order)} and the {len(quota)} quotas must "
            f"name each of the {len(block.domains)} domains once"
        )
    if len(block.domains) > kernels.MAX_DOMAINS:
        raise ValueError(
            f"layer {block.index}: {len(block.domains)} domains, but an owner map of one byte per "
            f"coordinate holds at most {kernels.MAX_DOMAINS}"
        )
    if owner.size != block.size:
        raise ValueError(
            f"layer {block.index}: the owner map has {owner.size} coordinates, not {block.size}"
        )
    for domain in order:
        if not 0 <= quota[domain] <= free:
            raise ValueError(
                f"layer {block.index}: domain {block.domains[domain]!r} is to claim "
                f"{quota[domain]} coordinates, but {free} of {block.size} are free for it; "
                f"lower the capacity"
            )
        free -= quota[domain]


class _Mark(NamedTuple):
    """A tile's free coordinates above and tied with the threshold; Σ|score| of those above."""

    above: int
    tied: int
    mass: float


@dataclass(frozen=True)
class _Step:
    """Step r of the claim order: one domain takes its quota from the free coordinates R_r."""

    block: Block
    owner: Owner
    domain: int
    wanted: int
    free: int
    mask_seed: int | None
    run: Run

    def claim(self) -> tuple[int, float]:
        """Claim, and return the support and the admitted mass."""
        threshold, marks = self.mark()
        room = self.wanted - sum(mark.above for mark in marks)
        ties: list[int] = []
        for mark in marks:
            ties.append(min(room, mark.tied))
            room -= ties[-1]
        if self.mask_seed is not None:
            return self.settle_mask(marks, ties)
        self.each(lambda t: kernels.settle(self.mine(t), self.domain, ties[t], marks[t].tied))
        # What lies above a threshold is not zero, and the ties all have its value.
        value = float(np.uint32(threshold).view(np.float32))
        support = self.wanted if threshold else self.wanted - sum(ties)
        return support, math.fsum([*(mark.mass for mark in marks), sum(ties) * value])

    def settle_mask(self, marks: Sequence[_Mark], ties: Sequence[int]) -> tuple[int, float]:
        """A random score does not depend on Δ, so support and mass are counted on the chosen."""

        def settle(tile: int) -> tuple[int, float]:
            mine, chosen = self.mine(tile), int(kernels.ABOVE)
            kernels.settle(mine, chosen, ties[tile], marks[tile].tied)
            *found, finite = kernels.tally(*self.block.stored(self.domain, tile), mine, chosen)
            self.check(tile, finite)
            kernels.settle(mine, self.domain, 0, 0)
            return tuple(found)

        found = self.each(settle)
        return sum(support for support, _ in found), math.fsum(mass for _, mass in found)

    def mark(self) -> tuple[int, list[_Mark]]:
        """The magnitude of the quota's last entry, and the tiles marked by it.

        Differences of bfloat16 numbers take few values, so the threshold is one that a good part
        of the block has, and a sample finds it. The marks prove a guess right or wrong, and the
        exact threshold costs two passes over the block that a right guess saves.
        """
        if self.wanted == self.free:
            return 0, self.marked(0)
        guess, share = self.threshold(SAMPLE)
        if share >= WORTH_A_GUESS:
            marks = self.marked(guess)
            above = sum(mark.above for mark in marks)
            if above < self.wanted <= above + sum(mark.tied for mark in marks):
                return guess, marks
        exact, _ = self.threshold(1)
        return exact, self.marked(exact)

    def threshold(self, every: int) -> tuple[int, float]:
        """The magnitude at the quota's place in one strip of `every`, and the share that has it."""
        high = self.histogram(HIGH_BINS, lambda *tile: kernels.count_high(*tile, every))
        seen = int(high.sum())
        if not seen:
            return 0, 0.0
        rank = -(-self.wanted * seen // self.free)
        upper, rank = bin_of_rank(high, rank)
        low = self.histogram(LOW_BINS, lambda *tile: kernels.count_low(*tile, every, upper))
        lower, _ = bin_of_rank(low, rank)
        return threshold_of(upper, lower), int(low[lower]) / seen

    def marked(self, threshold: int) -> list[_Mark]:
        def mark(tile: int) -> _Mark:
            *found, finite = kernels.mark(*self.score(tile), self.mine(tile), threshold)
            self.check(tile, finite)
            return _Mark(*found)

        return self.each(mark)

    def check(self, tile: int, finite: bool) -> None:
        if not finite:
            self.block.not_finite(self.domain, tile)

    def histogram(
        self, bins: int, count: Callable[[Stored, Stored, Owner, Counts], None]
    ) -> Counts:
        """The counts of all tiles added up."""

        def part(some: Sequence[int]) -> Counts:
            counts = np.zeros(bins, np.int64)
            for tile in some:
                count(*self.score(tile), self.mine(tile), counts)
            return counts

        total = np.zeros(bins, np.int64)
        for counts in self.run(part, _parts(len(self.block.tiles), COUNTED_PARTS)):
            total += counts
        return total

    def each(self, task: Callable[[int], Any]) -> list[Any]:
        """The task's results for every tile, in order."""
        parts = _parts(len(self.block.tiles), PARTS)
        done = self.run(lambda part: [task(tile) for tile in part], parts)
        return [result for part in done for result in part]

    def mine(self, tile: int) -> Owner:
        start, stop = self.block.tiles[tile]
        return self.owner[start:stop]

    def score(self, tile: int) -> tuple[Stored, Stored]:
        """What the domain's entries are ranked by: Δ_d, or random bits at the flat index."""
        if self.mask_seed is None:
            return self.block.stored(self.domain, tile)
        start, stop = self.block.tiles[tile]
        name = self.block.domains[self.domain]
        draws = np.empty(stop - start, np.uint32)
        philox.fill(
            philox.key_of(self.mask_seed, "mask", str(self.block.index), name), start, draws
        )
        return draws.view(np.float32), _NOTHING


_NOTHING = np.empty(0, np.float32)


def _parts(tiles: int, parts: int) -> list[range]:
    """Tiles in order, cut into at most so many parts of equal length."""
    length = max(1, -(-tiles // parts))
    return [range(first, min(first + length, tiles)) for first in range(0, tiles, length)]
