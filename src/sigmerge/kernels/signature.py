"""Direction and sign statistics of the task vectors, both in one pass (native/products.cpp)."""

from __future__ import annotations

from sigmerge import _native
from sigmerge.kernels import Array


def signature(members: Array, start: int, size: int, tile: int, dots: Array, mass: Array) -> bool:
    """Add every task vector, tile by tile, to the sums behind Eq. views (p and s).

    Members are the experts and the reference; returns whether everything read is finite.
    `dots` float64 (experts, experts) gains ⟨Δ_d, Δ_d'⟩; the diagonal is ‖Δ_d‖².
    `mass` float64 (2,) gains [Σ_j m_j c_j, Σ_j m_j], with m_j = max_d |Δ_d[j]| and c_j = 1 where
    some Δ_d[j] > 0 and some Δ_d[j] < 0.
    """
    return _native.signature(members, size, tile, dots, mass)
