"""Values as data: every built-in value comes back equal and of its type, classes do not."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
     ["range", "a"], ["dict", 1], {"list": 1}, ["set", ["list"]]],
)  # fmt: skip
def test_what_is_no_encoded_value_is_refused(data: Any):
    with pytest.raises(ValueError):
        decode(data)
