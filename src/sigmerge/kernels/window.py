"""Values in files, which a compiled loop reads and writes itself, a window of them at a time.

A mapped page costs a fault when it is touched, and giving it back makes all threads wait for one
another. What is read goes into memory that the calling thread keeps and that its caches hold, and
so does the result before it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from sigmerge.kernels import Array
from sigmerge.kernels.checksum import WORD, add_word, sum_words
from sigmerge.kernels.jit import External, kernel, part
from sigmerge.kernels.raw import array_at
from sigmerge.kernels.rooms import room

WINDOW_SIZE: Final = 1 << 15
"""Coordinates of a window: those of six members fit into the second-level cache."""
LONGEST_WINDOW: Final = 1 << 18
"""Coordinates of a window at most: a loop that takes more at a time reads mapped memory."""
VALUE_BYTES: Final = 4
"""Bytes of a coordinate at most."""
MEMORY: Final = -1
"""Stands for a descriptor where values lie in memory."""

DRAINED: Final = 1 << 18
"""Coordinates of a result that are written at a time."""

SUMMED_AT_ONCE: Final = 1 << 22
"""Bytes of a file that are read back at a time, as many as a leaf of a digest: threads that take
fewer wait for Python's lock more often."""
_IN_CACHE: Final = 1 << 18
"""Bytes that are summed while the second-level cache has them."""
_LINE: Final = 64
"""Bytes of a line of the caches, with one of which the copy of a page begins."""
_ALIGNED: Final = 4096
"""Bytes that are moved at a time where they do not begin with a word."""

_pread = External("pread", "intp", "int32", "uintp", "uintp", "int64")
_pwrite = External("pwrite", "intp", "int32", "uintp", "uintp", "int64")


class FilePlace(NamedTuple):
    """Where a row of values lies in an open file, and the bytes of one of them."""

    descriptor: int
    position: int
    width: int


class Window(NamedTuple):
    """The members of a table that lie in files, and room for `length` coordinates of each.

    Rows of `files` are int64: a member, its `FilePlace`, and the address of its room. `failed` is
    the descriptor of a file that could not be read, for `check_read`.
    """

    files: Array
    rooms: Array
    length: int
    failed: Array


class Drain(NamedTuple):
    """An open file that a loop writes its result to: where its first value goes, and the bytes of
    one; how many coordinates the loop has room for; the checksum of what was written.
    """

    descriptor: int
    position: int
    width: int
    length: int
    checksum: Array


NO_DRAIN: Final = Drain(MEMORY, 0, 0, 0, np.zeros(1, np.uint64))
IN_MEMORY: Final = Window(
    np.zeros((0, 5), np.int64), np.zeros((0, 0), np.uint8), 0, np.full(1, MEMORY)
)


def drain_from(place: FilePlace, start: int) -> Drain:
    """What writes a tensor that begins at a place, from the coordinate `start` on."""
    position = place.position + start * place.width
    return Drain(place.descriptor, position, place.width, DRAINED, np.zeros(1, np.uint64))


def window(places: Sequence[FilePlace | None], strip: int) -> Window:
    """The window of a loop that takes `strip` coordinates at a time, in the thread's own memory."""
    length = max(WINDOW_SIZE // strip, 1) * strip
    lying = [(d, *place) for d, place in enumerate(places) if place is not None]
    if not lying or length > LONGEST_WINDOW:
        return IN_MEMORY
    rooms = room((len(lying), length * VALUE_BYTES), np.uint8, "window")
    first, step = rooms.__array_interface__["data"][0], rooms.strides[0]
    files = [(*row, first + step * i) for i, row in enumerate(lying)]
    return Window(np.array(files, np.int64), rooms, length, none_failed())


def none_failed() -> Array:
    """Room for the descriptor of a file that cannot be read."""
    return np.full(1, MEMORY)


class ReadFailed(OSError):
    """A file gave fewer bytes than it should have."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(f"descriptor {descriptor} could not be read to its end")
        self.descriptor = descriptor


def check_read(failed: Array) -> None:
    """ReadFailed if a file could not be read. Its values are NaN, which some merges allow."""
    if failed[0] != MEMORY:
        raise ReadFailed(int(failed[0]))


@part
def ready(addresses: Array, window: Window, begin: int, end: int, size: int, filled: int) -> int:
    """Have coordinates [begin, end) in memory; returns up to where they are. Addresses follow.

    A loop that takes one strip after another passes what it got; `size` is where it ends.
    """
    if end <= filled:
        return filled
    if len(window.files) == 0:
        return size
    stop = min(begin + window.length, size)
    for i in range(len(window.files)):
        row = window.files[i]
        skip, count = row[3] * begin, row[3] * (stop - begin)
        read(row[1], row[2] + skip, row[4], count, window.failed)
        addresses[row[0]] = np.uint64(row[4] - skip)
    return stop


@part
def read(descriptor: int, position: int, address: int, count: int, failed: Array) -> None:
    """Read so many bytes of a file. If it fails, they are NaN in every type, and it is noted."""
    done = 0
    while done < count:
        got = _pread(
            np.int32(descriptor), np.uint64(address + done), np.uint64(count - done),
            np.int64(position + done),
        )  # fmt: skip
        if got <= 0:
            array_at(np.uint64(address), count, np.uint8)[:] = np.uint8(255)
            failed[0] = descriptor
            return
        done += got


@part
def drained(
    drain: Drain, out: np.uint64, begun: int, end: int, strip: int, size: int, fine: bool
) -> int:
    """Write what was made from `begun` to `end`, if there is no room for one more strip.

    Returns from where on nothing is written yet; −1 if it failed, or is not `fine`.
    """
    if drain.descriptor == MEMORY or (end < size and end - begun + strip <= drain.length):
        return begun
    return end if fine and write(drain, out, begun, end) else -1


@part
def write(drain: Drain, out: np.uint64, begun: int, end: int) -> bool:
    """Write what was made from `begun` to `end`, which lies at `out`; False if it failed."""
    width = drain.width
    count, place = width * (end - begun), np.int64(out)
    drain.checksum[0] = _sum(place, count, width * begun, drain.checksum[0])
    done, position = 0, drain.position + width * begun
    while done < count:
        got = _pwrite(
            np.int32(drain.descriptor), np.uint64(place + done), np.uint64(count - done),
            np.int64(position + done),
        )  # fmt: skip
        if got <= 0:
            return False
        done += got
    return True


@part
def _sum(address: int, count: int, at: int, total: np.uint64) -> np.uint64:
    """Add the checksum of bytes in memory, which are those from `at` on of a piece."""
    place = np.uint64(at // WORD)
    total = sum_words(array_at(np.uint64(address), count // WORD, np.uint64), place, total)
    if count % WORD == 0:
        return total
    last, rest = np.uint64(0), count // WORD * WORD  # the end of a tensor
    some = array_at(np.uint64(address + rest), count - rest, np.uint8)
    for i in range(some.size):
        last |= np.uint64(some[i]) << np.uint64(8 * i)
    return add_word(last, np.uint64((at + rest) // WORD), total)


def read_summed(descriptor: int, begin: int, count: int, pieces: Array, totals: Array) -> Array:
    """Bytes of a file, SUMMED_AT_ONCE at most, in the calling thread's memory until the next call.

    Checksums of pieces go on meanwhile: `pieces` are int64, where each begins in the file and where
    it ends. The words that end in these bytes are added to `totals`, modulo 2^64. ReadFailed where
    the file ends before.
    """
    assert count <= SUMMED_AT_ONCE
    held, failed = room(_LINE + SUMMED_AT_ONCE + _ALIGNED, np.uint8, "read back"), none_failed()
    address = held.__array_interface__["data"][0]
    lead = _LINE - address % _LINE  # a word or more: memory begins with one
    _read_summed(descriptor, begin, count, address + lead, pieces, totals, failed)
    check_read(failed)
    return held[lead : lead + count]


@kernel
def _read_summed(
    descriptor: int, begin: int, count: int, address: int, pieces: Array, totals: Array,
    failed: Array,
) -> None:  # fmt: skip
    before = min(begin, WORD)  # a word that ends here may begin before
    read(descriptor, begin - before, address - before, before, failed)
    for done in range(0, count, _IN_CACHE):
        length = min(_IN_CACHE, count - done)
        read(descriptor, begin + done, address + done, length, failed)
        _add_words(begin + done, length, address + done, pieces, totals, address + SUMMED_AT_ONCE)


@part
def _add_words(
    begin: int, count: int, address: int, pieces: Array, totals: Array, scratch: int
) -> None:
    """Add the words of pieces that end in some bytes to their sums; the word before is there."""
    end = begin + count
    for i in range(len(pieces)):
        first, last = pieces[i, 0], pieces[i, 1]
        if first < end and last > begin:
            done = max(begin - first, 0) // WORD * WORD
            stop = last - first if last <= end else (end - first) // WORD * WORD
            place = address + first + done - begin
            totals[i] = _sum_anywhere(place, stop - done, done, totals[i], scratch)


@part
def _sum_anywhere(address: int, count: int, at: int, total: np.uint64, scratch: int) -> np.uint64:
    """As `_sum`, of bytes that begin anywhere: where no word may lie, they are moved first."""
    if address % WORD == 0:
        return _sum(address, count, at, total)
    aligned = array_at(np.uint64(scratch), _ALIGNED, np.uint8)
    for done in range(0, count, _ALIGNED):
        length = min(_ALIGNED, count - done)
        given = array_at(np.uint64(address + done), length, np.uint8)
        for i in range(length):
            aligned[i] = given[i]
        total = _sum(scratch, length, at + done, total)
    return total
