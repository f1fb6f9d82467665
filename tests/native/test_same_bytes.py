"""Whole merges and repairs of the embedded pool: the table's bytes on each instruction set.

The newest one makes all rows of the table in tests/test_same_bytes.py; the others those that take
every family of the core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from sigmerge import _native
from tests.test_same_bytes import KNOWN, makers

ROWS = (
    "linear, preset mergekit", "task_arithmetic, preset paper", "ties, preset mergekit",
    "ties, preset paper", "dare_linear, preset mergekit", "dare_ties, preset paper",
    "cabs, preset paper", "della", "breadcrumbs_ties", "model_stock", "sce", "slerp", "nuslerp",
    "karcher", "nearswap", "ramplus_tl", "consensus", "localize_stitch",
    "default", "random_mask", "sparse_update", "replace", "two rounds",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What makes the rows, with a folder for each instruction set."""
    return cache(lambda isa: makers(tmp_path_factory.mktemp(isa)))


def test_rows_are_of_the_table() -> None:
    assert {f"exact: {name}" for name in ROWS} <= set(KNOWN["rows"])


@pytest.mark.parametrize("name", ROWS)
def test_bytes_are_those_of_the_table(
    name: str, isa: str, rows: Callable[[str], dict[str, Any]]
) -> None:
    if isa == _native.isas()[-1]:
        pytest.skip("tests/test_same_bytes.py makes all rows with it")
    assert rows(isa)[f"exact: {name}"]() == KNOWN["rows"][f"exact: {name}"]
