"""`python -m benchmarks.capture`: peak memory of captures and of the merges that read them.

Each at two depths of one model: features are read block by block, so a deeper model must not need
more memory; gradients need the hidden states of every block. Beside what was measured stands what
`--dry-run` said beforehand, which must not be less.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import machine, run, versions
from benchmarks.pool import HALF_BILLION, QUICK, BenchPool, Shape, make_pool

OUT = Path("bench-out/capture")
BIN = Path(sys.executable).parent
TOKENS = 256
FLAT = 1.02
"""The deep model's peak may exceed the shallow one's by this factor: noise."""
MERGED = Shape(layers=4, width=1024, hidden=1024, vocabulary=8192)
"""What is merged. Up to this width CAT takes its matrices apart whole; beyond, it iterates, which
on random weights, whose eigenvalues lie close together, takes long and no more memory."""
THREADS = 2


@dataclass(frozen=True)
class Row:
    """One command: what it took at most, and what its dry run had said; bytes."""

    what: str
    shape: Shape
    measured: float
    stated: float

    @property
    def line(self) -> str:
        size = self.shape.parameters
        return (
            f"| {self.what} | {self.shape.layers} | {size / 1e6:.0f} M | {size / 5e5:.0f} | "
            f"{self.measured / 1e6:.0f} | {self.stated / 1e6:.0f} |"
        )


def write_tokenizer(folder: Path, vocabulary: int) -> Path:
    """One word a token: "t17" is token 17."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"t{i}": i for i in range(vocabulary)}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_exemplars(file: Path, vocabulary: int, count: int) -> Path:
    rows = np.random.default_rng(0).integers(0, vocabulary, (count, TOKENS))
    lines = [json.dumps({"prompt": " ".join(f"t{i}" for i in row)}) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


class Bench:
    """A pool with a tokenizer and exemplars, and a folder that is thrown away."""

    def __init__(self, pool: BenchPool, exemplars: int, experts: int) -> None:
        self.pool, self.place = pool, OUT / f"{pool.folder.name}-{exemplars}"
        shutil.rmtree(self.place, ignore_errors=True)
        vocabulary = pool.shape.vocabulary
        self.tokenizer = write_tokenizer(self.place / "tokenizer", vocabulary)
        self.exemplars = write_exemplars(self.place / "exemplars.jsonl", vocabulary, exemplars)
        self.experts = pool.experts[:experts]
        self.env = {"SIGMERGE_CACHE": str((self.place / "cache").resolve())}

    def recipe(self, method: str) -> Path:
        def model(name: str) -> dict[str, str]:
            folder = (self.pool.folder / name).resolve()
            return {"model": str(folder), "name": name, "exemplars": str(self.exemplars.resolve())}

        content = {
            "merge_method": method,
            "base_model": str((self.pool.folder / "reference").resolve()),
            "models": [model(name) for name in self.experts],
            "tokenizer_source": str(self.tokenizer.resolve()),
            "capture": {"folder": str((self.place / "statistics").resolve())},
        }
        file = self.place / f"{method}.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    def row(self, what: str, *command: str | Path) -> Row:
        words = [BIN / "sigmerge", *command, "--threads", str(THREADS)]
        told = subprocess.run([*words, "--dry-run", "--json"], check=True, capture_output=True)
        plan: dict[str, Any] = json.loads(told.stdout)
        stated = max(row["peak_memory_bytes"] for row in plan.get("captures", [plan]))
        return Row(what, self.pool.shape, run(words, self.env).memory, stated)


def captured(pools: Sequence[BenchPool], method: str, exemplars: int) -> list[Row]:
    """One expert captured, at both depths."""
    rows = []
    for pool in pools:
        bench = Bench(pool, exemplars, experts=1)
        what = f"capture for {method}, {exemplars} exemplars"
        rows.append(bench.row(what, "capture", bench.recipe(method)))
        shutil.rmtree(bench.place)
    return rows


def merged(pools: Sequence[BenchPool], methods: Sequence[str]) -> list[list[Row]]:
    """Merges of all experts from statistics that are there already; per method, at both depths."""
    benches = [Bench(pool, 16, experts=3) for pool in pools]
    for bench in benches:
        run([BIN / "sigmerge", "capture", bench.recipe(methods[0])], bench.env)
    rows = [
        [bench.row(f"merge by {method}", "merge", bench.recipe(method), bench.place / method)
         for bench in benches]
        for method in methods
    ]  # fmt: skip
    for bench in benches:
        shutil.rmtree(bench.place)
    return rows


def grams(shape: Shape) -> int:
    """Bytes of all Grams of a model in float64: four inputs a block."""
    return shape.layers * 8 * (3 * shape.width**2 + shape.hidden**2)


def verdicts(pairs: Sequence[Sequence[Row]]) -> Iterator[tuple[bool, str]]:
    """Whether memory is flat where it should be, and dry runs promised enough."""
    for shallow, deep in pairs:
        if "fisher" not in deep.what:
            ratio, depth = deep.measured / shallow.measured, deep.shape.layers
            yield (
                ratio <= FLAT,
                f"{deep.what}: {depth} layers take {ratio:.2f}× the memory of "
                f"{shallow.shape.layers} (bar {FLAT}×)",
            )
    rows = [row for pair in pairs for row in pair]
    worst = max(rows, key=lambda row: row.measured / row.stated)
    share = worst.measured / worst.stated
    yield share <= 1, f"at most {100 * share:.0f} % of what --dry-run said ({worst.what})"


def document(pairs: Sequence[Sequence[Row]], shape: Shape) -> str:
    return "\n".join([
        "# Memory of captures, and of merges that read them",
        "",
        f"`python -m benchmarks.capture`: generated Llama pools, exemplars of {TOKENS} tokens, "
        f"{THREADS} threads, the whole command with start-up. A capture is of one expert, a merge "
        "of three, whose statistics are there already. *stated*: what `--dry-run` says.",
        "",
        f"Machine: {machine()}. {versions('sigmerge', 'numpy', 'torch', 'transformers')}.",
        "",
        "| command | layers | parameters | weights MB (bf16) | peak MB | stated MB |",
        "|---|--:|--:|--:|--:|--:|",
        *(row.line for pair in pairs for row in pair),
        "",
        f"All Grams of the first model at {shape.layers} layers take {grams(shape) / 1e6:.0f} MB. "
        "Fisher information keeps the hidden states of all blocks, and so grows with depth by "
        "those; the whole model in float32 with sums and gradients for two threads would take "
        f"{16 * shape.parameters / 1e6:.0f} MB.",
        "",
        *(f"- {'PASS' if good else 'MISS'} {words}" for good, words in verdicts(pairs)),
        "",
    ])  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the document; 1 if memory grows with depth or beyond promise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small pool; writes no document")
    options = parser.parse_args(arguments)
    deep, small, folder, experts = HALF_BILLION, MERGED, "half-billion", 3
    if options.quick:
        deep, small, folder, experts = (
            replace(QUICK, layers=16),
            replace(QUICK, hidden=768),
            "quick-16-layers",
            1,
        )

    def depths(name: str, shape: Shape, factor: int, *counts: int) -> list[BenchPool]:
        places = [Path("bench-pool") / f"{name}-shallow", Path("bench-pool") / name]
        shapes = [replace(shape, layers=shape.layers // factor), shape]
        return [make_pool(*each) for each in zip(places, shapes, counts, strict=True)]

    pools = depths(folder, deep, 4, 1, experts)
    pairs = [captured(pools, "regmean", 8), captured(pools, "fisher", 4)]
    pairs += merged(depths(f"merged-{folder}", small, 2, 3, 3), ("regmean", "lot", "cat"))
    text = document(pairs, deep)
    print(text)
    if not options.quick:
        Path("docs/results/capture.md").write_text(text, encoding="utf-8")
    return 0 if all(good for good, _ in verdicts(pairs)) else 1


if __name__ == "__main__":
    sys.exit(main())
