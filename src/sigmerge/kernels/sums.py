"""Steps of sums in float32, in place."""

from __future__ import annotations

from sigmerge import _native
from sigmerge.kernels import Array


def add_scaled(total: Array, values: Array, factor: float) -> None:
    """total += values · factor, each product and each sum rounded."""
    _native.add_scaled(total, values, factor)


def scale(out: Array, divisor: float, factor: float) -> None:
    """τ / divisor · factor."""
    _native.scale(out, divisor, factor)
