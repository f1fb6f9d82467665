"""The best approximation of a matrix by one of low rank (Eckart and Young 1936)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sigmerge.method.shapes import Float32


class LowRank(NamedTuple):
    """b a ≈ the matrix. `kept` and `total` are squared Frobenius norms of b a and of the matrix."""

    b: Float32[np.ndarray, "rows rank"]
    a: Float32[np.ndarray, "rank columns"]
    kept: float
    total: float


def truncated(
    matrix: Float32[np.ndarray, "rows columns"],
    rank: int | None,
    energy: float | None,
    above: float = 0.0,
) -> LowRank:
    """The largest singular values: `rank` of them at most, or as few as hold this much `energy`;
    those up to `above` are left out, but for the first.

    Energy is the part of the squared Frobenius norm. Each factor gets the root of every singular
    value. Vectors come from the smaller Gram matrix in float64; their largest entry is positive, so
    that equal matrices have equal factors. A zero matrix has factors of rank 1.
    """
    wide = matrix.astype(np.float64)
    turned = wide.shape[0] > wide.shape[1]
    if turned:
        wide = wide.T
    squares, vectors = np.linalg.eigh(wide @ wide.T)
    squares, vectors = squares[::-1], vectors[:, ::-1]
    total = float(np.sum(wide * wide))
    least = max(squares[0] * wide.shape[0] * np.finfo(np.float64).eps, above * above)
    count = max(1, int(np.sum(squares > least)))
    if rank is not None:
        count = min(count, rank)
    if energy is not None:
        enough = int(np.searchsorted(np.cumsum(squares), energy * total)) + 1
        count = max(1, min(count, enough))
    squares, vectors = np.maximum(squares[:count], 0.0), vectors[:, :count]
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(count)])
    roots = squares**0.25
    left = vectors * roots
    right = np.divide(vectors.T @ wide, roots[:, None], where=roots[:, None] > 0,
                      out=np.zeros((count, wide.shape[1])))  # fmt: skip
    b, a = (right.T, left.T) if turned else (left, right)
    b, a = (np.ascontiguousarray(factor, np.float32) for factor in (b, a))
    return LowRank(b, a, float(np.sum(squares)), total)
