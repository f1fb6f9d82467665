"""A small job that writes a folder through `Output`, as every command does.

    python -m tests.faults.job OUT [--call NAME --at N --fault KIND] [--no-fsync]

With a fault the process kills itself at, or gets an error from, the N-th call of a system call.
The bytes depend on nothing, so that any two runs that end must agree.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.writer import Layout, Output, plan_layout

BLOCKS = 3
TENSORS = 2
SIZE = 3000
CALLS = ("pwrite", "write", "fsync", "rename", "ftruncate", "unlink", "exchange", "mkdir")


def names(block: int) -> list[str]:
    return [f"model.layers.{block}.w{i}" for i in range(TENSORS)]


def layout(shard: int = 30_000) -> Layout:
    specs = [(name, "F32", (SIZE,)) for block in range(BLOCKS) for name in names(block)]
    return plan_layout(specs, shard)


def values(name: str) -> np.ndarray[Any, Any]:
    seed = sum(map(ord, name))
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def write(
    out: Path,
    *,
    overwrite: bool = True,
    durable: bool = True,
    between: Callable[[int, Output], object] = lambda block, output: None,
    shard: int = 30_000,
) -> tuple[list[str], dict[str, str]]:
    """Write the folder; returns the blocks that were taken over, and the digests."""
    with Output(out, layout(shard), "job", overwrite=overwrite, durable=durable) as output:
        resumed = sorted(output.done)
        for block in range(BLOCKS):
            if f"layer {block}" not in output.done:
                for name in names(block):
                    for start in range(0, SIZE, 1000):
                        output.write(name, start, values(name)[start : start + 1000])
                output.finish(f"layer {block}", {"block": block})
            between(block, output)
        output.text("config.json", "{}\n")
        output.text("sigmerge/plan.json", "{}\n")
        digests = dict(output.digests)
        output.publish()
    return resumed, digests


def arm(call: str, at: int, fault: str) -> None:
    """The N-th call of this kind kills the process, or fails as on a full disk."""
    import sigmerge.checkpoints.publishing as publishing

    place: Any = publishing if call == "exchange" else os
    real, counter = getattr(place, call), itertools.count(1)

    def patched(*arguments: Any, **options: Any) -> Any:
        count = next(counter)  # threads call too
        if count == at and fault == "kill before":
            os.kill(os.getpid(), signal.SIGKILL)
        if count >= at and fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            return real(*arguments, **options)
        finally:
            if count == at and fault == "kill after":
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, call, patched)


def arm_change(at: int) -> None:
    """The process is killed before the N-th change that it makes to files, folders or names.

    Python announces what it opens for writing, renames, removes and truncates; calls that it does
    not announce are replaced. Libraries in machine code that write are not seen.
    """
    import sigmerge.checkpoints.publishing as publishing

    counter = itertools.count(1)

    def step() -> None:
        if next(counter) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else os.O_RDONLY
        if event in CHANGES or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            step()

    def announced(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            step()
            return real(*arguments, **options)

        return call

    for place, name in ((os, "fsync"), (os, "pwrite"), (os, "write"), (publishing, "exchange")):
        setattr(place, name, announced(getattr(place, name)))
    sys.addaudithook(heard)


CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--call", choices=CALLS)
    parser.add_argument("--at", type=int, default=1)
    parser.add_argument("--fault", default="kill before")
    parser.add_argument("--no-fsync", action="store_true")
    options = parser.parse_args()
    if options.call:
        arm(options.call, options.at, options.fault)
    write(options.out, durable=not options.no_fsync)
    print("published")


if __name__ == "__main__":
    main()
