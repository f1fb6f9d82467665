"""`make bench`: every benchmark in turn; 1 if one of them misses a bar."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = (
    "dense",
    "small",
    "methods",
    "claiming",
    "repair",
    "capture",
    "scaling",
    "trust",
    "adapters",
)


def main() -> int:
    missed = 0
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        missed |= import_module(f"benchmarks.{name}").main([])
    return missed


if __name__ == "__main__":
    sys.exit(main())
