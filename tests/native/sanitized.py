"""Tests of the core as `make sanitize` builds it: python -m tests.native.sanitized MODULE FORMULAS

The module takes the place of sigmerge._native before anything imports it: the tests of the core,
random formulas on each instruction set, and what a thousand merges leave behind. The process must
run with the sanitizer's library preloaded.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
SKIPPED = "not environment and not no_memory and not test_vectors and not test_same_bytes"
"""Tests of another process, of the compiler, and of whole merges."""
VARIANTS = 12
"""Of every test at most, spread over its parameters; all of them run without sanitizers."""


class Sample:
    """Some variants of every test."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        groups = groupby(items, lambda item: item.nodeid.partition("[")[0])
        sampled = [list(group) for _, group in groups]
        items[:] = [item for group in sampled for item in group[:: -(-len(group) // VARIANTS)]]


def load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("sigmerge._native", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def left_behind(core: Any) -> int:
    """Bytes that a thousand merges take more than a hundred, half of which raise."""
    from sigmerge.core.dtypes import BF16, F32
    from tests.native.pools import Pool, target

    weights, steps = np.ones(3, np.float32), np.zeros((0, 3), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool([BF16, F32, BF16, BF16], 50_000, Path(folder), (0, 1))
        out = np.empty(50_000, np.float32)
        for turn in range(1100):
            if turn == 100:
                before = allocated()
            size = 50_000 if turn % 2 else 10**6  # more than the file has
            try:
                core.weighted_rows(weights, True, steps, pool.table, size, target(out, F32))
            except core.ReadFailed:
                assert size > 50_000
        pool.file.close()
        return allocated() - before


def allocated() -> int:
    gc.collect()
    bytes_now = ctypes.CDLL(None).__sanitizer_get_current_allocated_bytes
    bytes_now.restype = ctypes.c_size_t
    return int(bytes_now())


def main(module: str, formulas: int) -> int:
    core = load(module)
    from sigmerge import _native

    assert _native is core
    from tests.native.test_formulas import check

    for isa in core.isas():
        core.use_isa(isa)
        for number in range(formulas // len(core.isas())):
            with tempfile.TemporaryDirectory() as folder:
                check(2_000_000 + number, Path(folder))
        print(f"{formulas // len(core.isas())} formulas on {isa}")
    left = left_behind(core)
    print(f"a thousand merges left {left} bytes behind")
    assert left < 8000
    return int(
        pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", SKIPPED, str(HERE)], [Sample()])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
