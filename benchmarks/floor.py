"""The least any merge must do: read the inputs, write as many bytes as one of them.

`python -S -m benchmarks.floor THREADS OUT INPUT …`; a child that benchmarks measure. With "-"
for OUT nothing is written.
"""

from __future__ import annotations

import os
import sys
import threading

STEP = 1 << 20
"""Bytes at a time: what stays in a second-level cache between reading and writing."""


def copy(inputs: list[int], out: int, begin: int, end: int) -> None:
    buffer = memoryview(bytearray(STEP))
    for position in range(begin, end, STEP):
        piece = buffer[: min(STEP, end - position)]
        for file in inputs:
            os.preadv(file, [piece], position)
        if out >= 0:
            os.pwrite(out, piece, position)


def main() -> None:
    threads, target, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    inputs = [os.open(name, os.O_RDONLY) for name in names]
    out = -1 if target == "-" else os.open(target, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    size = os.fstat(inputs[0]).st_size
    cuts = [size * i // threads for i in range(threads + 1)]
    workers = [
        threading.Thread(target=copy, args=(inputs, out, cuts[i], cuts[i + 1]))
        for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
