"""Rows of tokens that a model lacks, formed from rows that it has.

With `omp` and `knn` a row of the donor is written as Σ c_t d_t over tokens t that both models have,
in the donor's space, and the new row is Σ c_t m_t with the model's rows. All is float64, in batches
that depend on nothing but the shapes; a donor's matrix is read in blocks and never held.

    omp: orthogonal matching pursuit. Each of k steps takes the token whose row has the largest
         inner product with what is left, then solves for all coefficients by least squares.
    knn: the k nearest rows, weighted by 1/distance, or as `weights` says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.lazy import FormedTensor, TensorRun, Values
from sigmerge.core import TILE, Array
from sigmerge.core.philox import key_of, normal

FITTED = ("omp", "knn")
"""Methods that read the donor's rows."""
_ROOM = 1 << 25
"""Numbers of the bases of one batch."""
_EXACT = 1e-7
"""A row is exact where what is left of it is this part."""
_ALONE = threading.Lock()
"""Batches are formed one by one: each uses all processors."""
RowBlocks = Callable[[], Iterator[tuple[int, Array]]]
"""A pass over the rows of all shared tokens: blocks, with the place of their first row."""


@dataclass(frozen=True)
class MissingRows:
    """How rows of tokens that a model lacks are formed."""

    method: str = "omp"
    k: int = 64
    metric: str = "euclidean"
    weights: str = "distance"
    subword: str = "mean"
    scale: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class NewToken:
    """A token that a model lacks: its row in the donor, and its pieces in the model's tokenizer."""

    token: str
    place: int
    pieces: tuple[int, ...] = ()


def batch_size(how: MissingRows, width: int) -> int:
    """How many rows are formed at once."""
    return max(1, min(256, _ROOM // (how.k * width)))


@dataclass(frozen=True, eq=False)
class NewRows(FormedTensor):
    """The rows of a batch of tokens.

    `shared` has the rows of tokens that both have: in the model's tensor, and in the donor's.
    """

    how: MissingRows
    stored: Tensor
    donor: Tensor | None
    shared: Array
    tokens: tuple[NewToken, ...]
    before: bool
    """Whether the tensor embeds tokens; else it is a head."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def room(self) -> int:
        """Bytes that forming takes, and the rows, which are held."""
        width = 0 if self.donor is None else prod(self.donor.shape[1:])
        bases = len(self.tokens) * self.how.k * (3 * width + self.how.k) * 8
        return bases + 64 * TILE * 8 + self.held

    @property
    def held(self) -> int:
        return self.size * 4

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        parts = [self.stored] if self.donor is None else [self.stored, self.donor]
        return [(part, 0, part.size) for part in parts]

    def form(self, values: Values, start: int, out: Array) -> None:
        with _ALONE:
            if self not in values.kept:
                rows = self._rows(values) * self.how.scale
                values.kept[self] = rows.astype(np.float32).reshape(-1)
        out[:] = values.kept[self][start : start + out.size]

    def _rows(self, values: Values) -> Array:
        how, width = self.how, prod(self.shape[1:])
        if how.method == "mean":
            total = np.zeros(width)
            for _, block in _blocks(values, self.stored, None):
                total += block.sum(axis=0)
            return np.tile(total / self.stored.shape[0], (len(self.tokens), 1))
        if how.method == "random":
            return self._drawn(values, width)
        if how.method == "subword":
            return np.stack([self._of_pieces(values, one.pieces, width) for one in self.tokens])
        assert self.donor is not None
        wanted = _gathered(values, self.donor, [one.place for one in self.tokens])
        fit = matching_pursuit if how.method == "omp" else self._nearest
        chosen, factors = fit(wanted, lambda: _blocks(values, self.donor, self.shared[:, 1]), how.k)
        return np.stack([
            c @ _gathered(values, self.stored, self.shared[p, 0])
            for p, c in zip(chosen, factors, strict=True)
        ])  # fmt: skip

    def _drawn(self, values: Values, width: int) -> Array:
        """Normal rows with the deviation that the model's rows have, by the token."""
        total = count = 0.0
        for _, block in _blocks(values, self.stored, None):
            total, count = total + float(np.square(block).sum()), count + block.size
        rows = np.empty((len(self.tokens), width), np.float32)
        for row, one in zip(rows, self.tokens, strict=True):
            normal(key_of(self.how.seed, "tokens", self.name, one.token), 0, row)
        return rows * np.sqrt(total / count)

    def _of_pieces(self, values: Values, pieces: Sequence[int], width: int) -> Array:
        """A row of the rows of a token's pieces; zero without any.

        `weighted_mean` and `last` take of an embedding what comes first, and of a head the other
        end, as mergekit does.
        """
        if not pieces:
            return np.zeros(width)
        rows = _gathered(values, self.stored, pieces)
        if self.how.subword == "sum":
            return np.asarray(rows.sum(axis=0))
        if self.how.subword == "first_last":
            return np.asarray(rows[-1 if self.before else 0])
        steps = np.arange(1.0, len(rows) + 1)
        weighted = self.how.subword == "weighted_mean"
        weights = (steps[::-1] if self.before else steps) if weighted else np.ones(len(rows))
        return np.asarray(weights @ rows / weights.sum())

    def _nearest(self, wanted: Array, blocks: RowBlocks, k: int) -> tuple[Array, Array]:
        cosine = self.how.metric == "cosine"
        chosen, points = nearest(wanted, blocks, k, cosine)
        pairs = zip(wanted, points, strict=True)
        return chosen, np.stack([_weights(self.how.weights, t, p, cosine) for t, p in pairs])


def _blocks(
    values: Values, tensor: Tensor | None, rows: Array | None
) -> Iterator[tuple[int, Array]]:
    """Rows of a tensor (in rising order; None: all) in blocks, with the place of the first."""
    assert tensor is not None
    width = prod(tensor.shape[1:])
    step = max(1, 16 * TILE // width)
    first = 0
    wanted = np.arange(tensor.shape[0]) if rows is None else rows
    for begin in range(0, tensor.shape[0], step):
        end = min(begin + step, tensor.shape[0])
        inside = wanted[(wanted >= begin) & (wanted < end)] - begin
        if len(inside):
            block = values(tensor, begin * width, end * width).reshape(-1, width)
            yield first, block[inside].astype(np.float64)
        first += len(inside)


def _gathered(values: Values, tensor: Tensor, rows: Sequence[int] | Array) -> Array:
    width = prod(tensor.shape[1:])
    found = [values(tensor, int(row) * width, (int(row) + 1) * width) for row in rows]
    return np.stack(found).astype(np.float64)


def matching_pursuit(targets: Array, blocks: RowBlocks, k: int) -> tuple[Array, Array]:
    """The places of k atoms for every target, and their coefficients (Pati et al., 1993).

    A target that is exact before takes no more: the rest of its coefficients is 0.
    """
    count, width = targets.shape
    chosen = np.zeros((count, k), np.int64)
    bases, triangles = np.zeros((count, k, width)), np.zeros((count, k, k))
    triangles[:, range(k), range(k)] = 1
    left, whole = targets.copy(), np.linalg.norm(targets, axis=1)
    going = whole > 0
    for step in range(k):
        if not going.any():
            break
        chosen[:, step], atoms = _most_alike(left, blocks, chosen[:, :step])
        before = bases[:, :step]
        rest, along = atoms, np.zeros((count, step))
        for _ in range(2):  # once more takes out what rounding left
            part = np.einsum("bsd,bd->bs", before, rest)
            rest, along = rest - np.einsum("bs,bsd->bd", part, before), along + part
        length = np.linalg.norm(rest, axis=1)
        going &= length > _EXACT * np.linalg.norm(atoms, axis=1)
        triangles[going, :step, step] = along[going]
        triangles[going, step, step] = length[going]
        bases[going, step] = rest[going] / length[going, None]
        left -= np.einsum("bd,bd->b", bases[:, step], left)[:, None] * bases[:, step]
        going &= np.linalg.norm(left, axis=1) > _EXACT * whole
    right = np.einsum("bsd,bd->bs", bases, targets)
    return chosen, np.linalg.solve(triangles, right[..., None])[..., 0]


def _most_alike(left: Array, blocks: RowBlocks, taken: Array) -> tuple[Array, Array]:
    """The atom with the largest inner product that is not taken, by place and itself."""
    best, place = np.full(len(left), -1.0), np.zeros(len(left), np.int64)
    atoms = np.zeros_like(left)
    for first, block in blocks():
        alike = np.abs(left @ block.T)
        target, step = np.nonzero((taken >= first) & (taken < first + len(block)))
        alike[target, taken[target, step] - first] = -1
        at = alike.argmax(axis=1)
        found = alike[np.arange(len(left)), at]
        better = found > best
        best[better], place[better] = found[better], first + at[better]
        atoms[better] = block[at[better]]
    return place, atoms


def nearest(targets: Array, blocks: RowBlocks, k: int, cosine: bool) -> tuple[Array, Array]:
    """The places of the k nearest atoms of every target, nearest first, and the atoms."""
    far: Array = np.zeros((len(targets), 0))
    places: Array = np.zeros((len(targets), 0), np.int64)
    points: Array = np.zeros((len(targets), 0, targets.shape[1]))
    for first, block in blocks():
        distance = _distances(targets, block, cosine)
        own = np.argsort(distance, axis=1, kind="stable")[:, :k]
        far = np.concatenate([far, np.take_along_axis(distance, own, 1)], axis=1)
        places = np.concatenate([places, first + own], axis=1)
        points = np.concatenate([points, block[own]], axis=1)
        order = np.argsort(far, axis=1, kind="stable")[:, :k]
        far = np.take_along_axis(far, order, 1)
        places = np.take_along_axis(places, order, 1)
        points = np.take_along_axis(points, order[..., None], 1)
    return places, points


def _distances(targets: Array, block: Array, cosine: bool) -> Array:
    inner = targets @ block.T
    if cosine:
        lengths = np.outer(np.linalg.norm(targets, axis=1), np.linalg.norm(block, axis=1))
        return np.asarray(1 - inner / np.maximum(lengths, 1e-6))
    squares = np.square(targets).sum(axis=1)[:, None] + np.square(block).sum(axis=1)
    return np.asarray(squares - 2 * inner)


def _weights(scheme: str, target: Array, points: Array, cosine: bool) -> Array:
    """Coefficients of the points nearest to a target."""
    if scheme == "least_squares":
        return np.asarray(np.linalg.lstsq(points.T, target, rcond=None)[0])
    if scheme == "barycentric":  # least squares whose coefficients sum to 1
        count = len(points)
        system = np.ones((count + 1, count + 1))
        system[:count, :count], system[count, count] = points @ points.T, 0
        right = np.append(points @ target, 1.0)
        return np.asarray(np.linalg.lstsq(system, right, rcond=None)[0][:count])
    if cosine:
        weights = 1 - _distances(target[None], points, True)[0]
    else:
        weights = 1 / np.maximum(np.linalg.norm(points - target, axis=1), 1e-6)
    return np.asarray(weights / max(float(weights.sum()), 1e-6))
