"""An input that becomes shorter while it is mapped: a line and an exit code, not a crash.

The system answers a read behind the end of a mapped file with the signal SIGBUS, in whichever
thread reads. Python cannot handle it: the handlers of its `signal` module run between two of its
own instructions, and the one that failed would be repeated before that for ever. So the handler is
machine code that calls two functions of the C library which a signal handler may call.
"""

from __future__ import annotations

import ctypes
import signal
import sys

import numpy as np

from sigmerge.errors import PoolError
from sigmerge.kernels.jit import External, kernel

_CODE = PoolError.exit_code
_LINE = np.frombuffer(
    b"error: an input file became shorter while it was read (SIGBUS). Nothing is published. Put "
    b"the whole file back, then run the same command again.\n",
    np.uint8,
)
_write = External("write", "intp", "int32", "uintp", "uintp")
_exit = External("_exit", "void", "int32")


@kernel
def _on_sigbus() -> None:
    _write(2, _LINE.ctypes.data, _LINE.size)
    _exit(_CODE)


def exit_on_truncation() -> None:
    """From now on SIGBUS ends this process with one line and the exit code of a wrong pool.

    It is for a command's own process; a program that imports the library decides for itself.
    """
    if not hasattr(signal, "SIGBUS") or sys.platform == "win32":
        return
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    install(signal.SIGBUS, _on_sigbus.address)
