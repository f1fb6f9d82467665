"""One decoder block as tiles in flat order over its tensors, read and rewritten where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sigmerge._native import WriteFailed
from sigmerge.core import Array, claim
from sigmerge.core.claim import CLAIM_TILE, Admission, Admitted
from sigmerge.core.dtypes import CODE, MEMORY, STORAGE, Span, address_of
from sigmerge.engine.stream import Direct, Source, rounded
from sigmerge.operators.base import Site

PIECE = 32
"""Tiles of one tensor that one worker rewrites at a time."""


class Piece(NamedTuple):
    """Tiles [first, last) of a block, which are `size` values of one tensor from `start` on."""

    tensor: str
    start: int
    size: int
    first: int
    last: int


class LayerBlock:
    """Layer `index`: its domains, tiles, where they lie, and the pieces in which it is rewritten.

    `anchor` is the source of one member, called "anchor"; `loops` pass over the tiles.
    """

    def __init__(
        self,
        index: int,
        sites: Sequence[Site],
        domains: Sequence[str],
        source: Source,
        anchor: Source,
        loops: Any = claim,
    ) -> None:
        self.index, self.domains, self.loops = index, domains, loops
        self._sites, self._source, self._anchor = sites, source, anchor
        self.tiles: list[tuple[int, int]] = []
        self.pieces: list[Piece] = []
        self._places: list[tuple[str, int]] = []
        self._spans: list[Span] = []  # what the loops read
        offset, tiles = 0, PIECE * getattr(loops, "longer", 1)
        for site in sites:
            starts = range(0, site.size, CLAIM_TILE)
            for start in starts[::tiles]:
                size = min(site.size - start, tiles * CLAIM_TILE)
                first = len(self.tiles) + start // CLAIM_TILE
                self.pieces.append(
                    Piece(site.tensor, start, size, first, first - (-size // CLAIM_TILE))
                )
            self.tiles += [(offset + s, offset + min(site.size, s + CLAIM_TILE)) for s in starts]
            self._places += [(site.tensor, start) for start in starts]
            offset += site.size
        self.size = offset
        members = [*((source, name) for name in (*domains, "reference")), (anchor, "anchor")]
        self.all_sources = np.empty((len(members), len(self._places), 3), np.int64)
        for row, (of, name) in zip(self.all_sources, members, strict=True):
            self._lay(row, of, name)
        self.edges = np.array([0, *(stop for _, stop in self.tiles)], np.int64)

    @property
    def sources(self) -> Array:
        """Where the tiles of the domains and of the reference lie; see `claim.TileTable`."""
        return self.all_sources[:-1]

    def _lay(self, tiles: Array, source: Source, member: str) -> None:
        """Fill the rows of a member's tiles."""
        first = 0
        for site in self._sites:
            row = source.raw(member, site.tensor)
            self._spans.append(row)
            skips = np.arange(0, site.size, CLAIM_TILE) * row.dtype.itemsize
            rows = tiles[first : first + len(skips)]
            rows[:, 0], rows[:, 1] = CODE[row.dtype], row.descriptor
            rows[:, 2] = row.position + skips
            first += len(skips)

    def not_finite(self, domain: int, tile: int) -> None:
        tensor, start = self._places[tile]
        first, last = self.tiles[tile]
        names = [self.domains[domain], "reference"]
        self._source.not_finite(names, tensor, start, start + last - first)

    def wrote(
        self, piece: Piece, update: Admission, owner: Any, dtype: str, direct: Direct
    ) -> bool:
        """Repair a piece into its file; False if it must be repaired otherwise, or once more."""
        kind, target = STORAGE[dtype], direct.target(piece.tensor)
        if target is None:
            return False
        nbytes, position = piece.size * kind.itemsize, target.position + piece.start * kind.itemsize
        try:
            found = self._admitted(piece, update, owner, CODE[kind], target.descriptor, position)
        except WriteFailed:  # whoever writes it otherwise says why it fails
            return False
        if not (found.fine and found.stored):
            return False
        direct.written(piece.tensor, piece.start, nbytes, found.checksum)
        self._done(piece)
        return True

    def repaired(self, piece: Piece, update: Admission, owner: Any, dtype: str) -> Array:
        """The stored values of a piece, each claimed coordinate with its owner's update."""
        values, finite = self._admit(piece, update, owner, dtype)
        if not finite:
            wide, _ = self._admit(piece, update, owner, "F32")
            lenient = self._anchor.allow_nonfinite
            values = rounded(piece.tensor, piece.start, wide, dtype, lenient)
        self._done(piece)
        return values

    def _done(self, piece: Piece) -> None:
        stop = piece.start + piece.size
        for source in (self._source, self._anchor):
            source.done(piece.tensor, piece.start, stop)

    def _admit(self, piece: Piece, update: Admission, owner: Any, dtype: str) -> tuple[Array, bool]:
        kind = STORAGE[dtype]
        out = self.loops.room(piece.size, kind)
        found = self._admitted(piece, update, owner, CODE[kind], MEMORY, address_of(out))
        if not found.fine:
            stop = piece.start + piece.size
            self._anchor.not_finite(["anchor"], piece.tensor, piece.start, stop)
        return out, found.stored

    def _admitted(self, piece: Piece, update: Admission, owner: Any, *target: int) -> Admitted:
        row, tiles = np.array(target, np.int64), (piece.first, piece.last)
        found: Admitted = self.loops.admit(update, self.edges, owner, *tiles, self.all_sources, row)
        return found
