"""Other methods beside mergekit and beside plain copying, and a frankenmerge as a copy.

    python -m benchmarks.methods [--quick] [--repeat N] [--methods slerp,della] [--no-mergekit]

As `benchmarks.dense`: commands started from cold, files in the page cache, the least of the runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.dense import OUT, THREADS, Result, Sides, asked, measured, table
from benchmarks.measure import Cost, machine, run, versions
from benchmarks.pool import HALF_BILLION, QUICK, TINY, BenchPool, make_pool

FASTER, MEMORY, NEAR_FLOOR = 8.0, 10.0, 2.0


def _models(pool: BenchPool, **parameters: float) -> dict[str, Any]:
    return {
        "base_model": str(pool.reference.resolve()),
        "models": [{"model": str(expert.resolve()), "parameters": {"weight": 1.0, **parameters}}
                   for expert in pool.members[1:]],
    }  # fmt: skip


def _pair(pool: BenchPool) -> dict[str, Any]:
    """slerp goes from the base to one other model."""
    pair = [{"model": str(member.resolve())} for member in pool.members[:2]]
    return {"base_model": pair[0]["model"], "models": pair, "parameters": {"t": 0.4}}


def _layers(pool: BenchPool) -> int:
    """How many layers a frankenmerge takes of each of its two models: three quarters."""
    return max(1, 3 * pool.shape.layers // 4)


def _written(pool: BenchPool) -> int:
    """Bytes of a frankenmerge."""
    return 2 * replace(pool.shape, layers=2 * _layers(pool)).parameters


def _stacked(pool: BenchPool) -> dict[str, Any]:
    """The lower three quarters of one expert, and the upper three quarters of another."""
    depth, cut = pool.shape.layers, _layers(pool)
    ranges = ([0, cut], [depth - cut, depth])
    return {
        "slices": [{"sources": [{"model": str(expert.resolve()), "layer_range": layers}]}
                   for expert, layers in zip(pool.members[1:], ranges, strict=False)],
    }  # fmt: skip


RECIPES: dict[str, Callable[[BenchPool], dict[str, Any]]] = {
    "slerp": _pair,
    "model_stock": _models,
    "della": lambda pool: _models(pool, density=0.5, epsilon=0.1),
    "breadcrumbs": lambda pool: _models(pool, density=0.5, gamma=0.01),
    "sce": lambda pool: {**_models(pool), "parameters": {"select_topk": 0.2}},
    "passthrough": _stacked,
}


class MethodSides(Sides):
    """The three commands; the floor reads the models that the recipe names."""

    def _recipe(self) -> Path:
        content = {"merge_method": self.method, **RECIPES[self.method](self.pool)}
        file = OUT / f"{self.pool.folder.name}-{self.method}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump({**content, "dtype": "bfloat16"}, sort_keys=False))
        return file

    @property
    def files(self) -> list[Path]:
        members = self.pool.members
        if self.method == "passthrough":
            members = members[1:3]
        elif self.method == "slerp":
            members = members[:2]
        return [self.pool.weights(member) for member in members]

    def floor(self) -> Cost:
        """Of a frankenmerge a copy of as many bytes as the result has, from both models."""
        if self.method != "passthrough":
            return super().floor()
        command = [sys.executable, "-S", "-m", "benchmarks.floor", str(THREADS)]
        return run(
            [*command, self._fresh("floor"), *self.files, f"--stacked={_written(self.pool)}"]
        )


def bars(results: list[Result]) -> Iterator[tuple[bool, str]]:
    """Each bar: whether it is met, and how far."""
    for result in results:
        method, ours, theirs = result.method, result.sigmerge, result.mergekit
        if theirs and method != "passthrough":
            ratio = theirs.wall / ours.wall
            yield ratio >= FASTER, f"{method}: {ratio:.1f}× faster than mergekit (bar {FASTER:g}×)"
        if theirs:
            ratio = theirs.memory / ours.memory
            yield ratio >= MEMORY, f"{method}: {ratio:.1f}× less memory (bar {MEMORY:g}×)"
        if method == "passthrough" and result.cold:
            near = result.cold[0].wall / result.cold[1].wall
            yield (
                near <= NEAR_FLOOR,
                (f"{method}: {near:.2f}× a copy of as many bytes, from disk (bar {NEAR_FLOOR:g}×)"),
            )


def document(pool: BenchPool, results: list[Result], flags: str, load: float) -> str:
    """`load` is the load average before the first run: above zero, the cores were shared."""
    lines = [
        "# Other methods: sigmerge, mergekit, and plain copying",
        "",
        f"`python -m benchmarks.methods{flags}` (part of `make bench`). A generated Llama pool of "
        f"{pool.shape.parameters / 1e6:.0f} M parameters in bfloat16, {len(pool.experts)} experts "
        "and their reference, the same recipes and folders for both tools, in one run; files in "
        "the page cache, start-up part of every time. slerp has two models, the others all. "
        "*passthrough* stacks the lower three quarters of one expert and the upper three quarters "
        "of another. *floor*: reading the inputs and writing as many bytes as one model, "
        f"{THREADS} threads; of passthrough a copy from both models of as many bytes as the result "
        f"has, {_written(pool) / pool.shape.parameters / 2:.1f} models. *from disk*: "
        "the inputs were dropped from the page "
        f"cache. *start-up alone*: {TINY.parameters:,} parameters.",
        "",
        f"Machine: {machine()}. {versions('sigmerge', 'numpy', 'mergekit', 'torch')}. "
        f"Load average before the run: {load:.1f}; where it is not near 0, other work shared the "
        "cores during the run, and ratios say more than times.",
        "",
        *table(results),
        "",
        *(f"- {'PASS' if met else 'MISS'} {text}" for met, text in bars(results)),
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the document; 1 if a bar is missed."""
    options = asked("methods", __doc__, RECIPES, arguments)
    shape, folder = (QUICK, "quick") if options.quick else (HALF_BILLION, "half-billion")
    pool, tiny = make_pool(Path("bench-pool") / folder, shape), make_pool(OUT / "tiny", TINY)
    flags = (" --quick" if options.quick else "") + (
        f" --repeat {options.repeat}" if options.repeat else ""
    )
    results, load = [], os.getloadavg()[0]
    for method in options.methods.split(","):
        sides = MethodSides(pool, method)
        small, cold = MethodSides(tiny, method), method == "passthrough"
        results.append(measured(sides, small, options.repeat, not options.no_mergekit, cold))
        print("\n".join(table(results[-1:])), flush=True)
    text = document(pool, results, flags, load)
    print(text)
    if not (options.quick or options.no_mergekit) and len(results) == len(RECIPES):
        Path("docs/results/other-methods.md").write_text(text, encoding="utf-8")
    return 0 if all(met for met, _ in bars(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
