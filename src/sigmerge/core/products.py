"""Inner products of tensors and what is made of them: lengths, angles, the views of direction and
sign (native/products.cpp).

Sums are float64 in one order: coordinate j of a tile belongs to lane j mod LANES, a lane adds its
coordinates in increasing j, and the lanes are added from 0 up. A tensor can be one vector, or many:
those along one axis. Seen as (outer, length, inner), vector o·inner + i has its entries at
(o, ·, i).
"""

from __future__ import annotations

from sigmerge import _native
from sigmerge.core import Array


def gram(members: Array, start: int, size: int, vectors: bool, tile: int, dots: Array) -> bool:
    """Add all inner products, tile by tile, to `dots`; False if something read is not finite.

    With `vectors` they are those of θ_d − θ_ref, the reference being the last member; else those
    of all members' values. What is not finite shows in the squares, which never reach infinity
    otherwise, unless a difference of two finite numbers does.
    """
    return _native.gram(members, size, vectors, tile, dots)


def grams_along(values: Array, length: int, inner: int, dots: Array) -> None:
    """Inner products of every vector along an axis: dots (vectors, rows, rows)."""
    _native.grams_along(values, length, inner, dots)


def combine_along(values: Array, length: int, inner: int, coefficients: Array, out: Array) -> None:
    """Σ_d c_d v_d with float32 coefficients (vectors, rows) of each vector's own."""
    _native.combine_along(values, length, inner, coefficients, out)


def signature(members: Array, start: int, size: int, tile: int, dots: Array, mass: Array) -> bool:
    """Add every task vector, tile by tile, to the sums behind Eq. views (p and s).

    Members are the experts and the reference; returns whether everything read is finite.
    `dots` float64 (experts, experts) gains ⟨Δ_d, Δ_d'⟩; the diagonal is ‖Δ_d‖².
    `mass` float64 (2,) gains [Σ_j m_j c_j, Σ_j m_j], with m_j = max_d |Δ_d[j]| and c_j = 1 where
    some Δ_d[j] > 0 and some Δ_d[j] < 0.
    """
    return _native.signature(members, size, tile, dots, mass)
