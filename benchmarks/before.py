"""The same merges by this tree and by another one, in turns, on inputs in memory.

    git worktree add /tmp/before 6b0e9e8
    python -m benchmarks.before /tmp/before/src [--path FOLDER] [--threads 16,2,1] [--budget 440]

`--path` has libraries that only the other tree needs. Each side has a cache of its own, and one run
before the first that counts, in which digests are noted, loops are compiled and the views of a
repair are measured. Prints the least of processor and wall seconds, since what other processes add
is noise, and medians of their ratios over turns: a row each for a page of results. Nothing is begun
after `--budget` seconds.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.measure import Cost, best, commit, machine, run
from benchmarks.pool import Shape, make_pool
from benchmarks.scaling import EXPERTS, METHODS, Bench

MAIN = "from sigmerge.cli import main; main()"


def merged(bench: Bench, what: str, threads: int, place: str, path: str) -> Cost:
    cache = bench.out / place / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": path, "SIGMERGE_CACHE": str(cache),
                   "NUMBA_CACHE_DIR": str(cache / "numba")}  # fmt: skip
    return run([sys.executable, "-c", MAIN, *bench.words(what, threads)], environment)


def row(bench: Bench, what: str, threads: int, sides: dict[str, str], repeat: int) -> str:
    costs: dict[str, list[Cost]] = {side: [] for side in sides}
    for turn in range(repeat + 1):
        for side in sorted(sides, reverse=bool(turn % 2)):
            costs[side].append(merged(bench, what, threads, side, sides[side]))
    now, before = costs["now"][1:], costs["before"][1:]
    cpu = median(n.cpu / b.cpu for n, b in zip(now, before, strict=True))
    wall = median(n.wall / b.wall for n, b in zip(now, before, strict=True))
    ours, theirs = best(now), best(before)
    return (f"| {what} | {threads} | {ours.wall:.2f} | {theirs.wall:.2f} | {wall:.3f} | "
            f"{ours.cpu:.2f} | {theirs.cpu:.2f} | {cpu:.3f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before", description=__doc__)
    parser.add_argument("other", type=Path, help="the src folder of another tree")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/before"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--methods", default=",".join([*METHODS, "repair"]))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", default="2", help="comma-separated, measured in this order")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, pool included")
    given = parser.parse_args()
    until = time.perf_counter() + given.budget
    methods = given.methods.split(",")
    if strange := set(methods) - {*METHODS, "repair"}:
        parser.error(f"no such method: {', '.join(sorted(strange))}")
    shape = Shape(given.layers, 2048, 5632, 32000)
    bench = Bench(make_pool(given.folder / "pool", shape, EXPERTS), given.folder / "out")
    bench.out.mkdir(parents=True, exist_ok=True)
    other = os.pathsep.join(str(p.resolve()) for p in (given.other, given.path) if p)
    sides = {"now": str(Path(__file__).resolve().parents[1] / "src"), "before": other}
    print(f"{machine()}; {commit()} and {given.other}; {shape.parameters / 1e9:.2f} B parameters, "
          f"{EXPERTS} experts, {given.repeat} turns\n\n"
          "| | threads | wall s now | before | ratio | CPU s now | before | ratio |\n"
          "|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)  # fmt: skip
    if "repair" in methods:
        most = len(os.sched_getaffinity(0))
        merged(bench, "task_arithmetic", most, "now", sides["now"])
        (bench.out / "result").rename(bench.out / "anchor")
    for threads in map(int, given.threads.split(",")):
        for what in methods:
            if time.perf_counter() < until:
                print(row(bench, what, threads, sides, given.repeat), flush=True)
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
