"""How kernels are compiled: by numba, once, without the GIL, and kept on disk."""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.core.caching import Cache
from numba.core.runtime import rtsys

kernel = njit(cache=True, nogil=True)
inlined = njit(cache=True, nogil=True, inline="always")


def _load_overload(self: Any, signature: Any, target_context: Any) -> Any:
    """Load a compiled kernel without first loading the compiler.

    numba initialises all it could need for compiling, which takes longer than many a merge. Code
    that is compiled already needs the runtime alone; a miss here initialises the rest as before.
    """
    rtsys.initialize(target_context)
    with self._guard_against_spurious_io_errors():
        return self._load_overload(signature, target_context)


if hasattr(Cache, "_load_overload") and hasattr(Cache, "_guard_against_spurious_io_errors"):
    Cache.load_overload = _load_overload
