"""Arguments and results of compiled code as words of eight bytes.

A number is one word, an array is the address of NumPy's object, and a tuple is its items.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

Kind: TypeAlias = Any
"""What the code depends on: the type of a number, (type, dimensions, flags) of an array, and the
type and the kinds of a tuple. Its text is the same in every process."""

_C_ORDER: Final = 0x501
_OTHER_ORDER: Final = 0x503
"""Of NumPy's flags of an array: its order, whether it is aligned and whether it is writable. In C's
order it does not matter whether it is also in Fortran's."""


def kind_of(value: Any, words: list[Any]) -> Kind:
    """The kind of an argument, whose words are appended."""
    if isinstance(value, np.ndarray):
        words.append(id(value))
        flags = value.flags.num
        return value.dtype, value.ndim, flags & (_C_ORDER if flags & 1 else _OTHER_ORDER)
    if isinstance(value, tuple):
        return type(value), *[kind_of(one, words) for one in value]
    words.append(value)
    return type(value)


def format_of(kind: Kind) -> str:
    """How Python's `struct` packs the words of a kind."""
    if not isinstance(kind, tuple):
        return _format_of_number(kind)
    if kind and isinstance(kind[0], np.dtype):
        return "Q"
    return "".join(map(format_of, kind[1:]))


def _format_of_number(kind: type) -> str:
    if issubclass(kind, bool | np.bool_):
        return "?7x"
    if issubclass(kind, float | np.floating):
        return "d"
    if issubclass(kind, int | np.integer):
        return "Q" if issubclass(kind, np.unsignedinteger) else "q"
    raise TypeError(f"a kernel takes arrays, numbers and tuples of these, not {kind.__name__}")
