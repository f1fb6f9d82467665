"""Merges of very many tiny tensors, where what a tensor costs counts and not its entries.

    python -m benchmarks.small [--tensors N] [--methods ties,linear] [--repeat N]

Every merge is a command started from cold, its start-up included; files are in the page cache. The
CPU time of a merge of one hundredth of the tensors is taken off, so that the tensors' own stays.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import yaml

from benchmarks.measure import Cost, best, machine, run, versions
from sigmerge.checkpoints.folder import SINGLE
from sigmerge.checkpoints.header import encode_header

BAR = 1.0
"""Milliseconds of CPU time a tensor, of all threads together."""
SIDE, EXPERTS, LAYERS = 8, 3, 50
METHODS: dict[str, dict[str, float]] = {
    "task_arithmetic": {},
    "ties": {"density": 0.5},
    "dare_ties": {"density": 0.5},
}
OUT = Path("bench-out")


def make_pool(folder: Path, tensors: int) -> Path:
    """Matrices of 8 × 8 in float32, as experts of a mixture in fifty layers."""
    config = {"architectures": ["Bench"], "model_type": "bench", "num_hidden_layers": LAYERS}
    named = [
        (f"model.layers.{i % LAYERS}.mlp.experts.{i // LAYERS}.weight", "F32", (SIDE, SIDE))
        for i in range(tensors)
    ]
    header, _ = encode_header(named)
    rng = np.random.default_rng(0)
    base = rng.standard_normal(tensors * SIDE * SIDE, np.float32)
    shutil.rmtree(folder, ignore_errors=True)
    for member in ("reference", *(f"expert-{i}" for i in range(EXPERTS))):
        (folder / member).mkdir(parents=True)
        (folder / member / "config.json").write_text(json.dumps(config))
        moved = 0 if member == "reference" else rng.standard_normal(base.size, np.float32)
        content = base + np.float32(0.1) * np.float32(moved)
        (folder / member / SINGLE).write_bytes(header + content.astype(np.float32).tobytes())
    return folder


def measure(pool: Path, method: str, repeat: int) -> Cost:
    models = [
        {"model": str((pool / f"expert-{i}").resolve()), "parameters": {"weight": 0.5, **extra}}
        for i, extra in enumerate([METHODS[method]] * EXPERTS)
    ]
    recipe = {"merge_method": method, "base_model": str((pool / "reference").resolve())}
    file, out = pool / f"{method}.yaml", OUT / "small"
    file.write_text(yaml.safe_dump({**recipe, "models": models}))
    command = [sys.executable, "-m", "sigmerge", "merge", file, out, "--overwrite", "--no-fsync"]
    return best([run(command) for _ in range(repeat)])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if a method misses the bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small", description=__doc__)
    parser.add_argument("--tensors", type=int, default=50_000)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    OUT.mkdir(exist_ok=True)
    few, many = options.tensors // 100, options.tensors
    pools = [make_pool(Path("bench-pool") / f"small-{count}", count) for count in (few, many)]
    print(f"{many:,} tensors of {SIDE} × {SIDE}, {EXPERTS} experts, best of {options.repeat}.")
    print(f"Machine: {machine()}. {versions('sigmerge', 'numpy')}.\n")
    print("| method | wall s | CPU s | peak MB | CPU ms a tensor | |\n|---|--:|--:|--:|--:|---|")
    met = True
    for method in options.methods.split(","):
        start, cost = (measure(pool, method, options.repeat) for pool in pools)
        each = 1000 * (cost.cpu - start.cpu) / (many - few)
        met &= each <= BAR
        print(
            f"| {method} | {cost.wall:.1f} | {cost.cpu:.1f} | {cost.memory / 1e6:.0f} | {each:.2f} "
            f"| {'PASS' if each <= BAR else 'MISS'} (bar {BAR:g}) |",
            flush=True,
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
