"""How kernels are compiled: by numba, once, without the GIL, and kept on disk."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import Cache, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys


class KernelCache:
    """numba's cache of one kernel, opened when the kernel is first called.

    numba opens the cache of a function where it is defined, and tries out whether a file can be
    made in its folder. A merge imports many kernels and calls few.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @functools.cached_property
    def opened(self) -> FunctionCache:
        cache = FunctionCache(self._function)
        # numba looks at the kernel's own file alone, and the code of others is part of it.
        cache._cache_file._source_stamp = (cache._cache_file._source_stamp, _sources())
        return cache

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Load a compiled kernel without first loading the compiler.

        numba initialises all it could need for compiling, which takes longer than many a merge.
        Code that is compiled already needs the runtime alone; a miss here initialises the rest as
        before.
        """
        if not _SHORTCUT:
            return self.opened.load_overload(signature, target_context)
        rtsys.initialize(target_context)
        with self.opened._guard_against_spurious_io_errors():
            return self.opened._load_overload(signature, target_context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)


_SHORTCUT = hasattr(Cache, "_load_overload") and hasattr(Cache, "_guard_against_spurious_io_errors")

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    # Division as NumPy divides: the check for zero that Python's needs keeps loops out of vectors.
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
}


def kernel(function: Callable[..., Any]) -> Any:
    """A compiled function that is kept on disk."""
    return _kept(njit(**_OPTIONS)(function), function)


def part(function: Callable[..., Any]) -> Any:
    """A compiled function that kernels call and Python does not: it needs no wrapper."""
    return _kept(njit(**_OPTIONS, no_cpython_wrapper=True)(function), function)


def exact(function: Callable[..., Any]) -> Any:
    """A part whose products are exact: one instruction may multiply and add, to the same bits."""
    options = {**_OPTIONS, "no_cpython_wrapper": True, "fastmath": {"contract"}}
    return _kept(njit(**options)(function), function)


def variants(make: Callable[..., Any]) -> Callable[..., Any]:
    """make(constants) once for each, also where threads need the same kernel at the same time."""
    made, lock = functools.cache(make), threading.Lock()

    def variant(*constants: Any) -> Any:
        with lock:
            return made(*constants)

    return variant


def callback(function: Callable[..., Any], result: Any, *arguments: Any) -> int:
    """The address of a function that the system may call: types are numba's."""
    compiled: Any = CFunc(function, (arguments, result), locals={}, options={})
    _kept(compiled, function).compile()
    return int(compiled.address)


def _kept(compiled: Any, function: Callable[..., Any]) -> Any:
    compiled._cache = KernelCache(function)
    return compiled


def start() -> None:
    """Compile numba's runtime in a thread of its own, while the caller imports what it needs.

    That is LLVM's work, for which Python's lock is not needed. Whoever loads a kernel waits for it.
    """
    threading.Thread(target=rtsys.initialize, args=(cpu_target.target_context,)).start()


@functools.cache
def _sources() -> str:
    """A digest of all kernels: compiled code of other ones is not used again."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


inlined = njit(nogil=True, inline="always")
"""Becomes text of the kernels that call it: a branch on a constant that they pass is dropped."""
