"""What a machine's cores give when all of them work: merges of one thread each, side by side.

    python -m benchmarks.side_by_side [--layers 8] [--methods ties] [--folder /dev/shm/beside]

One merge alone, then as many at the same time as there are cores, each a process with one thread
on a core of its own. With a folder in memory they share no lock and wait for no disk; what they
take longer than one alone is the machine: cores that share caches, memory and a clock. It is an
estimate of how much faster N threads of one merge can be than one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import machine
from benchmarks.pool import Shape, make_pool
from benchmarks.scaling import EXPERTS, SIGMERGE, Bench


def seconds(bench: Bench, method: str, cores: Sequence[int]) -> float:
    """Until the last of the merges has ended, one on each of these cores."""
    recipe, outs = bench.recipe(method), [bench.out / f"result-{core}" for core in cores]
    environment = {**os.environ, **bench.environment}
    start = time.perf_counter()
    merges = [
        subprocess.Popen(
            ["taskset", "-c", str(core), *SIGMERGE, "merge", recipe, out, "--threads", "1"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for core, out in zip(cores, outs, strict=True)
    ]
    codes = [merge.wait() for merge in merges]
    if any(codes):
        sys.exit("a merge failed")
    took = time.perf_counter() - start
    for out in outs:
        shutil.rmtree(out)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--methods", default="ties")
    parser.add_argument("--folder", type=Path, default=Path("bench-pool/beside"))
    options = parser.parse_args()
    shape = Shape(options.layers, 2048, 5632, 32000)
    bench = Bench(make_pool(options.folder / "pool", shape, EXPERTS), options.folder / "out")
    shutil.rmtree(bench.out, ignore_errors=True)
    bench.out.mkdir(parents=True)
    cores = sorted(os.sched_getaffinity(0))
    print(f"{machine()}; {shape.parameters / 1e9:.2f} B parameters, {EXPERTS} experts.")
    for method in options.methods.split(","):
        bench.command(method, len(cores))  # hashes the inputs
        # By turns, and the better of two: another machine's work comes and goes.
        turns = [(seconds(bench, method, cores[:1]), seconds(bench, method, cores))
                 for _ in range(2)]  # fmt: skip
        one, every = map(min, zip(*turns, strict=True))
        print(f"{method}: one merge of one thread {one:.2f} s, {len(cores)} side by side "
              f"{every:.2f} s: {len(cores)} cores give {len(cores) * one / every:.1f} times one",
              flush=True)  # fmt: skip
    shutil.rmtree(bench.out)


if __name__ == "__main__":
    main()
