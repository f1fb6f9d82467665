"""Values as data: every built-in value comes back equal and of its type, classes do not."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmerge.sandbox import plain
from sigmerge.sandbox.plain import Opaque, decode, encode

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(LEAVES, inner),
        st.sets(LEAVES),
        st.frozensets(LEAVES),
    ),
    max_leaves=20,
)


def sent(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_built_in_values_come_back(value: Any):
    found = sent(value)
    assert found == value
    assert type(found) is type(value)


def test_what_json_alone_cannot_hold():
    assert sent(10**5000) == 10**5000
    assert sent("\\ud800") == "\\ud800"
    assert str(sent(float("nan"))) == "nan"
    assert sent(range(1, 9, 2)) == range(1, 9, 2)


NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))


@settings(max_examples=20, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=20), st.sampled_from([list, tuple, set, frozenset]))
def test_long_rows_of_numbers_come_back(some: list[Any], kind: Any):
    row = kind((some * plain.LONG)[: plain.LONG])
    distinct = kind([*range(plain.LONG), *some])
    for value in (row, distinct):
        found = sent(value)
        assert found == value and type(found) is kind
        assert sorted(map(repr, found)) == sorted(map(repr, value))


@pytest.mark.parametrize("other", [True, 2**63, "1", None, 1j, numpy.float64(1)])
def test_a_long_row_with_anything_else_comes_back(other: Any):
    row = [*range(plain.LONG), other]
    assert sent(row) == row and [type(each) for each in sent(row)] == [type(each) for each in row]


def test_a_million_numbers_take_few_bytes():
    row = [i / 2 for i in range(10**6)]
    assert len(json.dumps(encode([row]))) < 13 * 10**6


def test_subclasses_become_what_they_hold():
    pair = namedtuple("pair", "a b")
    for value in (Counter("aab"), OrderedDict(x=1), pair(1, 2)):
        assert sent(value) == value
        assert type(sent(value)) in (dict, tuple)


@pytest.mark.parametrize("value", [numpy.arange(6).reshape(2, 3), numpy.float32(0.1), numpy.True_])
def test_numbers_of_numpy(value: Any):
    assert type(sent(value)) is type(value)
    assert numpy.array_equal(sent(value), value) and sent(value).dtype == value.dtype


def test_anything_else_is_opaque():
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

    endless: list[Any] = []
    endless.append(endless)
    for value in (Equal(), object(), len, numpy.array([object()]), (i for i in ())):
        found = sent(value)
        assert isinstance(found, Opaque) and found != 1 and found is not None
    assert "opaque" in json.dumps(encode(endless))


@pytest.mark.parametrize(
    "data",
    [["os.system", "true"], [], 5, None, ["int", "two"], ["array", "O", [1], ["list", ["none"]]],
     ["list", "numbers", "ff", "AAAAAAAAAAA=", ""], ["list", "numbers", "x", "", ""],
     ["list", "numbers", "", "AAA", ""], ["list", "numbers", 5, "", ""], ["list", "numbers"],
     ["range", "a"], ["dict", 1], {"list": 1}, ["set", ["list"]]],
)  # fmt: skip
def test_what_is_no_encoded_value_is_refused(data: Any):
    with pytest.raises(ValueError):
        decode(data)
