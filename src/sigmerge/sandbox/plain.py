"""Values as JSON that carries data and nothing else: no class, no method, no code.

A program's results leave the sandbox in this form. Its own classes become the built-in values they
hold, or an `Opaque` value that equals nothing, so that a result cannot decide what it is equal to.
This file is also sent into the sandbox as text; it needs the standard library only, and numpy
where values are numpy's.
"""

from __future__ import annotations

import base64
from array import array
from typing import Any

DEEPEST_VALUE = 100
"""Levels of nesting; what lies deeper is opaque."""
LONG = 1000
"""Numbers of a list from which on they are packed: a program may return a million of them."""
ARRAYS = "biufc"
"""Kinds of numpy values that are kept: numbers and truth values."""


class Opaque:
    """A value of which nothing is known but that it is not None."""


def encode(value: Any, depth: int = 0) -> list[Any]:
    """A value as nested lists, each with a tag first."""
    if value is None:
        return ["none"]
    if depth > DEEPEST_VALUE:
        return ["opaque"]
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return _encode_array(value)
    if isinstance(value, bool):
        return ["bool", int(value)]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            items = list(kind.__iter__(value))
            numbers = _encode_numbers(items) if len(items) >= LONG else None
            return [kind.__name__, *(numbers or (encode(each, depth + 1) for each in items))]
    if isinstance(value, dict):
        pairs = [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)]
        return ["dict", *pairs]
    return ["opaque"]


def _encode_numbers(items: list[Any]) -> list[Any] | None:
    """A long row of floats and small integers in few bytes; None if there is anything else."""
    if not {type(item) for item in items} <= {int, float}:
        return None
    floats = array("d", [item for item in items if type(item) is float])
    try:
        whole = array("q", [item for item in items if type(item) is int])
    except OverflowError:
        return None
    places = "".join("f" if type(item) is float else "i" for item in items)
    packed = (base64.b64encode(each.tobytes()).decode() for each in (floats, whole))
    return ["numbers", places, *packed]


def _encode_array(value: Any) -> list[Any]:
    if value.dtype.kind not in ARRAYS:
        return ["opaque"]
    return ["array", value.dtype.str, list(value.shape), encode(value.reshape(-1).tolist())]


def decode(data: Any) -> Any:
    """The value of `encode`'s lists; ValueError for anything else. Runs no code of the sender."""
    try:
        return _decode(data)
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"no encoded value: {error!r}") from None


def _decode(data: Any) -> Any:
    if not isinstance(data, list):
        raise TypeError(f"{type(data).__name__} is no list")
    tag, *rest = data
    if tag == "none":
        return None
    if tag == "opaque":
        return Opaque()
    if tag == "bool":
        return bool(rest[0])
    if tag == "int":
        return int(rest[0], 16)
    if tag == "float":
        return float.fromhex(rest[0])
    if tag == "complex":
        return complex(*map(float.fromhex, rest))
    if tag == "str":
        return str(rest[0])
    if tag == "bytes":
        return bytes.fromhex(rest[0])
    if tag == "range":
        return range(*rest)
    if tag == "dict":
        return {_decode(key): _decode(value) for key, value in rest}
    if tag == "array":
        return _decode_array(*rest)
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if rest and rest[0] == "numbers":
        return kinds[tag](_decode_numbers(*rest[1:]))
    return kinds[tag](_decode(each) for each in rest)


def _decode_numbers(places: str, floats: str, whole: str) -> list[Any]:
    found: dict[str, Any] = {"f": array("d"), "i": array("q")}
    for kind, text in (("f", floats), ("i", whole)):
        found[kind].frombytes(base64.b64decode(text))
        if places.count(kind) != len(found[kind]):
            raise ValueError(f"{len(found[kind])} numbers for {places.count(kind)} places")
    each = {kind: iter(numbers) for kind, numbers in found.items()}
    return [next(each[place]) for place in places]


def _decode_array(kind: str, shape: list[int], values: Any) -> Any:
    import numpy

    if numpy.dtype(kind).kind not in ARRAYS:
        raise TypeError(f"{kind} is no kind of number")
    made = numpy.array(_decode(values), dtype=numpy.dtype(kind)).reshape(shape)
    return made if shape else made[()]
