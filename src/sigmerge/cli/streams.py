"""Standard streams that stop no command: a closed one leads nowhere, as does one whose reader left.

The exit code says what became of the work, whether or not anybody reads about it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Stream(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # as in `sigmerge operators | head`
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def stop_nothing() -> None:
    """From now on the standard streams can be written. Those that a caller replaced stay."""
    # The next file would get the number of a closed stream, and whatever is printed there.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        given = getattr(sys, name)
        if given is getattr(sys, f"__{name}__"):
            setattr(sys, name, _like(given, number))


def _like(given: io.TextIOWrapper | None, number: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Stream(number, "w", closefd=False))
    if given is None:
        return io.TextIOWrapper(raw, "utf-8")
    return io.TextIOWrapper(raw, given.encoding, given.errors, line_buffering=given.line_buffering)
