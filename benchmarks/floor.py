"""The least any merge must do: read the inputs, write as many bytes as one of them.

`python -S -m benchmarks.floor THREADS OUT INPUT …`; a child that benchmarks measure. With "-"
for OUT nothing is written. `map:OUT` is written through a map of the file, not by calls: the system
gives the lock of a file that is written to one thread at a time, and a map needs none. For
`split:OUT`, threads write different ones of eight files, OUT.0 … OUT.7, as those of a merge do.
With --fsync at the end, what was written is on the disk, too. With --stacked=N there, N bytes are
written instead: the first of every input, equally many of each, one behind the other.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading

PARTS = 8
STEP = 1 << 20
"""Bytes at a time: what stays in a second-level cache between reading and writing."""


def copy(
    inputs: list[int], out: int, mapped: memoryview | None, begin: int, end: int, shift: int = 0
) -> None:
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
            os.pwrite(out, piece, position + shift)


def stack(inputs: list[int], out: int, share: int, begin: int, end: int) -> None:
    """Bytes begin to end of every input, which has a share of the output for its own."""
    for number, file in enumerate(inputs):
        copy([file], out, None, begin, end, number * share)


def main() -> None:
    synced, stacked = sys.argv[-1] == "--fsync", sys.argv[-1].startswith("--stacked=")
    threads, target = int(sys.argv[1]), sys.argv[2]
    names = sys.argv[3 : len(sys.argv) - (synced or stacked)]
    inputs = [os.open(name, os.O_RDONLY) for name in names]
    how, _, file = target.rpartition(":")
    parts = [f"{file}.{i}" for i in range(PARTS)] if how == "split" else [file]
    outs = [-1 if target == "-" else os.open(part, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
            for part in parts]  # fmt: skip
    size, mapped = os.fstat(inputs[0]).st_size, None
    if how == "map":
        os.ftruncate(outs[0], size)
        mapped = memoryview(mmap.mmap(outs[0], size))
    if stacked:
        size = int(sys.argv[-1].removeprefix("--stacked=")) // len(inputs)
    cuts = [size * i // threads for i in range(threads + 1)]
    spans = [(cuts[i], cuts[i + 1]) for i in range(threads)]
    workers = [
        threading.Thread(target=stack, args=(inputs, outs[0], size, *span))
        if stacked
        else threading.Thread(
            target=copy, args=(inputs, outs[i * len(outs) // threads], mapped, *span)
        )
        for i, span in enumerate(spans)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for out in outs if synced else ():
        os.fsync(out)


if __name__ == "__main__":
    main()
