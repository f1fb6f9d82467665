"""Instructions on words side by side: lanes.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sigmerge.kernels import Array
from sigmerge.kernels.jit import Intrinsic, kernel
from sigmerge.kernels.lanes import WORD_LANES, WideWords, Words

FACTOR = 0xD2511F53


def multiplying(kind: type[Words]) -> Any:
    """An instruction: high and low words of products of 64-bit numbers' low halves by FACTOR."""

    def multiply(typing_context: Any, values: Any) -> Any:
        from llvmlite import ir
        from numba import types

        array = types.Array(types.uint64, 2, "C")
        wide = ir.VectorType(ir.IntType(64), WORD_LANES)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(array)(context, builder, value=arguments[0]).data
            place = builder.bitcast(data, wide.as_pointer())
            given = builder.load(place)
            given.align = 8
            do = kind(builder)
            for i, words in enumerate(do.product(builder.trunc(given, do.type), FACTOR)):
                at = builder.gep(place, [ir.IntType(32)(i)])
                builder.store(builder.zext(words, wide), at).align = 8
            return context.get_dummy_value()

        return types.void(array), generate

    return Intrinsic(multiply)


_packed, _wide = multiplying(Words), multiplying(WideWords)


@kernel
def packed_products(values: Array) -> None:
    _packed(values)


@kernel
def wide_products(values: Array) -> None:
    _wide(values)


@pytest.mark.parametrize("products", [packed_products, wide_products])
def test_products_are_the_same_in_lanes_of_both_widths(products: Any) -> None:
    """A processor uses one of them; the other's high halves may have anything, here too."""
    given = np.random.default_rng(0).integers(0, 2**64, WORD_LANES, np.uint64, endpoint=False)
    given[:3] = 0, 2**32 - 1, 2**64 - 1
    values = np.stack([given, given])
    products(values)
    expected = [int(word) % 2**32 * FACTOR for word in given]
    assert [int(word) % 2**32 for word in values[0]] == [one >> 32 for one in expected]
    assert [int(word) % 2**32 for word in values[1]] == [one % 2**32 for one in expected]
