"""The arithmetic of the dense operators in float32, expert by expert in order.

One call merges one chunk: it reads the stored values of all members strip by strip, thins the
rows out, combines them, and leaves the result in its stored type. What it does is a `Formula`,
which is numbers and small tables, so that a compiled loop serves every pool, and all operators
that thin and combine alike.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sigmerge import _native
from sigmerge.core import Array

KEEP_ALL, TRIM, DROP, PRUNE, BAND, RANK, SELECT, MARKED = 0, 1, 2, 3, 4, 5, 6, 7
SUM, DISJOINT, OVERLAPS, AGREEING = 0, 1, 2, 3
ALL: Final = -1
"""A threshold or bound of an expert that keeps all its entries."""
ANY_TIES: Final = 2**62
"""More ties than there can be."""
NORM: Final = 3
LEAD: Final = 4
"""Kinds of output beside the stored types, which are one number and no values: the ℓ1 norm of the
result; how many more coordinates elect + than −."""


class Formula(NamedTuple):
    """What is done on every strip, in this order.

    `vectors`: rows are θ_d − θ_ref rather than θ_d. `thin` is one of KEEP_ALL, TRIM, DROP, PRUNE,
    BAND, RANK, SELECT and MARKED; `combine` one of SUM, DISJOINT, OVERLAPS and AGREEING; both say
    below which tables they read. `after`, one row (divisor, factor, share) a step:
    τ / divisor · factor + share · θ_ref.
    """

    weights: Array
    vectors: bool
    thin: int
    cuts: Array
    """TRIM, BAND: int64 (experts, 2), the magnitude pattern of the least entry and how many ties
    stay. SELECT: one row, the same of the variances of coordinates."""
    outliers: Array
    """BAND: as cuts, of the entries that are too large to stay."""
    draws: Array
    """DROP, RANK: int64 (experts, 3), the two key words and the bound below which a draw keeps; of
    RANK only whether it is ALL or zero."""
    odds: Array
    """RANK: float64 (experts, 2), the probabilities to keep the smallest entry and the largest."""
    axis: Array
    """RANK: int64 (length, inner, whether a survivor is divided by its probability)."""
    marks: Array
    """MARKED: uint8 (strips, experts, bytes), a bit for each entry that stays."""
    rescale: Array
    """float32 (experts, 2), what survivors are multiplied with and divided by."""
    groups: Array
    """PRUNE: int64 (n, m, whether a full group is filled up from taken entries)."""
    combine: int
    weighted: bool
    """DISJOINT: whether weights count in the election."""
    normalize: bool
    """DISJOINT: whether agreeing entries are averaged."""
    cancelled: float
    """DISJOINT: the sign that a sum of zero elects, 1 or −1."""
    after: Array

    @property
    def reads_reference(self) -> bool:
        return bool(self.vectors or self.after[:, 2].any())

    @property
    def is_sum(self) -> bool:
        """Whether entries are only weighted and added up."""
        return self.thin == KEEP_ALL and self.combine == SUM and bool((self.rescale == 1).all())

    @property
    def is_copy(self) -> bool:
        """Whether the result is the one expert's values."""
        one = len(self.weights) == 1 and self.weights[0] == 1 and not self.vectors
        return one and self.is_sum and bool((self.after == (1, 1, 0)).all())

    def plus_reference(self, share: float) -> Formula:
        """Then θ_ref, or a multiple of it, is added."""
        return self._then(1.0, 1.0, share)

    def times(self, factor: float) -> Formula:
        return self._then(1.0, factor, 0.0)

    def _then(self, *step: float) -> Formula:
        return self._replace(after=np.vstack([self.after, np.array([step], np.float32)]))


def formula(
    weights: Array,
    *,
    vectors: bool = True,
    thin: int = KEEP_ALL,
    cuts: Array | None = None,
    outliers: Array | None = None,
    draws: Array | None = None,
    odds: Array | None = None,
    axis: tuple[int, int, bool] = (1, 1, False),
    marks: Array | None = None,
    rescale: Array | None = None,
    groups: tuple[int, int, bool] = (0, 1, False),
    combine: int = SUM,
    weighted: bool = False,
    normalize: bool = False,
    cancelled: float = 1.0,
    divisor: float = 1.0,
    factor: float = 1.0,
) -> Formula:
    """A formula of the tables that its steps read; the others are of no effect."""
    experts = len(weights)
    return Formula(
        weights,
        bool(vectors),
        thin,
        np.zeros((experts, 2), np.int64) if cuts is None else cuts,
        np.zeros((experts, 2), np.int64) if outliers is None else outliers,
        np.zeros((experts, 3), np.int64) if draws is None else draws,
        np.ones((experts, 2)) if odds is None else odds,
        np.array(axis, np.int64),
        np.zeros((0, experts, 0), np.uint8) if marks is None else marks,
        np.ones((experts, 2), np.float32) if rescale is None else rescale,
        np.array(groups, np.int64),
        combine,
        bool(weighted),
        bool(normalize),
        float(cancelled),
        np.array([[divisor, factor, 0.0]], np.float32),
    )


def merge(
    formula: Formula,
    members: Array,
    start: int,
    size: int,
    tile: int,
    strip: int,
    target: Array,
    number: Array,
) -> tuple[bool, bool, int]:
    """Merge `size` coordinates of a tensor from `start` on; whether input and output are finite,
    and the checksum of what was written to a file.

    Members are the experts, then the reference if the formula reads it. `target` is a row as those
    of members; of the type NORM or LEAD, that number is added to number[0] tile by tile instead, in
    a fixed order of addition. Once a result is not finite, nothing more is written to a file.
    """
    if formula.is_sum and target[0] < NORM:
        how = (formula.weights, formula.vectors, formula.after)
        return _native.weighted_rows(*how, members, size, target)
    return _native.merge(*formula, members, start, size, tile, strip, target, number)


def norms_of_thinning(
    members: Array,
    start: int,
    size: int,
    formula: Formula,
    tile: int,
    strip: int,
    norms: Array,
    marks: Array,
) -> bool:
    """Add the ℓ1 norms of task vectors before and after thinning to (2, experts); finite?

    Members are the experts and the reference. What stays is marked for MARKED, where there is room.
    """
    how = (formula.thin, formula.cuts, formula.outliers, formula.draws, formula.odds, formula.axis)
    where = (formula.groups, members, start, size, tile, strip)
    return _native.norms_of_thinning(*how, *where, norms, marks)


def norm(values: Array) -> float:
    """ℓ1 norm of a tile."""
    return _native.norm(values)


def weighted_sum(values: Array, weights: Array, out: Array) -> None:
    """Σ_d w_d v_d."""
    _native.weighted_sum(values, weights, out)


def add_scaled(total: Array, values: Array, factor: float) -> None:
    """total += values · factor, each product and each sum rounded."""
    _native.add_scaled(total, values, factor)


def scale(out: Array, divisor: float, factor: float) -> None:
    """τ / divisor · factor."""
    _native.scale(out, divisor, factor)
