"""Where values that compiled loops read lie in files; what is said if they cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sigmerge._native import ReadFailed
from sigmerge.errors import PoolError
from sigmerge.files.mapped import mapped_at, opened_as
from sigmerge.kernels import Array
from sigmerge.kernels.stored import FilePlace, address_of


@contextmanager
def named_reads() -> Iterator[None]:
    """PoolError with the file's name where a loop could not read one."""
    try:
        yield
    except ReadFailed as failure:
        raise PoolError(
            f"{opened_as(failure.descriptor) or failure}: became shorter while it was read, or its "
            "disk fails. Nothing is published. Put the whole file back, then run the same command "
            "again."
        ) from None


def place_of(row: Array) -> FilePlace | None:
    """Where mapped values lie in their file, if it can be read as well."""
    return place_at(address_of(row), row.itemsize)


def place_at(address: int, width: int = 1) -> FilePlace | None:
    """The same of values of so many bytes at an address."""
    file = mapped_at(address)
    descriptor = file.descriptor() if file else None
    if file is None or descriptor is None:
        return None
    return FilePlace(descriptor, address - file.first, width)
