"""The loops of `claim` as torch programs, for a GPU: the same counts, marks and values.

The owner map is a tensor on the device. Stored values are found by their addresses, as the loops
find them. A run of tiles is taken at once; nothing is changed before all of it is computed, so that
a run that does not fit the memory can be taken again in halves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sigmerge.kernels import Array, claim, tensors
from sigmerge.kernels.claim import Admission, Admitted, Settlement, TileTable
from sigmerge.kernels.dtypes import F32, MEMORY
from sigmerge.kernels.select import LOW_BINS, LOW_BITS, MAGNITUDE
from sigmerge.kernels.staging import Drain

ENOUGH = 1 << 22
"""Coordinates of a sample; of a block that has more, strips of fewer tiles are counted."""


class TileCopies(Protocol):
    """Finds or makes copies of a member's tiles on the device."""

    def __call__(
        self, rows: Array, edges: Array, first: int, last: int, *, alone: bool = False
    ) -> tuple[Tensor, Array]:
        """Bytes on the device, and where in them tiles [first, last) begin, for a pass.

        `rows` (tiles, 3) and `edges` are those of all tiles of the block; see `claim.TileTable`.
        `alone`: in a thread that must not hand work to others.
        """

    def bring(self, rows: Array, edges: Array) -> None:
        """Copy members whole, a row of each for each tile, if there is room for all."""


class ClaimDevice(Protocol):
    """The device as loops see it."""

    def stream(self) -> AbstractContextManager[None]:
        """The calling thread's own; all that it was given is done in the end."""

    def halved(self, first: int, last: int, program: Callable[[int, int], None]) -> None:
        """Run program(first, last) or, where memory is short, the program on both halves."""

    def give_at(self, values: Tensor, address: int) -> None:
        """Copy results to an address, where they are when the program has ended."""

    def room(self, size: int) -> Array:
        """The calling thread's own room for so many float32."""

    def drain(self, values: Tensor, target: Drain, begun: int) -> bool:
        """Write results into a file, from so many bytes behind its place on; whether it could."""

    def launches_of_others(self) -> AbstractContextManager[None]:
        """What a program waits in: others may launch meanwhile."""


_ABOVE, _TIED, _FREE = int(claim.ABOVE), int(claim.TIED), int(claim.FREE)


class TensorClaims:
    """What `sigmerge.kernels.claim` has, by the same names."""

    most_parts = 1
    """Parts of a block: a launch takes all its tiles at once."""
    longer = 4
    """How many times as many tiles as a worker of the loops rewrites are rewritten at a time."""

    def __init__(self, device: torch.device, copies: TileCopies, place: ClaimDevice) -> None:
        self._device, self._copies, self._place = device, copies, place

    def room(self, size: int, dtype: Any) -> Array:
        """The calling thread's own, where results are copied to."""
        kind = np.dtype(dtype)
        return self._place.room(-(-size * kind.itemsize // 4)).view(kind)[:size]

    def bring(self, rows: Array, edges: Array) -> None:
        """Have the tiles of some members on the device before they are read, if there is room."""
        with self._place.stream():
            self._copies.bring(rows, edges)

    def free_map(self, size: int) -> Tensor:
        with self._place.stream():
            return torch.full((size,), _FREE, dtype=torch.uint8, device=self._device)

    def count_free(self, owner: Tensor) -> int:
        return int((owner == _FREE).sum())

    def count_high(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        every: int,
        before: Settlement,
        histogram: Array,
    ) -> None:
        """Of all strips, whatever `every` says: a guess is then sure."""
        free = partial(self._free, table, owner, before=before)
        self._count(first, last, lambda *run: tensors.high_place(free(*run)), histogram)

    def count_low(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        every: int,
        before: Settlement,
        high: int,
        histogram: Array,
    ) -> None:
        def low(first: int, last: int) -> Tensor:
            magnitude = self._free(table, owner, first, last, before)
            return magnitude[magnitude >> LOW_BITS == high] & LOW_BINS - 1

        self._count(first, last, low, histogram)

    def _count(
        self, first: int, last: int, places: Callable[[int, int], Tensor], histogram: Array
    ) -> None:
        """Add how often each place comes in a run of tiles."""

        def one(first: int, last: int) -> None:
            found = torch.bincount(places(first, last), minlength=len(histogram))
            np.add(histogram, found.cpu().numpy(), out=histogram, casting="unsafe")

        self._place.halved(first, last, one)

    def mark(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        before: Settlement,
        threshold: int,
        counts: Array,
        mass: Array,
    ) -> int:
        wrong: list[int] = []

        def one(first: int, last: int) -> None:
            edges = table.edges[first : last + 1]
            score, here = self._score(table, first, last), owner[edges[0] : edges[-1]]
            settled = _settled(here, edges, before, first, last)
            magnitude = score.view(torch.int32) & int(MAGNITUDE)
            code = torch.where(magnitude == threshold, _TIED, _FREE)
            code = torch.where(magnitude > threshold, _ABOVE, code).to(torch.uint8)
            marked = torch.where(settled >= _ABOVE, code, settled)
            above, tied = marked == _ABOVE, marked == _TIED
            found = torch.stack([_by_tile(above, edges), _by_tile(tied, edges)], 1)
            sums = _mass(score, above, edges) if not table.key[0] else np.zeros(last - first)
            wrong.extend(first + tile for tile in _not_finite(table, score, edges))
            counts[first:last] = found.cpu().numpy()
            mass[first:last] = sums
            here.copy_(marked)

        self._place.halved(first, last, one)
        return min(wrong, default=-1)

    def settle(self, edges: Array, owner: Tensor, first: int, last: int, marks: Settlement) -> None:
        def one(first: int, last: int) -> None:
            here = owner[edges[first] : edges[last]]
            here.copy_(_settled(here, edges[first : last + 1], marks, first, last))

        self._place.halved(first, last, one)

    def tally(
        self,
        table: TileTable,
        owner: Tensor,
        first: int,
        last: int,
        code: int,
        support: Array,
        mass: Array,
    ) -> int:
        wrong: list[int] = []

        def one(first: int, last: int) -> None:
            edges = table.edges[first : last + 1]
            score = self._score(table, first, last)
            own = owner[edges[0] : edges[-1]] == code
            found = _by_tile(own & (score != 0), edges)
            wrong.extend(first + tile for tile in _not_finite(table, score, edges))
            mass[first:last] = _mass(score, own, edges)
            support[first:last] = found.cpu().numpy()

        self._place.halved(first, last, one)
        return min(wrong, default=-1)

    def admit(
        self,
        update: Admission,
        edges: Array,
        owner: Tensor,
        first: int,
        last: int,
        members: Array,
        target: Array,
    ) -> Admitted:
        kind, drain = int(target[0]), drain_to(target)
        fine, base = [True, True], int(edges[first])

        def one(first: int, last: int) -> None:
            def values(member: int) -> Tensor:
                return self._run(members[member], edges, first, last, alone=True)

            mine, some = owner[edges[first] : edges[last]], values(-1)
            fine[0] &= bool(torch.isfinite(some).all())
            scale = float(np.float32(update.scale))
            for row, domain in enumerate(update.domains.tolist()):
                own = values(domain)
                chosen = mine == domain
                if update.form == claim.REPLACE:
                    moved = own if scale == 1 else some + (own - some) * scale
                else:
                    moved = some + (own - values(-2)) * scale
                if update.form == claim.SPARSE:
                    key, start = (int(update.keys[row, 0]), int(update.keys[row, 1])), edges[first]
                    drawn = tensors.draws(key, int(start), len(mine), self._device)
                    chosen &= drawn >= update.below
                some = torch.where(chosen, moved, some)
            stored = some.to(tensors.STORED[kind])
            fine[1] &= bool(torch.isfinite(stored).all())
            begun = drain.width * (int(edges[first]) - base)
            fine[1] &= self._delivered(stored, begun, drain, right=all(fine))

        self._place.halved(first, last, one)
        return Admitted(fine[0], fine[1], int(drain.checksum[0]))

    def _delivered(self, values: Tensor, begun: int, drain: Drain, *, right: bool) -> bool:
        """Put results, so many bytes behind the first of all, where they belong.

        Into a file only if they are `right`; False if they are not there.
        """
        if drain.descriptor == MEMORY:
            self._place.give_at(values, drain.position + begun)
            return True
        if not right:
            return False
        with self._place.launches_of_others():
            return self._place.drain(values, drain, begun)

    def _free(
        self, table: TileTable, owner: Tensor, first: int, last: int, before: Settlement
    ) -> Tensor:
        """Magnitudes of the free coordinates."""
        edges = table.edges[first : last + 1]
        settled = _settled(owner[edges[0] : edges[-1]], edges, before, first, last)
        magnitude = self._score(table, first, last).view(torch.int32) & int(MAGNITUDE)
        return magnitude[settled >= _ABOVE]

    def _score(self, table: TileTable, first: int, last: int) -> Tensor:
        edges = table.edges
        if table.key[0]:
            key, start = (int(table.key[1]), int(table.key[2])), int(edges[first])
            drawn = tensors.draws(key, start, int(edges[last]) - start, self._device)
            return drawn.to(torch.int32).view(torch.float32)
        own = self._run(table.expert, edges, first, last)
        return own - self._run(table.reference, edges, first, last)

    def _run(
        self, rows: Array, edges: Array, first: int, last: int, *, alone: bool = False
    ) -> Tensor:
        """float32 values of a run of tiles."""
        copy, places = self._copies(rows, edges, first, last, alone=alone)
        some = rows[first:last, 0]
        lengths = sizes(some, edges[first : last + 1])
        return torch.cat([
            copy[place : place + length].view(tensors.STORED[kind]).float()
            for place, length, kind in zip(
                places.tolist(), lengths.tolist(), some.tolist(), strict=True
            )
        ])  # fmt: skip


def drain_to(target: Array) -> Drain:
    """A row of members as a drain; of memory its position is the address."""
    kind, descriptor, position = target.tolist()
    return Drain(descriptor, position, 4 if kind == F32 else 2, np.zeros(1, np.uint64))


def sizes(kinds: Array, edges: Array) -> Array:
    """Bytes of tiles of a member."""
    return np.diff(edges) * np.where(kinds == F32, 4, 2)


def _settled(here: Tensor, edges: Array, marks: Settlement, first: int, last: int) -> Tensor:
    """The codes after the marks of a domain are handed out; see `claim.settle`."""
    if not marks.ties.size:
        return here
    tied = here == _TIED
    rank = tied.cumsum(0)
    starts = torch.as_tensor(edges[:-1] - edges[0], device=here.device)
    earlier = torch.where(starts > 0, rank[(starts - 1).clamp(min=0)], 0)
    allowed = earlier + torch.as_tensor(marks.ties[first:last], device=here.device)
    sizes = torch.as_tensor(np.diff(edges), device=here.device)
    allowed = torch.repeat_interleave(allowed, sizes, output_size=len(here))
    claimed = (here == _ABOVE) | (tied & (rank <= allowed))
    left = torch.where(tied, _FREE, here)
    return torch.where(claimed, marks.domain, left).to(torch.uint8)


def _by_tile(chosen: Tensor, edges: Array) -> Tensor:
    """How many of each tile are chosen."""
    ends = torch.as_tensor(edges[1:] - edges[0] - 1, device=chosen.device)
    until = chosen.cumsum(0)[ends]
    return torch.diff(until, prepend=torch.zeros_like(until[:1]))


def _mass(score: Tensor, chosen: Tensor, edges: Array) -> Array:
    """Σ|score| over the chosen of each tile, in the order of the lanes."""
    values = torch.where(chosen, score.abs(), 0)
    sizes = np.diff(edges).tolist()
    rows = torch.zeros((len(sizes), max(sizes)), dtype=torch.float64, device=score.device)
    for row, part in zip(rows, values.split(sizes), strict=True):
        row[: len(part)] = part
    return tensors.totals(tensors.lanes(rows, rows.shape[1]))[:, 0]


def _not_finite(table: TileTable, score: Tensor, edges: Array) -> list[int]:
    """The first tile of a run on which something is not finite."""
    if table.key[0] or bool(torch.isfinite(score).all()):
        return []
    parts = score.split(np.diff(edges).tolist())
    return [tile for tile, part in enumerate(parts) if not torch.isfinite(part).all()][:1]
