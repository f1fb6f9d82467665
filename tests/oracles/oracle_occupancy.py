"""Algorithm 1, lines 11–18, by brute force: float64, stable argsort, every coordinate in memory.

Written from the paper and the rulings alone; imports nothing of the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

FREE = 255
Masks = tuple[frozenset[int], ...]


def claim(deltas: np.ndarray, order: Sequence[int], quota: Sequence[int]) -> np.ndarray:
    """Owner of every coordinate for task vectors of shape (domains, n)."""
    magnitude = np.abs(np.asarray(deltas, np.float64))
    owner = np.full(magnitude.shape[1], FREE, np.uint8)
    for domain in order:
        available = np.flatnonzero(owner == FREE)
        ranked = available[np.argsort(-magnitude[domain, available], kind="stable")]
        owner[ranked[: quota[domain]]] = domain
    return owner


def mass(deltas: np.ndarray, domain: int, mask: Sequence[int] | frozenset[int]) -> float:
    """u_d(M) = Σ_{j∈M} |Δ_d[j]|."""
    return float(np.abs(np.asarray(deltas, np.float64))[domain, sorted(mask)].sum())


def masks_of_size(available: Sequence[int], size: int) -> Iterator[frozenset[int]]:
    return map(frozenset, itertools.combinations(available, size))


def families(n: int, quota: Sequence[int]) -> Iterator[Masks]:
    """All families of pairwise disjoint masks with |M_d| = k_d."""

    def extend(left: frozenset[int], sizes: Sequence[int]) -> Iterator[Masks]:
        if not sizes:
            yield ()
            return
        for mask in masks_of_size(sorted(left), sizes[0]):
            for rest in extend(left - mask, sizes[1:]):
                yield (mask, *rest)

    return extend(frozenset(range(n)), quota)


def add(anchor: np.ndarray, deltas: np.ndarray, owner: np.ndarray, scale: float) -> np.ndarray:
    """Eq. (occupancy) in float64."""
    out = np.asarray(anchor, np.float64).copy()
    for coordinate, domain in enumerate(owner):
        if domain != FREE:
            out[coordinate] += scale * float(deltas[domain, coordinate])
    return out
