"""Dense merges beside mergekit and beside plain copying, on the same folders in one run.

    python -m benchmarks.dense [--quick] [--repeat N] [--methods ties,linear] [--no-mergekit]

Every side is a command started from cold, its start-up included; files are in the page cache, and
what earlier runs wrote is flushed before each. sigmerge and the floor take the best of three runs,
mergekit one (it is slow) unless --repeat is given. The first run of sigmerge, on files it has not
seen, is shown on its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.measure import Cost, best, drop, machine, run, versions
from benchmarks.pool import HALF_BILLION, QUICK, TINY, BenchPool, make_pool

WEIGHTS = (0.5, 0.3, 0.2)
METHODS: dict[str, dict[str, float]] = {
    "linear": {},
    "task_arithmetic": {},
    "ties": {"density": 0.2},
    "dare_linear": {"density": 0.5},
    "dare_ties": {"density": 0.5},
}
FASTER = {"linear": 8.0, "task_arithmetic": 8.0, "ties": 30.0, "dare_ties": 15.0}
"""On two cores."""
FASTER_ELSE = 2.0
MEMORY = 2.0
NEAR_FLOOR = {"linear": 2.0, "task_arithmetic": 2.0}

OUT = Path("bench-out")
BIN = Path(sys.executable).parent
THREADS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Result:
    """What one method cost; `floor` reads what the method reads and writes what it writes.

    `start` is sigmerge's start-up: the same merge of a pool that is next to nothing.
    """

    method: str
    first: Cost
    sigmerge: Cost
    start: Cost
    floor: Cost
    mergekit: Cost | None
    cold: tuple[Cost, Cost] | None
    """sigmerge and the floor with the inputs on the disk, for the methods that have that bar."""

    def near(self) -> tuple[float, float]:
        """Wall time as a multiple of the floor, without start-up and with it."""
        wall = self.sigmerge.wall
        return (wall - self.start.wall) / self.floor.wall, wall / self.floor.wall


def write_recipe(pool: BenchPool, method: str, file: Path) -> Path:
    """A recipe in the dialect of both."""
    recipe = {
        "merge_method": method,
        **({} if method == "linear" else {"base_model": str(pool.reference.resolve())}),
        "models": [
            {"model": str(member.resolve()), "parameters": {"weight": weight, **METHODS[method]}}
            for member, weight in zip(pool.members[1:], WEIGHTS, strict=True)
        ],
        "dtype": "bfloat16",
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return file


class Sides:
    """The three commands, each into a fresh folder."""

    def __init__(self, pool: BenchPool, method: str) -> None:
        self.pool, self.method = pool, method
        self.recipe = self._recipe()

    def _recipe(self) -> Path:
        file = OUT / f"{self.pool.folder.name}-{self.method}.yaml"
        return write_recipe(self.pool, self.method, file)

    def sigmerge(self, *, first: bool = False) -> Cost:
        cache = OUT / "cache"
        if first:
            shutil.rmtree(cache, ignore_errors=True)
        env = {"SIGMERGE_CACHE": str(cache.resolve())}
        return run([BIN / "sigmerge", "merge", self.recipe, self._fresh("sigmerge")], env)

    @property
    def files(self) -> list[Path]:
        members = self.pool.members[1:] if self.method == "linear" else self.pool.members
        return [self.pool.weights(member) for member in members]

    def cold(self) -> tuple[Cost, Cost]:
        drop(self.files)
        ours = self.sigmerge()
        drop(self.files)
        return ours, self.floor()

    def floor(self) -> Cost:
        target = self._fresh("floor")
        command = [sys.executable, "-S", "-m", "benchmarks.floor", str(THREADS), target]
        return run([*command, *self.files])

    def mergekit(self) -> Cost:
        out = self._fresh("mergekit")
        return run([BIN / "mergekit-yaml", self.recipe, out, "--no-copy-tokenizer"])

    @staticmethod
    def _fresh(name: str) -> Path:
        path = OUT / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        return path


def measured(
    sides: Sides, tiny: Sides, repeat: int | None, mergekit: bool, from_disk: bool
) -> Result:
    """Sides take turns, so that a busy moment of the machine does not fall on one of them."""
    first = sides.sigmerge(first=True)
    ours, starts, floors, theirs = [], [], [], []
    for turn in range(repeat or 3):
        ours.append(sides.sigmerge())
        floors.append(sides.floor())
        starts.append(tiny.sigmerge())
        if mergekit and turn < (repeat or 1):
            theirs.append(sides.mergekit())
    other = best(theirs) if theirs else None
    cold = None
    if from_disk:
        pairs = [sides.cold() for _ in range(repeat or 3)]
        cold = best(ours for ours, _ in pairs), best(floor for _, floor in pairs)
    return Result(sides.method, first, best(ours), best(starts), best(floors), other, cold)


def startup(mergekit: bool) -> Iterator[tuple[str, Cost]]:
    """What the commands take before any weight counts, best of three."""
    yield "`sigmerge --help`", best(run([BIN / "sigmerge", "--help"]) for _ in range(3))
    if mergekit:
        sides = Sides(make_pool(OUT / "tiny", TINY), "ties")
        help_text = [BIN / "mergekit-yaml", "--help"]
        yield "`mergekit-yaml --help`", best(run(help_text) for _ in range(3))
        name = f"mergekit, ties on {TINY.parameters:,} parameters"
        yield name, best(sides.mergekit() for _ in range(3))


def bars(results: list[Result]) -> Iterator[tuple[bool, str]]:
    """Each bar: whether it is met, and how far."""
    for result in results:
        method, ours = result.method, result.sigmerge
        if result.mergekit:
            least = FASTER.get(method, FASTER_ELSE)
            ratio = result.mergekit.wall / ours.wall
            yield ratio >= least, f"{method}: {ratio:.1f}× faster than mergekit (bar {least:g}×)"
            ratio = result.mergekit.memory / ours.memory
            yield ratio >= MEMORY, f"{method}: {ratio:.1f}× less memory (bar {MEMORY:g}×)"
        if result.cold:
            ratio, most = result.cold[0].wall / result.cold[1].wall, NEAR_FLOOR[method]
            yield ratio <= most, f"{method}: {ratio:.2f}× the floor, from disk (bar {most:g}×)"


def table(results: list[Result]) -> Iterator[str]:
    yield (
        "| method | side | wall s | CPU s | peak MB | "
        "mergekit/sigmerge: wall | CPU | peak | sigmerge/floor: wall | without start-up |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for result in results:
        ours, theirs = result.sigmerge, result.mergekit
        ratios = " | | "
        if theirs:
            ratios = " | ".join(f"{b / a:.1f}×" for a, b in zip(ours[:3], theirs[:3], strict=True))
        without, whole = result.near()
        near = f"{whole:.2f}× | {without:.2f}×"
        yield f"| {result.method} | sigmerge | {_cells(ours)} | {ratios} | {near} |"
        others = {
            "mergekit": theirs,
            "floor": result.floor,
            "sigmerge, first run": result.first,
            "sigmerge, start-up alone": result.start,
            "sigmerge, from disk": result.cold[0] if result.cold else None,
            "floor, from disk": result.cold[1] if result.cold else None,
        }
        for side, cost in others.items():
            if cost:
                yield f"| | {side} | {_cells(cost)} | | | | | |"


def _cells(cost: Cost) -> str:
    return f"{cost.wall:.2f} | {cost.cpu:.2f} | {cost.memory / 1e6:.0f}"


def document(pool: BenchPool, results: list[Result], starts: list[tuple[str, Cost]]) -> str:
    parameters = pool.shape.parameters
    lines = [
        "# Dense merges: sigmerge, mergekit, and plain copying",
        "",
        f"`{'make bench' if pool.shape == HALF_BILLION else 'python -m benchmarks.dense --quick'}` "
        f"(this table alone: `python -m benchmarks.dense`). A generated Llama pool of "
        f"{parameters / 1e6:.0f} M parameters in bfloat16, {len(pool.experts)} experts and their "
        "reference, the same recipes and folders for both tools, in one run; files in the page "
        "cache. *floor*: reading the inputs the method needs and writing as many bytes as the "
        f"output, {THREADS} threads, nothing else. *first run*: files not seen before are hashed "
        "for the provenance, and their digests are remembered. Start-up is part of every time; "
        "alone, it is the time of the same merge on a pool of "
        f"{TINY.parameters:,} parameters. *from disk*: the inputs were dropped from the page cache "
        "before the run. The bar (twice the floor) does not say where the inputs lie; it is judged "
        "from disk. With the inputs in memory the floor is a memory copy, shorter than a start-up "
        "of Python, and the bar is missed: the last columns say by how much, with and without it.",
        "",
        f"Machine: {machine()}. {versions('sigmerge', 'numpy', 'mergekit', 'torch')}.",
        "",
        *table(results),
        "",
        "| start-up | wall s | CPU s | peak MB |",
        "|---|--:|--:|--:|",
        *(f"| {name} | {_cells(cost)} |" for name, cost in starts),
        "",
        *(f"- {'PASS' if met else 'MISS'} {text}" for met, text in bars(results)),
        "",
    ]
    return "\n".join(lines)


def asked(
    name: str, description: str | None, methods: Iterable[str], arguments: list[str] | None
) -> argparse.Namespace:
    """The flags of a benchmark of methods beside mergekit."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="a small pool; writes no document")
    parser.add_argument("--repeat", type=int, help="runs of every side, mergekit included")
    parser.add_argument("--methods", default=",".join(methods), help="comma-separated")
    parser.add_argument("--no-mergekit", action="store_true", help="leave mergekit out")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the document; 1 if a bar is missed."""
    options = asked("dense", __doc__, METHODS, arguments)
    shape, folder = (QUICK, "quick") if options.quick else (HALF_BILLION, "half-billion")
    pool, tiny = make_pool(Path("bench-pool") / folder, shape), make_pool(OUT / "tiny", TINY)
    results = []
    for method in options.methods.split(","):
        sides, small = Sides(pool, method), Sides(tiny, method)
        both, cold = not options.no_mergekit, method in NEAR_FLOOR
        results.append(measured(sides, small, options.repeat, both, cold))
        print("\n".join(table(results[-1:])), flush=True)
    text = document(pool, results, list(startup(not options.no_mergekit)))
    print(text)
    if not (options.quick or options.no_mergekit) and len(results) == len(METHODS):
        Path("docs/results/dense-merge.md").write_text(text, encoding="utf-8")
    return 0 if all(met for met, _ in bars(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
