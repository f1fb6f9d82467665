"""How kernels are compiled: by numba, once, and kept on disk as code that runs without numba.

To import numba takes longer than many a merge. So a decorator here only notes a function; numba is
imported when one is called of which no compiled code is kept, and asks each for what stands for it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from sigmerge.kernels import entries
from sigmerge.kernels.words import Kind, kind_of

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    # Division as NumPy divides: the check for zero that Python's needs keeps loops out of vectors.
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "no_cpython_wrapper": True,
}
_LOADING = threading.Lock()
"""Held by whoever loads or compiles a kernel."""


class Placeholder:
    """Stands for a function that compiled code calls and Python does not."""

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError(f"{self!r} is for compiled code")

    @property
    def _numba_type_(self) -> Any:
        """What numba compiles a call of it by."""
        raise NotImplementedError


class Compilable(Placeholder):
    """A function that is compiled, as numba's options say."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.py_func, self.targetoptions = function, options  # numba's names, which it reads

    @functools.cached_property
    def dispatcher(self) -> Any:
        """numba's own object for the function."""
        from sigmerge.kernels.compiler import dispatcher

        return dispatcher(self.py_func, self.targetoptions)

    @property
    def _numba_type_(self) -> Any:
        return self.dispatcher._numba_type_

    def __repr__(self) -> str:
        """The same in every process, and another for other constants around the function."""
        cells = self.py_func.__closure__ or ()
        constants = tuple(cell.cell_contents for cell in cells)
        return f"{self.py_func.__module__}.{self.py_func.__qualname__}{constants}"

    def __reduce__(self) -> str:
        return self.py_func.__qualname__


class Kernel(Compilable):
    """A compiled function that Python calls. It returns numbers.

    Arguments are arrays, numbers and tuples of these, in their order. Python's lock is released
    around a call, unless it is `brief`.
    """

    def __init__(
        self, function: Callable[..., Any], options: dict[str, Any], *, brief: bool = False
    ) -> None:
        super().__init__(function, options)
        self._brief = brief
        self._entries: dict[tuple[Kind, ...], entries.LoadedCode] = {}

    def __call__(self, *arguments: Any) -> Any:
        words: list[Any] = []
        kinds = tuple([kind_of(one, words) for one in arguments])
        entry = self._entries.get(kinds)
        return (entry or self._entered(kinds, arguments))(words)

    @property
    def address(self) -> int:
        """Of the code of a kernel without arguments, which the system may call."""
        return self._entered((), ()).address

    def _entered(self, kinds: tuple[Kind, ...], arguments: tuple[Any, ...]) -> entries.LoadedCode:
        with _LOADING:
            if kinds not in self._entries:
                self._entries[kinds] = self._loaded(kinds, arguments)
            return self._entries[kinds]

    def _loaded(self, kinds: tuple[Kind, ...], arguments: tuple[Any, ...]) -> entries.LoadedCode:
        symbol = entries.symbol(repr(self), kinds)
        stamp = entries.stamp(self.py_func.__code__.co_filename)
        code = entries.kept(symbol, stamp)
        if code is None:
            _say_once()
            from sigmerge.kernels.compiler import compiled

            code, alone = compiled(self.dispatcher, arguments, symbol)
            if alone:
                entries.keep(symbol, stamp, code)
        return entries.LoadedCode(symbol, code, kinds, brief=self._brief)


@functools.cache
def _say_once() -> None:
    """The first merge after an installation takes seconds longer: say why."""
    logging.getLogger(__name__).info(
        "compiling for this processor, which takes some seconds and happens once; "
        "`python -m sigmerge.warm` does it for all methods"
    )


class Intrinsic(Placeholder):
    """Instructions that compiled code has in place of a call; see numba's `intrinsic`."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        functools.update_wrapper(self, generate)
        self._generate = generate

    @functools.cached_property
    def _numba_type_(self) -> Any:
        from sigmerge.kernels.compiler import intrinsic_type

        return intrinsic_type(self._generate)


class External(Placeholder):
    """A function of the C library, for compiled code: its name and numba's names of its types."""

    def __init__(self, name: str, result: str, *arguments: str) -> None:
        self._name, self._result, self._arguments = name, result, arguments

    @functools.cached_property
    def _numba_type_(self) -> Any:
        from sigmerge.kernels.compiler import external_type

        return external_type(self._name, self._result, self._arguments)


def kernel(function: Callable[..., Any]) -> Any:
    """A compiled function that Python and kernels call."""
    return Kernel(function, _OPTIONS)


def brief(function: Callable[..., Any]) -> Any:
    """A kernel that takes microseconds and keeps Python's lock: where many threads are at work,
    another one takes the lock, and to have it back takes longer than the call.
    """
    return Kernel(function, _OPTIONS, brief=True)


def part(function: Callable[..., Any]) -> Any:
    """A compiled function that kernels call."""
    return Compilable(function, _OPTIONS)


def exact(function: Callable[..., Any]) -> Any:
    """A part whose products are exact: one instruction may multiply and add, to the same bits."""
    return Compilable(function, {**_OPTIONS, "fastmath": {"contract"}})


def inlined(function: Callable[..., Any]) -> Any:
    """Becomes text of kernels that call it: a branch on a constant that they pass is dropped."""
    return Compilable(function, {"nogil": True, "inline": "always"})


def variants(make: Callable[..., Any]) -> Callable[..., Any]:
    """make(constants) once for each, also where threads need the same kernel at the same time."""
    made, lock = functools.cache(make), threading.Lock()

    def variant(*constants: Any) -> Any:
        with lock:
            return made(*constants)

    return variant
