"""Files that native loops read by descriptor: each stays open while anything refers to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from sigmerge._native import ReadFailed
from sigmerge.errors import PoolError
from sigmerge.files.system import BYTES, most_descriptors


class OpenFile:
    """An open file. Keep a reference to it as long as its descriptor is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | BYTES)
        self.status = os.fstat(self.descriptor)
        _opened[self.descriptor] = self

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):  # it could be opened
            os.close(self.descriptor)

    @property
    def may_stay(self) -> bool:
        """Whether it may stay open: half of the descriptors are reserved for other files."""
        return self.descriptor < _most_descriptors() // 2


_opened: WeakValueDictionary[int, OpenFile] = WeakValueDictionary()


def _most_descriptors() -> int:
    limit = most_descriptors()
    if limit is None:
        return 512
    return sys.maxsize if limit[0] < 0 else limit[0]  # below 0: no limit


def became_shorter(file: Path | ReadFailed) -> PoolError:
    return PoolError(
        f"{file}: became shorter while it was read, or its disk fails. Nothing is published. Put "
        "the whole file back, then run the same command again."
    )


@contextmanager
def named_reads() -> Iterator[None]:
    """Convert a failed read of a native loop to a PoolError that names the file."""
    try:
        yield
    except ReadFailed as failure:
        file = _opened.get(failure.descriptor)
        raise became_shorter(file.path if file else failure) from None
