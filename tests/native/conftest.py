"""Every test here runs on each instruction set that the processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sigmerge import _native


@pytest.fixture(params=_native.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)
