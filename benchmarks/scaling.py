"""How merges and repairs scale with threads: wall and CPU seconds beside the floor.

    python -m benchmarks.scaling [--layers 32] [--threads 1,2,4] [--folder /dev/shm/scaling]

A generated Llama pool in bfloat16, a reference and five experts, all in the page cache; every run
is a command from its start to its end. With 32 layers, the default, the pool has 1.59 B parameters
and takes 19 GB, its results some more. *read* reads the inputs and nothing else, *copy* also writes
as many bytes as a result has, from as many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import Cost, best, machine, run, versions
from benchmarks.pool import BenchPool, Shape, make_pool

EXPERTS = 5
DOCUMENT = Path("docs/results/scaling.md")
METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {},
    "ties": {"density": 0.2},
    "dare_ties": {"density": 0.5},
}
BARS = {"linear": 1.2, "task_arithmetic": 1.5, "ties": 4.0, "dare_ties": 4.0, "repair": 4.0}
"""Wall seconds at 16 threads on the pool of 1.59 B parameters."""
SPEEDUP = 9.0
"""16 threads against one, for TIES, DARE-TIES and the repair."""
SIGMERGE = [sys.executable, "-c", "from sigmerge.cli import main; main()"]


@dataclass(frozen=True)
class Bench:
    pool: BenchPool
    out: Path

    def recipe(self, method: str, extra: dict[str, Any] | None = None) -> Path:
        models = [
            {"model": str(member.resolve()), "parameters": {"weight": 0.2, **METHODS[method]}}
            for member in self.pool.members[1:]
        ]
        reference = str(self.pool.reference.resolve())
        content = {"merge_method": method, "base_model": reference, "models": models}
        file = self.out / f"{method}{'-repair' if extra else ''}.yaml"
        file.write_text(yaml.safe_dump({**content, "dtype": "bfloat16", **(extra or {})}))
        return file

    def command(self, what: str, threads: int) -> Cost:
        target = self.out / "result"
        shutil.rmtree(target, ignore_errors=True)
        words: list[str | Path] = ["merge", self.recipe(what)] if what in METHODS else []
        if what == "repair":
            names = self.pool.experts
            scores = self.out / "scores.json"
            scores.write_text(json.dumps({
                "experts": {e: {d: 0.9 if d == e else 0.3 for d in names} for e in names},
                "anchor": {d: 0.8 - 0.1 * i for i, d in enumerate(names)},
            }))  # fmt: skip
            section = {"repair": {"scores": str(scores.resolve())}}
            words = ["repair", self.recipe("task_arithmetic", section)]
        words += [target, "--threads", str(threads)]
        if what == "repair":
            words += ["--anchor", self.out / "anchor"]
        return run([*SIGMERGE, *words], self.environment)

    def profile(self) -> Cost:
        """Made before: it is measured once per pool."""
        shutil.rmtree(self.pool.folder / ".sigmerge", ignore_errors=True)
        self.command("task_arithmetic", len(os.sched_getaffinity(0)))
        (self.out / "result").rename(self.out / "anchor")
        return self.command("repair", len(os.sched_getaffinity(0)))

    def floor(self, threads: int, *, write: bool) -> Cost:
        target = self.out / "copy"
        target.unlink(missing_ok=True)
        command = [sys.executable, "-S", "-m", "benchmarks.floor", str(threads)]
        files = [self.pool.weights(member) for member in self.pool.members]
        cost = run([*command, target if write else "-", *files])
        target.unlink(missing_ok=True)
        return cost

    @property
    def environment(self) -> dict[str, str]:
        names = ("SIGMERGE_CACHE", "NUMBA_CACHE_DIR")
        return {name: str((self.out / "cache" / name).resolve()) for name in names}

    def forget(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.out / "cache" / name, ignore_errors=True)


@dataclass(frozen=True)
class Table:
    """Rows of costs by number of threads, and first runs at the most threads."""

    rows: dict[str, dict[int, Cost]]
    first: dict[str, Cost]
    installed: Cost


def measure(bench: Bench, threads: Sequence[int], repeat: int) -> Table:
    most = max(threads)
    installed = bench.command("ties", most)
    bench.profile()
    rows: dict[str, dict[int, Cost]] = {name: {} for name in (*METHODS, "repair", "read", "copy")}
    first = {}
    for what in (*METHODS, "repair"):
        bench.forget("SIGMERGE_CACHE")
        first[what] = bench.command(what, most)
        for count in threads:
            # One thread takes long, and noise is little beside it.
            times = 1 if count < most else repeat
            rows[what][count] = best(bench.command(what, count) for _ in range(times))
            print(f"{what}, {count} threads: {rows[what][count]}", flush=True)
    for count in threads:
        rows["read"][count] = best(bench.floor(count, write=False) for _ in range(repeat))
        rows["copy"][count] = best(bench.floor(count, write=True) for _ in range(repeat))
    return Table(rows, first, installed)


def bars(table: Table, shape: Shape) -> Iterator[tuple[bool, str]]:
    for what in BARS:
        row = table.rows[what]
        most = max(row)
        wall = row[most].wall
        if shape.layers == 32 and most == 16:
            limit = BARS[what]
            yield wall <= limit, f"{what}: {wall:.2f} s on 16 threads (bar {limit:g} s)"
            if what in ("ties", "dare_ties", "repair") and 1 in row:
                ratio = row[1].wall / wall
                yield ratio >= SPEEDUP, f"{what}: 16 threads {ratio:.1f}× one (bar {SPEEDUP:g}×)"
        counts = sorted(row)
        # A twentieth is noise.
        slower = [b for a, b in pairwise(counts)
                  if row[b].wall > 1.05 * row[a].wall]  # fmt: skip
        but = f" (but {slower})" if slower else ""
        yield not slower, f"{what}: more threads are never slower{but}"
        ratio = table.first[what].wall / wall
        yield ratio <= 1.5, f"{what}: first run on a pool {ratio:.2f}× the second (bar 1.5×)"


def section(bench: Bench, table: Table, command: str) -> str:
    shape = bench.pool.shape
    counts = sorted(table.rows["read"])
    size = shape.parameters
    cells = {
        what: " | ".join(f"{row[c].wall:.2f} ({row[c].cpu:.1f})" for c in counts)
        for what, row in table.rows.items()
    }
    ns = {
        what: f"{1e9 * min(cost.cpu for cost in row.values()) / size:.1f}"
        for what, row in table.rows.items()
    }
    first = {what: f"{cost.wall:.2f} ({cost.cpu:.1f})" for what, cost in table.first.items()}
    return "\n".join([
        f"## {len(os.sched_getaffinity(0))} cores",
        "",
        f"`{command}`: {size / 1e9:.2f} B parameters, {EXPERTS} experts and their reference, "
        f"{2 * size * (EXPERTS + 1) / 1e9:.1f} GB.",
        "",
        f"Machine: {machine()}. {versions('numpy', 'numba')}.",
        "",
        f"| | {' | '.join(map(str, counts))} | first run | CPU ns per coordinate |",
        f"|---|{'--:|' * (len(counts) + 2)}",
        *(f"| {what} | {cells[what]} | {first.get(what, '')} | {ns[what]} |" for what in cells),
        "",
        "Wall seconds (CPU seconds) by threads; *first run*: inputs not hashed before, most "
        f"threads. With nothing compiled either, TIES took {table.installed.wall:.2f} "
        f"({table.installed.cpu:.1f}). Start-up is part of all of them.",
        "",
        *(f"- {'PASS' if met else 'MISS'} {text}" for met, text in bars(table, shape)),
        "",
    ])  # fmt: skip


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
| DARE, rescaled by norms | norms, merge | 4 (E + 1) | 2 |
| TIES | two sixteenths, counts, merge | 4.25 (E + 1) | 2 |
| repair | per claiming domain two sixteenths and marks, then the update | 4.5 E + 2 (E + 2) | 2 |

TIES, and a claim of the repair, take two more passes where the sample did not find the range of the
threshold. The last column of each table is what a method computed for one coordinate with its five
experts, start-up and system calls included.
"""


def counts_up_to(cores: int) -> list[int]:
    """1, 2, 4, … and all."""
    return sorted({*(1 << i for i in range(cores.bit_length()) if 1 << i <= cores), cores})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--threads", help="comma-separated; default 1, 2, 4, … all")
    parser.add_argument("--folder", type=Path, default=Path("bench-pool/scaling"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--section", type=Path, help="write the section there, not the document")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    threads = (
        [int(c) for c in options.threads.split(",")] if options.threads else counts_up_to(cores)
    )
    shape = Shape(options.layers, 2048, 5632, options.vocabulary)
    start = time.perf_counter()
    bench = Bench(make_pool(options.folder / "pool", shape, EXPERTS), options.folder / "out")
    shutil.rmtree(bench.out, ignore_errors=True)
    bench.out.mkdir(parents=True)
    print(f"pool: {time.perf_counter() - start:.1f} s", flush=True)
    table = measure(bench, threads, options.repeat)
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    text = section(bench, table, f"python -m benchmarks.scaling {given}".strip())
    print(text)
    if options.section:
        options.section.write_text(text, encoding="utf-8")
    else:
        keep(text)
    shutil.rmtree(bench.out)
    return 0 if all(met for met, _ in bars(table, shape)) else 1


if __name__ == "__main__":
    sys.exit(main())
