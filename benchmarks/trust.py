"""What it costs that a published result is right: fsync, and reading back with digests.

    python -m benchmarks.trust [--size quick|half-billion] [--method linear] [--repeat N]
    python -m benchmarks.trust --out /dev/shm/trust

The same merge, each time a command started from cold with the inputs on the disk: as it is; with
`--no-fsync`; and with neither fsync nor checksums, reading back and digests of the outputs, which
no option turns off, so that this side is the command with those parts replaced. The sides take
turns, in another order each time; what each leaves is on the disk or gone, and the disk has rested,
before the next begins. Seconds are the least of each side; the ratio is the median over turns of
what a side took to what the bare side took in the same turn, since other work on the machine
changes between turns.
Digests of the inputs are kept between runs; one side computes them anew (`--rehash`).

The last two sides are the floor: the same inputs are read and as many bytes are written, without
fsync and with it. What fsync adds there is the disk's own time, which no program can save. With
`--out` on a file system in memory fsync costs nothing, and what is left is what is computed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.dense import BIN, METHODS, OUT, THREADS, Sides, write_recipe
from benchmarks.measure import Cost, best, drop, machine, run, versions
from benchmarks.pool import HALF_BILLION, QUICK, BenchPool, make_pool
from sigmerge.files.safe_open import remove

SIZES = {"quick": QUICK, "half-billion": HALF_BILLION}
BAR = 1.05
"""fsync and digests may add 5 % to a merge from disk."""

REST = 3.0
"""Seconds in which a disk and a virtual machine's memory take back what the side before used."""

FULL, UNSYNCED, BARE, REHASHED, FLOOR, SYNCED_FLOOR = (
    "as it is",
    "without fsync",
    "without fsync, reading back and digests",
    "as it is, inputs hashed again",
    "floor",
    "floor, with fsync",
)


def commands(recipe: Path, out: Path, inputs: Sequence[Path]) -> dict[str, list[str | Path]]:
    merge = [BIN / "sigmerge", "merge", recipe, out]
    floor = [sys.executable, "-S", "-m", "benchmarks.floor", str(THREADS), out, *inputs]
    return {
        FULL: merge,
        UNSYNCED: [*merge, "--no-fsync"],
        BARE: [sys.executable, "-m", "benchmarks.bare", recipe, out],
        REHASHED: [*merge, "--rehash"],
        FLOOR: floor,
        SYNCED_FLOOR: [*floor, "--fsync"],
    }


def measure(pool: BenchPool, method: str, repeat: int, folder: Path) -> dict[str, list[Cost]]:
    recipe, out = write_recipe(pool, method, OUT / f"trust-{method}.yaml"), folder / "trust"
    folder.mkdir(parents=True, exist_ok=True)
    env = {"SIGMERGE_CACHE": str((OUT / "cache").resolve())}
    sides = commands(recipe, out, Sides(pool, method).files)
    costs: dict[str, list[Cost]] = {side: [] for side in sides}
    for turn in range(repeat + 1):
        for side in Random(turn).sample(list(sides), len(sides)):  # what was before a side matters
            remove(out)
            drop([pool.weights(member) for member in pool.members])
            os.sync()  # what the side before left to the system, and its blocks given back
            time.sleep(REST)
            cost = run(sides[side], env)
            if turn:  # the first fills the cache
                costs[side].append(cost)
    remove(out)
    return costs


def ratios(found: dict[str, list[Cost]], side: str) -> list[float]:
    """To the bare side, turn by turn, from the least to the largest."""
    pairs = zip(found[side], found[BARE], strict=True)
    return sorted(one.wall / bare.wall for one, bare in pairs)


def bars(found: dict[str, list[Cost]]) -> Iterator[tuple[bool, str]]:
    each = ratios(found, FULL)
    yield (
        median(each) <= BAR,
        f"fsync, reading back and digests: {median(each):.3f}× a merge without (bar {BAR}×; "
        f"turns {', '.join(f'{ratio:.3f}' for ratio in each)})",
    )


def document(pool: BenchPool, method: str, found: dict[str, list[Cost]], repeat: int) -> str:
    rows = [
        f"| {side} | {cost.wall:.2f} | {cost.cpu:.2f} | {cost.memory / 1e6:.0f} | "
        f"{median(ratios(found, side)):.3f}× |"
        for side, cost in ((side, best(costs)) for side, costs in found.items())
    ]
    return "\n".join([
        f"A generated pool of {pool.shape.parameters / 1e6:.0f} M parameters in bfloat16, "
        f"{len(pool.experts)} experts, `{method}`, inputs on the disk, {repeat} turns.",
        f"Machine: {machine()}. {versions('sigmerge', 'numpy')}.",
        "",
        "| merge | wall s | CPU s | peak MB | wall, to the third, median |",
        "|---|--:|--:|--:|--:|",
        *rows,
        "",
        *(f"- {'PASS' if met else 'MISS'} {text}" for met, text in bars(found)),
        "",
    ])  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trust", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="half-billion")
    parser.add_argument("--method", choices=METHODS, default="linear")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT, help="where results are written")
    options = parser.parse_args(arguments)
    pool = make_pool(Path("bench-pool") / options.size, SIZES[options.size])
    found = measure(pool, options.method, options.repeat, options.out)
    print(document(pool, options.method, found, options.repeat))
    return 0 if all(met for met, _ in bars(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
