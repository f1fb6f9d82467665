"""This machine: its cores, its free memory, the versions installed, and what a run takes of it."""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sigmerge.errors import RecipeError

INTERPRETER = 250_000_000
"""Resident bytes of Python with the libraries loaded, before any tensor."""
CORES = 4
"""Cores that one task of a cluster takes at most."""
LIBRARIES = 600_000_000
"""Resident bytes of Python with torch and transformers loaded, before any tensor."""

CGROUP = Path("/sys/fs/cgroup")
"""Where a container's own limits stand."""


def default_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Free memory in bytes: the machine's, or the container's if that is less."""
    found = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) << 10)
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = ((CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        found.append(int(limit) - int(used))
    return max(0, min(found, default=4 << 30))


class Meter:
    """Wall time since it was made, and peak memory of the process."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def wall_seconds(self) -> float:
        return round(time.perf_counter() - self._start, 3)

    @property
    def peak_memory_bytes(self) -> int:
        """Of this process alone: what the system counts also has the parent that it began as."""
        with suppress(OSError, StopIteration, ValueError):
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
        try:
            import resource
        except ImportError:  # Windows says it elsewhere
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024)


def versions() -> dict[str, str]:
    import numpy as np

    found = {"sigmerge": _sigmerge(), "numpy": np.__version__}
    return {"python": platform.python_version(), **found}


@cache
def _sigmerge() -> str:
    try:
        return version("sigmerge-llm")
    except PackageNotFoundError:
        return "source tree"


def load_numpy() -> None:
    """Without the threads of its linear algebra, which wait busily where there are many cores.

    What a command computes runs in threads of its own. Libraries that are loaded later, and
    programs that are started, are not told.
    """
    threads = "OPENBLAS_NUM_THREADS"
    if threads not in os.environ:
        os.environ[threads] = "1"
        import numpy  # noqa: F401

        del os.environ[threads]


def device_kind(device: str) -> str:
    """cpu or cuda, of a device that may have a number."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise RecipeError(f"device: {device!r} is none; there are cpu and cuda.")
    return kind
