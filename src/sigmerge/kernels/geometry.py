"""Lengths and angles of tensors, and what is made of them.

Sums are float64 in the fixed order of `products`, so they have the same bits everywhere. A tensor
can be one vector, or many: those along one axis. Seen as (outer, length, inner), vector o·inner + i
has its entries at (o, ·, i).
"""

from __future__ import annotations

import math

import numpy as np

from sigmerge.kernels import LANES, Array
from sigmerge.kernels.jit import kernel, part
from sigmerge.kernels.products import (
    PRODUCT_STRIP,
    add_lanes,
    add_pair,
    add_pair_less,
    add_products,
    add_three_less,
)
from sigmerge.kernels.raw import array_at
from sigmerge.kernels.rooms import room
from sigmerge.kernels.stored import BF16, take, take_less
from sigmerge.kernels.window import Window, ready


def gram(
    addresses: Array, kinds: Array, window: Window, start: int, size: int, vectors: bool, tile: int,
    dots: Array,
) -> bool:  # fmt: skip
    """Add all inner products, tile by tile, to `dots`; False if something read is not finite.

    With `vectors` they are those of θ_d − θ_ref, the reference being the last member; else those
    of all members' values. What is not finite shows in the squares, which never reach infinity
    otherwise, unless a difference of two finite numbers does.
    """
    lanes = room((*dots.shape, LANES), np.float64, "lanes")
    strips = room((len(dots) + 1, PRODUCT_STRIP), np.float32, "strips")
    few = len(dots) == 2 or (len(dots) == 3 and vectors)
    direct = few and not any(kind != BF16 for kind in kinds.tolist())
    given = (addresses, kinds, window, size, vectors, direct, tile, dots)
    _gram(*given, lanes, lanes.reshape(-1), strips)
    return all(map(math.isfinite, np.diagonal(dots).tolist()))


@kernel
def _gram(
    addresses: Array, kinds: Array, window: Window, size: int, vectors: bool, direct: bool,
    tile: int, dots: Array, lanes: Array, flat: Array, strips: Array,
) -> None:  # fmt: skip
    """`direct`: whole strips are taken as they are stored, which is bfloat16.

    `flat` is `lanes` again, in one dimension.
    """
    members = len(dots)
    rows, less, filled = strips[:members], strips[members], 0
    for first in range(0, size, tile):
        lanes[:] = 0.0
        last = min(first + tile, size)
        for begin in range(first, last, PRODUCT_STRIP):
            count = min(PRODUCT_STRIP, last - begin)
            filled = ready(addresses, window, begin, begin + count, size, filled)
            if direct and count == PRODUCT_STRIP:
                left, right = _stored(addresses[0], begin), _stored(addresses[1], begin)
                if not vectors:
                    add_pair(left, right, flat)
                elif members == 2:
                    add_pair_less(left, right, _stored(addresses[2], begin), flat)
                else:
                    third, base = _stored(addresses[2], begin), _stored(addresses[3], begin)
                    add_three_less(left, right, third, base, flat)
                continue
            if vectors:
                take(addresses[members], kinds[members], begin, less[:count])
            for d in range(members):
                row = rows[d, :count]
                if vectors:
                    take_less(addresses[d], kinds[d], begin, less[:count], row)
                else:
                    take(addresses[d], kinds[d], begin, row)
                rows[d, count:] = 0  # which changes no sum
            add_products(rows, lanes)
        add_lanes(lanes, dots)


@part
def _stored(address: np.uint64, begin: int) -> Array:
    """A strip of 16-bit patterns."""
    place = np.uint64(address + np.uint64(2) * np.uint64(begin))
    return array_at(place, PRODUCT_STRIP, np.uint16)


@kernel
def grams_along(values: Array, length: int, inner: int, dots: Array) -> None:
    """Inner products of every vector along an axis: dots (vectors, rows, rows)."""
    rows, size = values.shape
    dots[:] = 0.0
    for a in range(rows):
        for b in range(a, rows):
            left, right = values[a], values[b]
            for outer in range(size // (length * inner)):
                for k in range(length):
                    first = (outer * length + k) * inner
                    for i in range(inner):
                        product = np.float64(left[first + i]) * np.float64(right[first + i])
                        dots[outer * inner + i, a, b] += product
            for vector in range(len(dots)):
                dots[vector, b, a] = dots[vector, a, b]


@kernel
def combine_along(values: Array, length: int, inner: int, coefficients: Array, out: Array) -> None:
    """Σ_d c_d v_d with coefficients (vectors, rows) of each vector's own."""
    rows, size = values.shape
    out[:] = 0
    for d in range(rows):
        row = values[d]
        for outer in range(size // (length * inner)):
            for k in range(length):
                first = (outer * length + k) * inner
                for i in range(inner):
                    out[first + i] += row[first + i] * coefficients[outer * inner + i, d]
