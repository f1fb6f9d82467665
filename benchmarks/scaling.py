"""How merges and repairs scale with threads: wall and CPU seconds beside the floor.

    python -m benchmarks.scaling [--layers 32] [--threads 1,2,4] [--folder /dev/shm/scaling]
    python -m benchmarks.scaling --folder /dev/shm/scaling --budget 330 --section scaling.md

A generated Llama pool in bfloat16, a reference and five experts, all in the page cache; every run
is a command from its start to its end. With 32 layers, the default, the pool has 1.59 B parameters
and takes 19 GB, its results some more. *read* reads the inputs and nothing else, *copy* also writes
as many bytes as a result has, from as many threads, into one file; *split* into eight, as a merge
does, and *map* through a map of one file.

All cores come first, then one, then the others. The second command above ends after about six
minutes on 16 cores, whatever it has measured by then: no run is begun after `--budget` seconds, and
what is missing is a dash. The section is written anew after every run, so that a run which is
stopped leaves what it measured. Where mergekit-yaml is installed, the same merges by mergekit come
after ours on all cores: on the GPU if there is one, else on all cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import Cost, best, machine, run, versions
from benchmarks.pool import TINY, BenchPool, Shape, make_pool

EXPERTS = 5
DOCUMENT = Path("docs/results/scaling.md")
METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {},
    "ties": {"density": 0.2},
    "dare_ties": {"density": 0.5},
}
BARS = {"linear": 1.3, "ties": 3.0, "dare_ties": 3.0, "repair": 3.0}
"""Times *split*, start-up included, with 16 threads on the pool of 1.59 B parameters."""
FIRST, START = 1.2, 0.25
"""A first run beside a second one; seconds of a merge of next to nothing."""
TIMES_MERGEKIT = {"linear": 8.0, "task_arithmetic": 8.0, "ties": 30.0, "dare_ties": 15.0}
"""On two cores; with more, five times its speed on a GPU."""
SPEEDUP = 9.0
"""16 threads against one, for what comes after start-up, which has one thread whatever is asked."""
SCALED = ("ties", "dare_ties", "repair")
FLOORS = ("read", "copy", "split", "map")
SIGMERGE: tuple[str | Path, ...] = (sys.executable, "-c", "from sigmerge.cli import main; main()")


@dataclass(frozen=True)
class Bench:
    pool: BenchPool
    out: Path

    def recipe(self, method: str, extra: dict[str, Any] | None = None) -> Path:
        models = [
            {"model": str(member.resolve()), "parameters": {"weight": 0.2, **METHODS[method]}}
            for member in self.pool.members[1:]
        ]
        content: dict[str, Any] = {"merge_method": method, "models": models}
        if method != "linear":  # mergekit would merge the reference too
            content["base_model"] = str(self.pool.reference.resolve())
        file = self.out / f"{method}{'-repair' if extra else ''}.yaml"
        file.write_text(yaml.safe_dump({**content, "dtype": "bfloat16", **(extra or {})}))
        return file

    def words(self, what: str, threads: int) -> list[str | Path]:
        """What follows the program's name: a merge, or a repair of `anchor`."""
        target = self.out / "result"
        shutil.rmtree(target, ignore_errors=True)
        if what in METHODS:
            return ["merge", self.recipe(what), target, "--threads", str(threads)]
        names = self.pool.experts
        scores = self.out / "scores.json"
        scores.write_text(json.dumps({
            "experts": {e: {d: 0.9 if d == e else 0.3 for d in names} for e in names},
            "anchor": {d: 0.8 - 0.1 * i for i, d in enumerate(names)},
        }))  # fmt: skip
        recipe = self.recipe("task_arithmetic", {"repair": {"scores": str(scores.resolve())}})
        anchor = self.out / "anchor"
        return ["repair", recipe, target, "--anchor", anchor, "--threads", str(threads)]

    def command(self, what: str, threads: int) -> Cost:
        return run([*SIGMERGE, *self.words(what, threads)], self.environment)

    def first(self, what: str, threads: int) -> Cost:
        """The command where no digest of an input is remembered."""
        self.forget()
        return self.command(what, threads)

    def profile(self) -> Cost:
        """Made before: it is measured once per pool."""
        shutil.rmtree(self.pool.folder / ".sigmerge", ignore_errors=True)
        self.command("task_arithmetic", len(os.sched_getaffinity(0)))
        (self.out / "result").rename(self.out / "anchor")
        return self.command("repair", len(os.sched_getaffinity(0)))

    def mergekit(self, method: str) -> Cost:
        """mergekit's own merge of the same file; with its start-up, as ours."""
        target, found = self.out / "result", shutil.which("mergekit-yaml")
        assert found is not None
        shutil.rmtree(target, ignore_errors=True)
        command = [found, self.recipe(method), target, "--no-copy-tokenizer"]
        return run([*command, *(["--cuda"] if shutil.which("nvidia-smi") else [])])

    def floor(self, threads: int, how: str) -> Cost:
        """The least a merge must do, which writes in one of three ways."""
        target = self.out / "copies" / "copy"
        target.parent.mkdir(parents=True)
        command = [sys.executable, "-S", "-m", "benchmarks.floor", str(threads)]
        files = [self.pool.weights(member) for member in self.pool.members]
        given = {"read": "-", "copy": str(target)}.get(how, f"{how}:{target}")
        cost = run([*command, given, *files])
        shutil.rmtree(target.parent)
        return cost

    @property
    def environment(self) -> dict[str, str]:
        return {"SIGMERGE_CACHE": str((self.out / "cache").resolve())}

    def forget(self) -> None:
        shutil.rmtree(self.out / "cache", ignore_errors=True)


@dataclass
class Table:
    """Costs by what was run and the number of threads; of first runs, and of mergekit's."""

    rows: dict[str, dict[int, Cost]]
    first: dict[str, Cost] = field(default_factory=dict)
    mergekit: dict[str, Cost] = field(default_factory=dict)
    start: dict[str, Cost] = field(default_factory=dict)
    """Of the same commands on a pool that is next to nothing."""


def in_order(threads: Iterable[int]) -> list[int]:
    """All, one, then the others from the most on: the order of what they show."""
    most, *others = sorted(set(threads), reverse=True)
    return [most, *sorted(others, key=lambda count: (count > 1, -count))]


def measure(
    bench: Bench,
    nothing: Bench,
    threads: Sequence[int],
    repeat: int,
    until: float,
    report: Callable[[Table], None],
) -> Table:
    """Run after run until a time of `time.perf_counter`; the table is reported after each."""
    methods, most = (*METHODS, "repair"), max(threads)
    table = Table({name: {} for name in (*methods, *FLOORS)})

    def note(name: str, row: dict[Any, Cost], key: Any, runs: Iterable[Callable[[], Cost]]) -> None:
        found = [work() for work in runs if time.perf_counter() < until]
        if found:
            row[key] = best(found)
            cost = row[key]
            print(f"{name}: {cost.wall:.2f} s, CPU {cost.cpu:.1f} s, {cost.memory / 1e6:.0f} MB, "
                  f"{cost.switches:.0f} switches", flush=True)  # fmt: skip
            report(table)

    bench.profile()
    nothing.profile()
    for count in in_order(threads):
        for what in methods:
            again = partial(bench.command, what, count)
            # A run on few threads takes long, and noise is little beside it.
            times = repeat if count == most else 1
            if count == most:
                first = partial(bench.first, what, count)
                note(f"{what}, first run", table.first, what, [first] * times)
                start = partial(nothing.command, what, count)
                note(f"{what}, start-up", table.start, what, [start] * (times + 1))
            note(f"{what}, {count} threads", table.rows[what], count, [again] * times)
        for what in FLOORS:
            floor = partial(bench.floor, count, what)
            note(f"{what}, {count} threads", table.rows[what], count, [floor] * repeat)
        if count == most and shutil.which("mergekit-yaml"):
            for what in METHODS:
                note(f"mergekit, {what}", table.mergekit, what, [partial(bench.mergekit, what)])
    return table


def bars(table: Table, shape: Shape) -> Iterator[tuple[bool, str]]:
    for what in (*METHODS, "repair"):
        row = table.rows[what]
        if not row:
            yield False, f"{what}: not measured"
            continue
        most = max(row)
        wall = row[most].wall
        if what in BARS and most == 16 and shape.layers == 32 and most in table.rows["split"]:
            ratio = wall / table.rows["split"][most].wall
            yield ratio <= BARS[what], f"{what}: {ratio:.1f}× split (bar {BARS[what]:g}×)"
        if what in table.start:
            start = table.start[what].wall
            yield start <= START, f"{what}: start-up {start:.2f} s (bar {START:g} s)"
            if what in SCALED and most == 16 and 1 in row:
                ratio, whole = (row[1].wall - start) / (wall - start), row[1].wall / wall
                text = f"16 threads {ratio:.1f}× one (bar {SPEEDUP:g}×), {whole:.1f}× with start-up"
                yield ratio >= SPEEDUP, f"{what}: {text}"
        counts = sorted(row)
        # A twentieth is noise.
        slower = [b for a, b in pairwise(counts)
                  if row[b].wall > 1.05 * row[a].wall]  # fmt: skip
        but = f" (but {slower})" if slower else ""
        yield not slower, f"{what}: more threads are never slower{but}"
        if what in table.first:
            ratio = table.first[what].wall / wall
            text = f"{what}: first run on a pool {ratio:.2f}× the second (bar {FIRST:g}×)"
            yield ratio <= FIRST, text
        if what in table.mergekit:
            ratio = table.mergekit[what].wall / wall
            bar = TIMES_MERGEKIT[what] if most <= 4 else 5.0
            yield ratio >= bar, f"{what}: {ratio:.1f} times as fast as mergekit (bar {bar:g})"


def section(bench: Bench, table: Table, command: str) -> str:
    shape, cores = bench.pool.shape, len(os.sched_getaffinity(0))
    counts = sorted({count for row in table.rows.values() for count in row})
    size = shape.parameters
    gigabytes = 2 * size * (EXPERTS + 1) / 1e9
    lines = [_line(what, row, counts, table, gigabytes) for what, row in table.rows.items()]
    return "\n".join([
        f"## {cores} cores",
        "",
        f"`{command}`: {size / 1e9:.2f} B parameters, {EXPERTS} experts and their reference, "
        f"{gigabytes:.1f} GB. The load of the machine was {os.getloadavg()[0]:.1f} at the end.",
        "",
        f"Machine: {machine()}. {versions('numpy')}.",
        "",
        f"| | {' | '.join(map(str, counts))} | first run | mergekit | peak MB | switches per GB |"
        " CPU ns per coordinate | start-up |",
        f"|---|{'--:|' * (len(counts) + 6)}",
        *lines,
        "",
        "Wall seconds (CPU seconds) by threads; *first run*: inputs not hashed before, most "
        "threads; *switches*: how often a thread gave its core up, by GB of inputs, most threads. "
        "Start-up is part of all of them; alone, it is the same command on a pool of "
        f"{TINY.parameters:,} parameters.",
        "",
        *(f"- {'PASS' if met else 'MISS'} {text}" for met, text in bars(table, shape)),
        "",
    ])  # fmt: skip


def _line(
    what: str, row: dict[int, Cost], counts: Sequence[int], table: Table, gigabytes: float
) -> str:
    """A row of the table; what was not measured is a dash."""
    costs = [*(row.get(count) for count in counts), table.first.get(what), table.mergekit.get(what)]
    cells = [f"{cost.wall:.2f} ({cost.cpu:.1f})" if cost else "—" for cost in costs]
    most = row.get(max(counts, default=0))
    cells += [f"{most.memory / 1e6:.0f}", f"{most.switches / gigabytes:.0f}"] if most else ["—"] * 2
    coordinates = gigabytes * 1e9 / 2 / (EXPERTS + 1)
    least = min((cost.cpu for cost in row.values()), default=math.nan)
    start = f"{table.start[what].wall:.2f}" if what in table.start else "—"
    return f"| {what} | {' | '.join(cells)} | {1e9 * least / coordinates:.1f} | {start} |"


def keep(text: str) -> None:
    """Replace the section of this number of cores in the document, or add it."""
    parts = DOCUMENT.read_text(encoding="utf-8").split("\n## ") if DOCUMENT.exists() else [HEAD]
    mine = text.removeprefix("## ")
    title = mine.splitlines()[0]
    others = [part.strip() + "\n" for part in parts if part.splitlines()[0] != title]
    DOCUMENT.write_text("\n## ".join([*others, mine.strip() + "\n"]), encoding="utf-8")


HEAD = """# Scaling

`make bench` (this table alone: `python -m benchmarks.scaling`). A worker takes a chunk of 2,097,152
coordinates with one compiled call per pass, without Python's lock. What the passes read of every
coordinate, with E experts stored in 16 bits:

| method | passes | bytes read | bytes written |
|---|---|--:|--:|
| linear | one | 2 E | 2 |
| task arithmetic, DARE without rescaling by norms, CABS | one | 2 (E + 1) | 2 |
| DARE, rescaled by norms | norms, merge | 4 (E + 1), and E/8 of marks | 2 |
| TIES | a sixteenth, counts, merge | 4.125 (E + 1) | 2 |
| repair | per claiming domain a sixteenth and marks, then the update | 4.25 E + 2 (E + 2) | 2 |

TIES, and a claim of the repair, take another sixteenth where the threshold has more than nine
significant bits, which differences of bfloat16 numbers seldom have, and two more passes where the
sample did not find the range of the threshold. The last column of each table is what a method
computed for one coordinate with its five experts, start-up and system calls included.
"""


def made(pool: Path, shape: Shape, out: Path) -> Bench:
    """A pool that is there or is generated, and an empty folder for what is made of it."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return Bench(make_pool(pool, shape, EXPERTS), out)


def counts_up_to(cores: int) -> list[int]:
    """1, 2, 4, … and all."""
    return sorted({*(1 << i for i in range(cores.bit_length()) if 1 << i <= cores), cores})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--threads", help="comma-separated; default 1, 2, 4, … all")
    parser.add_argument("--folder", type=Path, default=Path("bench-pool/scaling"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, pool included")
    parser.add_argument("--section", type=Path, help="write the section there, not the document")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    threads = (
        [int(c) for c in options.threads.split(",")] if options.threads else counts_up_to(cores)
    )
    shape = Shape(options.layers, options.width, 11 * options.width // 4, options.vocabulary)
    start = time.perf_counter()
    bench = made(options.folder / "pool", shape, options.folder / "out")
    nothing = made(options.folder / "nothing", TINY, options.folder / "out-of-nothing")
    print(f"pool: {time.perf_counter() - start:.1f} s", flush=True)
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    command = f"python -m benchmarks.scaling {given}".strip()

    def report(found: Table) -> None:
        if options.section:
            options.section.write_text(section(bench, found, command), encoding="utf-8")

    table = measure(bench, nothing, threads, options.repeat, start + options.budget, report)
    print(section(bench, table, command))
    if not options.section:
        keep(section(bench, table, command))
    shutil.rmtree(bench.out)
    shutil.rmtree(nothing.out)
    return 0 if all(met for met, _ in bars(table, shape)) else 1


if __name__ == "__main__":
    sys.exit(main())
