"""numba's part: it compiles a kernel with all that it calls to code that needs neither numba nor
Python.

The code has one entry, a C function of one address where the words of the arguments lie. It leaves
the words of the result there, and returns whether the kernel failed.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, codegen, config
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from sigmerge.kernels.entries import ObjectCode, sealed, stamp, unsealed

_WORD, _BYTE, _DOUBLE = ir.IntType(64), ir.IntType(8), ir.DoubleType()
_ADDRESS = _BYTE.as_pointer()
_HEAD = 64
"""Bytes before the numbers of an array that a kernel makes: numba's count of references to it, two
places that are not used here, the address of the numbers, and their size."""


def use_wide_registers() -> None:
    """Compile for registers of 512 bits where they cost no speed: from Ice Lake and Zen 4 on.

    LLVM prefers half of their width on Intel's processors, the first of which had to slow down for
    the whole. From now on this holds for all that numba compiles in this process, unless it is told
    otherwise (NUMBA_CPU_FEATURES).
    """
    if config.CPU_FEATURES is None and binding.get_host_cpu_features().get("avx512vbmi2"):
        config.CPU_FEATURES = f"{codegen.get_host_cpu_features()},-prefer-256-bit"


use_wide_registers()


def dispatcher(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """What numba calls a compiled function; parts of several kernels are kept by numba itself."""
    made = numba.njit(**options)(function)
    if "inline" not in options:
        made._cache = cache = FunctionCache(function)
        made_of = stamp(function.__code__.co_filename)
        cache._cache_file = _Sealed(cache.cache_path, cache._impl.filename_base, made_of)
    return made


class _Sealed(IndexDataCacheFile):
    """numba's own files, with a digest: what is damaged, or made of anything else, is not there.

    numba itself asks for the age of the function's own file alone, and the code of others is part
    of it.
    """

    def _load_index(self) -> dict[Any, Any]:
        return self._load_data(self._index_name) or {}

    def _save_index(self, overloads: dict[Any, Any]) -> None:
        self._save_data(self._index_name, overloads)

    def _load_data(self, name: str) -> Any:
        with suppress(OSError):
            data = Path(self._data_path(name)).read_bytes()
            content = unsealed(name, self._source_stamp, data)
            return None if content is None else pickle.loads(content)
        return None

    def _save_data(self, name: str, data: Any) -> None:
        with suppress(OSError), self._open_for_write(self._data_path(name)) as stream:
            stream.write(sealed(name, self._source_stamp, self._dump(data)))


def intrinsic_type(generate: Callable[..., Any]) -> Any:
    made = intrinsic(generate)
    cpu_target.typing_context.refresh()
    return cpu_target.typing_context.resolve_value_type(made)


def external_type(name: str, result: str, arguments: tuple[str, ...]) -> Any:
    taken = [getattr(types, argument) for argument in arguments]
    return types.ExternalFunction(name, getattr(types, result)(*taken))


@global_compiler_lock
def compiled(function: Any, arguments: tuple[Any, ...], symbol: str) -> tuple[ObjectCode, bool]:
    """ObjectCode for such arguments, and whether it needs nothing but the C library."""
    given = tuple(map(numba.typeof, arguments))
    function.compile(given)
    found = function.overloads[given]
    context = found.target_context
    library = context.codegen().create_library(symbol)
    returned = found.signature.return_type
    library.add_ir_module(_entry(context, found.fndesc, symbol))
    module = library._final_module
    module.link_in(found.library._get_module_for_linking(), preserve=True)
    module.link_in(binding.parse_assembly(str(_memory(context))))
    _hide_all_but(symbol, module)
    library._optimize_final_module()
    module.verify()
    body = context.codegen()._tm.emit_object(module)
    formats = "".join(_format(one) for one in _items(returned))
    return ObjectCode(formats, isinstance(returned, types.BaseTuple), body), _is_whole(module)


def _entry(context: Any, kernel: Any, symbol: str) -> Any:
    """The function that reads arguments from words, calls the kernel and writes the result."""
    module = context.create_module(symbol)
    entry = ir.Function(module, ir.FunctionType(ir.IntType(32), [_ADDRESS]), symbol)
    builder = ir.IRBuilder(entry.append_basic_block())
    convention = context.call_conv
    kind = convention.get_function_type(kernel.restype, kernel.argtypes)
    callee = ir.Function(module, kind, kernel.llvm_func_name)
    places = _places(builder, entry.args[0])
    given = [_read(context, builder, one, places) for one in kernel.argtypes]
    status, result = convention.call_function(
        builder, callee, kernel.restype, kernel.argtypes, given
    )
    items = [result]
    if isinstance(kernel.restype, types.BaseTuple):
        items = cgutils.unpack_tuple(builder, result, len(kernel.restype))
    places = _places(builder, entry.args[0])
    for one, item in zip(_items(kernel.restype), items, strict=False):
        wide = context.cast(builder, item, one, _wide(one))
        wide = builder.zext(wide, _BYTE) if isinstance(one, types.Boolean) else wide
        builder.store(wide, builder.bitcast(next(places), wide.type.as_pointer()))
    builder.ret(builder.zext(status.is_error, ir.IntType(32)))
    return module


def _places(builder: Any, first: Any) -> Iterator[Any]:
    """The addresses of one word after the other."""
    number = 0
    while True:
        yield builder.gep(first, [_WORD(8 * number)])
        number += 1


def _read(context: Any, builder: Any, kind: Any, places: Iterator[Any]) -> Any:
    """An argument of a type of numba's from the next words."""

    def word(wanted: Any) -> Any:
        return builder.load(builder.bitcast(next(places), wanted.as_pointer()))

    if isinstance(kind, types.BaseTuple):
        return context.make_tuple(
            builder, kind, [_read(context, builder, one, places) for one in kind]
        )
    if isinstance(kind, types.Array):
        return _array(context, builder, kind, word(_WORD))
    if isinstance(kind, types.Boolean):
        return builder.icmp_unsigned("!=", word(_BYTE), _BYTE(0))
    held = word(_DOUBLE if isinstance(kind, types.Float) else _WORD)
    return context.cast(builder, held, _wide(kind), kind)


def _array(context: Any, builder: Any, kind: Any, place: Any) -> Any:
    """The array of NumPy's object at a place: `PyArrayObject_fields` in its ndarraytypes.h."""

    def field(start: Any, number: int) -> Any:
        return builder.load(
            builder.gep(builder.inttoptr(start, _WORD.as_pointer()), [_WORD(number)])
        )

    data, _, lengths, steps = (field(place, object.__basicsize__ // 8 + i) for i in range(4))
    shape = [field(lengths, i) for i in range(kind.ndim)]
    strides = [field(steps, i) for i in range(kind.ndim)]
    array = context.make_array(kind)(context, builder)
    array.data = builder.inttoptr(data, array.data.type)
    array.itemsize = _WORD(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    array.nitems = _WORD(1)
    for length in shape:
        array.nitems = builder.mul(array.nitems, length)
    array.shape = cgutils.pack_array(builder, shape, _WORD)
    array.strides = cgutils.pack_array(builder, strides, _WORD)
    return array._getvalue()


def _items(returned: Any) -> tuple[Any, ...]:
    if isinstance(returned, types.BaseTuple):
        return tuple(returned)
    return () if returned == types.none else (returned,)


def _wide(kind: Any) -> Any:
    """The type of the word that holds a number."""
    if isinstance(kind, types.Boolean):
        return kind
    if isinstance(kind, types.Float):
        return types.float64
    if isinstance(kind, types.Integer):
        return types.int64 if kind.signed else types.uint64
    raise TypeError(f"a kernel takes and returns numbers, not {kind}")


def _format(kind: Any) -> str:
    """How Python's `struct` unpacks it."""
    formats = {types.float64: "d", types.int64: "q", types.uint64: "Q"}
    return formats.get(_wide(kind), "?7x")


def _memory(context: Any) -> Any:
    """Arrays that a kernel makes, from the C library: the two functions that numba's code calls."""
    module = context.create_module("memory")
    malloc = ir.Function(module, ir.FunctionType(_ADDRESS, [_WORD]), "malloc")
    free = ir.Function(module, ir.FunctionType(ir.VoidType(), [_ADDRESS]), "free")
    count = ir.IntType(32)
    make = ir.Function(
        module, ir.FunctionType(_ADDRESS, [_WORD, count]), "NRT_MemInfo_alloc_aligned"
    )
    size, align = make.args
    builder = ir.IRBuilder(make.append_basic_block())
    align = builder.zext(align, _WORD)
    place = builder.call(malloc, [builder.add(builder.add(size, align), _WORD(_HEAD))])
    with builder.if_then(cgutils.is_null(builder, place)):
        builder.ret(place)
    least = builder.add(builder.ptrtoint(place, _WORD), builder.add(align, _WORD(_HEAD - 1)))
    numbers = builder.and_(least, builder.neg(align))
    head = builder.bitcast(place, _WORD.as_pointer())
    for number, word in enumerate((_WORD(1), _WORD(0), _WORD(0), numbers, size)):
        builder.store(word, builder.gep(head, [_WORD(number)]))
    builder.ret(place)
    drop = ir.Function(module, free.function_type, "NRT_MemInfo_call_dtor")
    builder = ir.IRBuilder(drop.append_basic_block())
    builder.call(free, drop.args)
    builder.ret_void()
    return module


def _hide_all_but(symbol: str, module: Any) -> None:
    """The code of other entries may have functions and constants of the same names."""
    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration and one.name != symbol:
            one.linkage = "internal"


def _is_whole(module: Any) -> bool:
    """Whether all that it calls is in every process: of numba's own functions there are none."""
    process = ctypes.CDLL(None)
    return all(
        one.name.startswith("llvm.") or hasattr(process, one.name)
        for one in (*module.functions, *module.global_variables)
        if one.is_declaration
    )
