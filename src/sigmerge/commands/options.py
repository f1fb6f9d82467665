"""How a run is done, as opposed to what it computes: no option here changes a byte of weights."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sigmerge.engine.machine import default_threads

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all)."""


def silent(stage: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Options:
    threads: int = field(default_factory=default_threads)
    max_shard_size: str = "5GB"
    overwrite: bool = False
    allow_pickle: bool = False
    allow_nonfinite: bool = False
    trust_remote_code: bool = False
    """Whether a checkpoint's own Python code may be run to load it."""
    progress: Progress = silent


class Meter:
    """Wall time and peak memory of a run."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def read(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else 1024
        return {
            "wall_seconds": round(time.perf_counter() - self._start, 3),
            "peak_memory_bytes": peak * unit,
        }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("sigmerge", "numpy", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source tree"
    return found
