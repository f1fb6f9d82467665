"""The whole repair beside plain reading and writing, and its memory beside the size of a block.

    python -m benchmarks.repair [--quick]

Five experts. The repair reads the reference, the experts and the anchor and writes the result; the
floor does nothing else. Both are measured with files that are not in the page cache (dropped before
each run), as for pools larger than memory, and with files that are. The profile is made before:
it is measured once per pool, and its own cost is shown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.measure import Cost, best, drop, machine, run, versions
from benchmarks.pool import BenchPool, Shape, make_pool

SHAPE = Shape(layers=8, width=2048, hidden=5632, vocabulary=16000)
QUICK = Shape(layers=4, width=1024, hidden=2816, vocabulary=4000)
EXPERTS = 5
OUT = Path("bench-out")
BIN = Path(sys.executable).parent
THREADS = len(os.sched_getaffinity(0))
NEAR_FLOOR = 2.0
BASE_MEMORY = 300e6


@dataclass(frozen=True)
class Bench:
    pool: BenchPool
    recipe: Path
    anchor: Path

    @property
    def files(self) -> list[Path]:
        members = [self.pool.weights(member) for member in self.pool.members]
        return [*members, *sorted(self.anchor.glob("*.safetensors"))]

    @property
    def block_bytes(self) -> int:
        """Stored bytes of the largest decoder block."""
        sizes = {name: shape for name, _, shape in self.pool.shape.tensors()}
        block = [shape for name, shape in sizes.items() if name.startswith("model.layers.0.")]
        return 2 * sum(math.prod(shape) for shape in block)

    def profile(self) -> Cost:
        shutil.rmtree(self.pool.folder / ".sigmerge", ignore_errors=True)
        return run([BIN / "sigmerge", "profile", self.recipe], _environment())

    def repair(self) -> Cost:
        command = [BIN / "sigmerge", "repair", self.recipe, OUT / "repaired", "--overwrite"]
        return run([*command, "--anchor", self.anchor], _environment())

    def floor(self) -> Cost:
        target = OUT / "floor"
        target.unlink(missing_ok=True)
        command = [sys.executable, "-S", "-m", "benchmarks.floor", str(THREADS), target]
        return run([*command, *self.files])


def prepare(shape: Shape, folder: Path) -> Bench:
    pool = make_pool(folder, shape, EXPERTS)
    OUT.mkdir(exist_ok=True)
    models = [{"model": str(member.resolve())} for member in pool.members[1:]]
    merge = {
        "merge_method": "linear",
        "base_model": str(pool.reference.resolve()),
        "models": models,
    }
    names = pool.experts
    scores = {
        "experts": {e: {d: 0.9 if d == e else 0.3 for d in names} for e in names},
        "anchor": {d: 0.8 - 0.1 * i for i, d in enumerate(names)},
    }
    (OUT / "scores.json").write_text(json.dumps(scores))
    recipe = OUT / "repair.yaml"
    section = {"scores": str((OUT / "scores.json").resolve())}
    recipe.write_text(yaml.safe_dump({**merge, "repair": section}, sort_keys=False))
    plain = OUT / "anchor.yaml"
    plain.write_text(yaml.safe_dump(merge, sort_keys=False))
    anchor = OUT / "anchor"
    run([BIN / "sigmerge", "merge", plain, anchor, "--overwrite"], _environment())
    return Bench(pool, recipe, anchor)


def measure(bench: Bench, turns: int = 3) -> dict[str, Cost]:
    """Sides take turns; each keeps its best run."""
    bench.profile()  # hashes what it has not seen
    profile = best(bench.profile() for _ in range(turns))
    bench.repair()  # the same
    costs: dict[str, list[Cost]] = {}
    for _ in range(turns):
        for heat, files in (("cold", bench.files), ("warm", [])):
            for side, command in (("repair", bench.repair), ("floor", bench.floor)):
                drop(files)
                costs.setdefault(f"{side}, {heat}", []).append(command())
    return {"profile": profile, **{name: best(runs) for name, runs in costs.items()}}


def bars(bench: Bench, costs: dict[str, Cost]) -> Iterator[tuple[bool, str]]:
    ratio = costs["repair, cold"].wall / costs["floor, cold"].wall
    yield ratio <= NEAR_FLOOR, f"repair: {ratio:.2f}× reading and writing (bar {NEAR_FLOOR:g}×)"
    most = bench.block_bytes * (EXPERTS + 3) + BASE_MEMORY
    used = costs["repair, cold"].memory
    text = f"peak {used / 1e6:.0f} MB (bar: block × (experts + 3) + 300 MB = {most / 1e6:.0f} MB)"
    yield used <= most, text


def document(bench: Bench, costs: dict[str, Cost]) -> str:
    shape = bench.pool.shape
    inside = shape.layers * bench.block_bytes // 2
    lines = [
        "# The whole repair: time and memory",
        "",
        "`make bench` (this table alone: `python -m benchmarks.repair`). A generated Llama pool "
        f"of {shape.parameters / 1e6:.0f} M parameters in bfloat16 ({inside / 1e6:.0f} M in "
        f"{shape.layers} blocks of {bench.block_bytes / 1e6:.0f} MB), {EXPERTS} experts, a linear "
        "anchor. *floor*: reading the reference, the experts and the anchor and writing as many "
        f"bytes as the result, {THREADS} threads, nothing else. *cold*: the inputs are dropped "
        "from the page cache before each run; *warm*: they are in it. Best of three, start-up "
        "included.",
        "",
        f"Machine: {machine()}. {versions('sigmerge', 'numpy')}.",
        "",
        "| run | wall s | CPU s | peak MB |",
        "|---|--:|--:|--:|",
        *(f"| {name} | {c.wall:.2f} | {c.cpu:.2f} | {c.memory / 1e6:.0f} |"
          for name, c in costs.items()),
        "",
        f"Warm, the repair takes {costs['repair, warm'].wall / costs['floor, warm'].wall:.1f}× the "
        "floor: there the arithmetic of five claims per coordinate counts, not the disk.",
        "",
        *(f"- {'PASS' if met else 'MISS'} {text}" for met, text in bars(bench, costs)),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _environment() -> dict[str, str]:
    return {"SIGMERGE_CACHE": str((OUT / "cache").resolve())}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repair", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small pool; writes no document")
    options = parser.parse_args(arguments)
    shape, name = (QUICK, "repair-quick") if options.quick else (SHAPE, "repair")
    bench = prepare(shape, Path("bench-pool") / name)
    costs = measure(bench)
    text = document(bench, costs)
    print(text)
    if not options.quick:
        Path("docs/results/repair.md").write_text(text, encoding="utf-8")
    return 0 if all(met for met, _ in bars(bench, costs)) else 1


if __name__ == "__main__":
    sys.exit(main())
