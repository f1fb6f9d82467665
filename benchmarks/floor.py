"""The least any merge must do: read the inputs, write as many bytes as one of them.

`python -S -m benchmarks.floor THREADS OUT INPUT …`; a child that benchmarks measure. With "-"
for OUT nothing is written. `map:OUT` is written through a map of the file, not by calls: the system
gives the lock of a file that is written to one thread at a time, and a map needs none.
With --fsync at the end, what was written is on the disk, too.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading

STEP = 1 << 20
"""Bytes at a time: what stays in a second-level cache between reading and writing."""


def copy(inputs: list[int], out: int, mapped: memoryview | None, begin: int, end: int) -> None:
    buffer = memoryview(bytearray(STEP))
    *others, last = inputs
    for position in range(begin, end, STEP):
        piece = buffer[: min(STEP, end - position)]
        for file in others:
            os.preadv(file, [piece], position)
        if mapped is not None:
            piece = mapped[position : position + len(piece)]
        os.preadv(last, [piece], position)
        if mapped is None and out >= 0:
            os.pwrite(out, piece, position)


def main() -> None:
    synced = sys.argv[-1] == "--fsync"
    threads, target = int(sys.argv[1]), sys.argv[2]
    names = sys.argv[3 : len(sys.argv) - synced]
    inputs = [os.open(name, os.O_RDONLY) for name in names]
    file = target.removeprefix("map:")
    out = -1 if target == "-" else os.open(file, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    size, mapped = os.fstat(inputs[0]).st_size, None
    if file != target:
        os.ftruncate(out, size)
        mapped = memoryview(mmap.mmap(out, size))
    cuts = [size * i // threads for i in range(threads + 1)]
    workers = [
        threading.Thread(target=copy, args=(inputs, out, mapped, cuts[i], cuts[i + 1]))
        for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if synced:
        os.fsync(out)


if __name__ == "__main__":
    main()
