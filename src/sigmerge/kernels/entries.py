"""Compiled code on disk, and how it is loaded and called: by LLVM's loader, without numba.

A file has a digest, what the code returns, and the code. The digest also covers the file's name and
what the code was made of, so that a file that is damaged, another one's, or older than the kernels
is made again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sigmerge.kernels.words import Kind, format_of

_HERE = Path(__file__).parent
_DIGEST = hashlib.sha256().digest_size


class ObjectCode(NamedTuple):
    """Object code with one entry, and the format of the words that it returns.

    `many`: the words are a tuple, rather than one number or none.
    """

    result: str
    many: bool
    body: bytes


class LoadedCode:
    """Loaded code, to be called with words."""

    def __init__(
        self, symbol: str, code: ObjectCode, kinds: tuple[Kind, ...], *, brief: bool = False
    ) -> None:
        self._code = code
        self._given = struct.Struct("=" + "".join(map(format_of, kinds)))
        self._returned = struct.Struct("=" + code.result)
        self._room: Any = ctypes.c_char * max(self._given.size, self._returned.size, 1)
        self.address = _load(symbol, code.body)
        # ctypes keeps Python's lock during a call of the first type, not of the second.
        called = ctypes.PYFUNCTYPE if brief else ctypes.CFUNCTYPE
        self._call = called(ctypes.c_int, ctypes.c_void_p)(self.address)

    def __call__(self, words: list[Any]) -> Any:
        room = self._room()
        self._given.pack_into(room, 0, *words)
        if self._call(ctypes.addressof(room)):
            raise MemoryError("a kernel has no room for its arrays")  # nothing else stops one
        found = self._returned.unpack_from(room)
        if self._code.many:
            return found
        return found[0] if found else None


def _load(symbol: str, body: bytes) -> int:
    from llvmlite import binding

    engine().add_object_file(binding.ObjectFileRef.from_data(body))
    return int(engine().get_function_address(symbol))


@functools.cache
def engine() -> Any:
    """LLVM's loader."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


def symbol(function: str, kinds: tuple[Kind, ...]) -> str:
    """The name of the code of a function for some kinds of arguments on this processor."""
    named = repr((function, kinds, _processor()))
    return "kernel_" + hashlib.sha256(named.encode()).hexdigest()[:32]


@functools.cache
def _processor() -> tuple[str, ...]:
    """The processor as LLVM knows it, and how numba is told to compile for it."""
    from llvmlite import binding

    told = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and "CACHE" not in name and "THREAD" not in name
    )
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), *told


@functools.cache
def stamp(file: str) -> bytes:
    """A digest of what code is made of: the function's own file, all kernels, and the compiler."""
    return hashlib.sha256(_common() + Path(file).read_bytes()).digest()


@functools.cache
def _common() -> bytes:
    compiler = [version(name) for name in ("numba", "llvmlite")]
    made = hashlib.sha256(repr((compiler, np.__version__, sys.version)).encode())
    for source in sorted(_HERE.glob("*.py")):
        made.update(source.read_bytes() + b"\0")
    return made.digest()


def kept(symbol: str, stamp: bytes) -> ObjectCode | None:
    """The code of that name, if it is kept and was made of the same."""
    for folder in _folders():
        with suppress(OSError):
            content = unsealed(symbol, stamp, (folder / symbol).read_bytes())
            if content is not None:
                head, body = content.split(b"\n", 1)
                return ObjectCode(head[1:].decode(), head[:1] == b"*", body)
    return None


def keep(symbol: str, stamp: bytes, code: ObjectCode) -> None:
    """In the first folder that can be written, if there is one."""
    head = f"{'*' if code.many else ' '}{code.result}\n".encode()
    data = sealed(symbol, stamp, head + code.body)
    for folder in _folders():
        spare = folder / f"{symbol}.{os.urandom(8).hex()}"  # other processes may write the same
        try:
            folder.mkdir(parents=True, exist_ok=True)
            spare.write_bytes(data)
            spare.replace(folder / symbol)
            return
        except OSError:
            with suppress(OSError):
                spare.unlink(missing_ok=True)


def sealed(name: str, stamp: bytes, content: bytes) -> bytes:
    """Content of a file of that name behind its digest."""
    return hashlib.sha256(stamp + name.encode() + b"\n" + content).digest() + content


def unsealed(name: str, stamp: bytes, data: bytes) -> bytes | None:
    """The content, if it is as it was written and was made of the same."""
    content = data[_DIGEST:]
    return content if sealed(name, stamp, content) == data else None


def _folders() -> Iterator[Path]:
    """Where code may lie, as numba's: in NUMBA_CACHE_DIR, or beside the kernels, or the user's."""
    told = os.environ.get("NUMBA_CACHE_DIR")
    if told:
        yield Path(told) / f"sigmerge_{hashlib.sha256(bytes(_HERE)).hexdigest()[:16]}"
        return
    yield _HERE / "__pycache__"
    yield Path(os.environ.get("SIGMERGE_CACHE") or Path.home() / ".cache/sigmerge") / "kernels"
