"""Low-rank updates of several adapters in bases that they share; no full matrix is formed.

Notation: Δ_t = s_t B_t A_t, (out, in), is the update of adapter t, of rank r_t; R = Σ_t r_t.

core (Panariello et al. 2025): U spans all B_t and V all A_t, the singular vectors of
[s_1 B_1 … s_T B_T] and of [A_1; …; A_T]. Coordinates are the cores Uᵀ Δ_t V, R × R.
knots (Stoica et al. 2025): [Δ_1 … Δ_T] = U Σ [V_1 … V_T]ᵀ. Coordinates are Σ V_tᵀ = Uᵀ Δ_t, R × in.

Both lose nothing: Δ_t = U (coordinates) Vᵀ. An adapter without an update of a matrix has zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.lazy import FormedTensor, TensorRun, Values
from sigmerge.core import Array

CommonSpace = Literal["core", "knots"]
MATRICES_HELD = 4
"""Matrices whose coordinates stay in memory while pieces of them are read."""


class ScaledFactors(NamedTuple):
    """s B A of one adapter."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class Coordinates(NamedTuple):
    """The bases in columns, and every adapter's coordinates; `right` is None for the identity."""

    left: Array
    right: Array | None
    each: tuple[Array, ...]


@dataclass(frozen=True)
class SharedMatrix:
    """A matrix that adapters update. `module` is PEFT's name; None is an adapter without one."""

    module: str
    embedding: bool
    updates: tuple[ScaledFactors | None, ...]
    space: CommonSpace

    @property
    def sides(self) -> tuple[int, int]:
        """Outputs and inputs."""
        known = next(one for one in self.updates if one)
        return known.b.shape[0], known.a.shape[1]

    @property
    def rank(self) -> int:
        """R: more no result can have."""
        return sum(one.rank for one in self.updates if one)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the coordinates."""
        outputs, inputs = self.sides
        return min(self.rank, outputs), inputs if self.space == "knots" else min(self.rank, inputs)

    def written_rank(self, most: int | None) -> int:
        return min(most or self.rank, *self.shape)

    @property
    def scratch(self) -> int:
        """Bytes that one thread takes for the bases: three copies of both stacks, the coordinates
        twice."""
        own = len(self.updates) * int(np.prod(self.shape))
        return 8 * (3 * self.rank * sum(self.sides) + 2 * own)

    def factored(self, merged: Array, most: int | None, values: Values) -> tuple[Array, Array]:
        """B and A of merged coordinates: the largest singular values, each with half its root."""
        rank = self.written_rank(most)
        left, right, _ = coordinates(values, self)
        outer, sizes, inner = np.linalg.svd(merged.astype(np.float64), full_matrices=False)
        roots = np.sqrt(sizes[:rank])
        b, a = left @ (outer[:, :rank] * roots), inner[:rank] * roots[:, None]
        return b, a if right is None else a @ right.T


@dataclass(frozen=True)
class CoordinateTensor(FormedTensor):
    """An adapter's coordinates of a matrix; `place` is its number among the adapters."""

    matrix: SharedMatrix
    place: int

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        """All factors of an adapter: its own decide, with the others', what any entry is."""
        own = self.matrix.updates[self.place]
        return [(part, 0, part.size) for part in (own.a, own.b)] if own else []

    def form(self, values: Values, start: int, out: Array) -> None:
        every = coordinates(values, self.matrix).each[self.place]
        out[:] = every.reshape(-1)[start : start + out.size]


@dataclass(frozen=True)
class ZeroTensor(FormedTensor):
    """The coordinates of the model that is adapted: it is where updates begin."""

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        return []

    def form(self, values: Values, start: int, out: Array) -> None:
        out[:] = 0


@lru_cache(maxsize=MATRICES_HELD)
def coordinates(values: Values, matrix: SharedMatrix) -> Coordinates:
    """The bases and coordinates of a matrix, in float64; a few are held, until `let_go`."""
    outputs, inputs = matrix.sides
    bs, rows = [], []
    for one in matrix.updates:
        rank = one.rank if one else 0
        b, a = np.empty((outputs, rank)), np.empty((rank, inputs))
        if one is not None:
            b[:] = values(one.b, 0, one.b.size).reshape(b.shape)
            a[:] = values(one.a, 0, one.a.size).reshape(a.shape)
            b *= one.scale
        bs.append(b)
        rows.append(a)
    left, ours = _basis(bs)
    if matrix.space == "core":
        right, theirs = _basis([a.T for a in rows])
        cores = tuple(own @ their.T for own, their in zip(ours, theirs, strict=True))
        return Coordinates(left, right, cores)
    parts = [own @ a for own, a in zip(ours, rows, strict=True)]
    gram = np.zeros((left.shape[1],) * 2)
    for part in parts:
        gram += part @ part.T
    turn = np.linalg.eigh(gram)[1][:, ::-1]
    return Coordinates(left @ turn, None, tuple(turn.T @ part for part in parts))


def _basis(stacked: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Left singular vectors of matrices side by side, and each matrix in their coordinates."""
    basis, triangle = np.linalg.qr(np.concatenate(stacked, axis=1))
    turn = np.linalg.svd(triangle)[0]
    ends = np.cumsum([0, *(one.shape[1] for one in stacked)])
    own = [turn.T @ triangle[:, i:j] for i, j in pairwise(ends)]
    return basis @ turn, own


def let_go() -> None:
    """Free what `coordinates` holds."""
    coordinates.cache_clear()


def placed(stored: Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a formed tensor of coordinates has of the tensor that it stands for."""
    return {"name": stored.name, "dtype": "F32", "shape": shape, "file": stored.file,
            "begin": stored.begin, "end": stored.end}  # fmt: skip
