"""Arrays over numbers that lie in memory already, for compiled code.

numba's own `carray` and `ndarray.view` do the same. A compiled kernel that calls them loads the
compiler's room for arrays wherever it is loaded again, which takes longer than many a merge; these
are text of the kernel.
"""

from __future__ import annotations

from typing import Any

from sigmerge.kernels.jit import Intrinsic

_FIELDS = ("nitems", "itemsize", "shape", "strides", "meminfo", "parent")


@Intrinsic
def array_at(typing_context: Any, address: Any, size: Any, dtype: Any) -> Any:
    """`size` numbers from an address on. Whoever gives the address keeps them alive."""
    from numba import types
    from numba.core import cgutils

    made = types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, count, _ = arguments
        width = context.get_abi_sizeof(context.get_data_type(made.dtype))
        array = context.make_array(made)(context, builder)
        array.data = builder.inttoptr(place, array.data.type)
        array.nitems, array.itemsize = count, context.get_constant(types.intp, width)
        array.shape = cgutils.pack_array(builder, [count])
        array.strides = cgutils.pack_array(builder, [array.itemsize])
        return array._getvalue()

    return made(types.uint64, types.intp, dtype), generate


@Intrinsic
def bits_as(typing_context: Any, values: Any, dtype: Any) -> Any:
    """An array with its bits taken for another type of the same width."""
    from numba.core.imputils import impl_ret_borrowed

    if values.dtype.bitwidth != dtype.dtype.bitwidth:
        raise TypeError(f"{values.dtype} and {dtype.dtype} have different widths")
    made = values.copy(dtype=dtype.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        given = context.make_array(values)(context, builder, value=arguments[0])
        array = context.make_array(made)(context, builder)
        array.data = builder.bitcast(given.data, array.data.type)
        for field in _FIELDS:
            setattr(array, field, getattr(given, field))
        return impl_ret_borrowed(context, builder, made, array._getvalue())

    return made(values, dtype), generate


@Intrinsic
def lowest_bit(typing_context: Any, word: Any) -> Any:
    """The number of the lowest bit of a word that is set."""
    from numba import types
    from numba.core import cgutils

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.uint32(types.uint32), generate
