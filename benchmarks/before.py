"""The same merges by this tree and by another one, in turns, on inputs in memory.

    git worktree add /tmp/before 6b0e9e8
    python -m benchmarks.before /tmp/before/src [--path FOLDER] [--repeat 5]

`--path` has libraries that only the other tree needs. Each side has a cache of its own, and one run
before the first that counts, in which digests are noted and loops are compiled. Prints the least
of processor and wall seconds, since what other processes add is noise, and medians of their ratios
over turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from statistics import median

from benchmarks.measure import Cost, best, commit, machine, run
from benchmarks.pool import Shape, make_pool
from benchmarks.scaling import EXPERTS, METHODS, Bench

MAIN = "from sigmerge.cli import main; main()"


def merged(bench: Bench, words: list[str | Path], place: str, path: str) -> Cost:
    target, cache = bench.out / "result", bench.out / place / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    environment = {**os.environ, "PYTHONPATH": path, "SIGMERGE_CACHE": str(cache),
                   "NUMBA_CACHE_DIR": str(cache / "numba")}  # fmt: skip
    return run([sys.executable, "-c", MAIN, "merge", *words, target], environment)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before", description=__doc__)
    parser.add_argument("other", type=Path, help="the src folder of another tree")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/before"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--methods", default="linear,ties,dare_ties")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    shape = Shape(given.layers, 2048, 5632, 32000)
    bench = Bench(make_pool(given.folder / "pool", shape, EXPERTS), given.folder / "out")
    bench.out.mkdir(parents=True, exist_ok=True)
    other = os.pathsep.join(str(p.resolve()) for p in (given.other, given.path) if p)
    sides = {"now": str(Path(__file__).resolve().parents[1] / "src"), "before": other}
    print(f"{machine()}; {commit()} and {given.other}; {shape.parameters / 1e9:.2f} B parameters, "
          f"{EXPERTS} experts, {given.threads} threads")  # fmt: skip
    for method in given.methods.split(","):
        assert method in METHODS, method
        words: list[str | Path] = [bench.recipe(method), "--threads", str(given.threads)]
        costs: dict[str, list[Cost]] = {side: [] for side in sides}
        for turn in range(given.repeat + 1):
            for side in sorted(sides, reverse=bool(turn % 2)):
                costs[side].append(merged(bench, words, side, sides[side]))
        now, before = costs["now"][1:], costs["before"][1:]
        cpu = median(n.cpu / b.cpu for n, b in zip(now, before, strict=True))
        wall = median(n.wall / b.wall for n, b in zip(now, before, strict=True))
        ours, theirs = best(now), best(before)
        print(f"{method:12} now {ours.cpu:.2f} s of CPU, {ours.wall:.2f} s; "
              f"before {theirs.cpu:.2f} and {theirs.wall:.2f}; medians of ratios {cpu:.3f} "
              f"and {wall:.3f}, {given.repeat} turns", flush=True)  # fmt: skip
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
