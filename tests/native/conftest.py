"""Every test here runs on each instruction set that the processor has.

A test with MANY variants or more runs each of them on one instruction set, drawn by its name; the
campaign runs them on the others.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sigmerge import _native

HERE = Path(__file__).parent
MANY = 8


@pytest.hookimpl(tryfirst=True)  # before the marks are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents and hasattr(item, "callspec")]
    variants = Counter(_function(item) for item in ours)
    for item in ours:
        isa, isas = item.callspec.params.get("isa"), _native.isas()
        if isa is None or variants[_function(item)] < MANY * len(isas):
            continue
        if item.path.name == "test_same_bytes.py" and len(isas) > 1:
            isas = isas[:-1]  # on the newest all rows are made elsewhere
        if isa != isas[zlib.crc32(item.name.replace(isa, "", 1).encode()) % len(isas)]:
            item.add_marker(pytest.mark.campaign)


def _function(item: pytest.Item) -> tuple[Path, str]:
    return item.path, item.name.partition("[")[0]


@pytest.fixture(params=_native.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)
