"""`python -m benchmarks.capture`: peak memory of a RegMean capture, at two depths of one model.

Features are read block by block, so a model four times as deep must not need more memory. Shown
beside it: what all Grams of the model would take, and its weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from benchmarks.measure import Cost, machine, run, versions
from benchmarks.pool import HALF_BILLION, QUICK, BenchPool, Shape, make_pool

OUT = Path("bench-out/capture")
BIN = Path(sys.executable).parent
EXEMPLARS, TOKENS = 16, 256
FLAT = 1.02
"""The deep model's peak may exceed the shallow one's by this factor: noise."""


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


def write_exemplars(file: Path, vocabulary: int) -> Path:
    rows = np.random.default_rng(0).integers(0, vocabulary, (EXEMPLARS, TOKENS))
    lines = [json.dumps({"prompt": " ".join(f"t{i}" for i in row)}) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


def measure(pool: BenchPool) -> Cost:
    """One expert captured in a process of its own; its statistics are thrown away."""
    place = OUT / f"{pool.shape.layers}-layers"
    shutil.rmtree(place, ignore_errors=True)
    tokenizer = write_tokenizer(place / "tokenizer", pool.shape.vocabulary)
    exemplars = write_exemplars(place / "exemplars.jsonl", pool.shape.vocabulary)
    name = pool.experts[0]
    recipe = {
        "merge_method": "regmean",
        "models": [{"model": str((pool.folder / name).resolve()), "name": name,
                    "exemplars": str(exemplars.resolve())}],
        "tokenizer_source": str(tokenizer.resolve()),
    }  # fmt: skip
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [BIN / "sigmerge", "capture", place / "recipe.yaml", "--out", place / "statistics"]
    cost = run(command, {"SIGMERGE_CACHE": str((place / "cache").resolve())})
    shutil.rmtree(place / "statistics")
    return cost


def grams(shape: Shape) -> int:
    """Bytes of all Grams of a model in float64: four inputs a block."""
    return shape.layers * 8 * (3 * shape.width**2 + shape.hidden**2)


def table(rows: list[tuple[Shape, Cost]]) -> Iterator[str]:
    yield "| layers | parameters | weights MB (bf16) | all Grams MB | capture: peak MB | wall s |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for shape, cost in rows:
        yield (
            f"| {shape.layers} | {shape.parameters / 1e6:.0f} M | {shape.parameters / 5e5:.0f} | "
            f"{grams(shape) / 1e6:.0f} | {cost.memory / 1e6:.0f} | {cost.wall:.1f} |"
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the document; 1 if memory grows with depth."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small pool; writes no document")
    options = parser.parse_args(arguments)
    deep, folder = HALF_BILLION, "half-billion"
    if options.quick:
        deep, folder = replace(QUICK, layers=16), "quick-16-layers"
    shallow = replace(deep, layers=deep.layers // 4)
    pools = [
        make_pool(Path("bench-pool") / f"{folder}-shallow", shallow, experts=1),
        make_pool(Path("bench-pool") / folder, deep, experts=1 if options.quick else 3),
    ]
    rows = [(pool.shape, measure(pool)) for pool in pools]
    ratio = rows[1][1].memory / rows[0][1].memory
    text = "\n".join([
        "# Memory of a RegMean capture",
        "",
        f"`python -m benchmarks.capture`: one expert of a generated Llama pool, {EXEMPLARS} "
        f"exemplars of {TOKENS} tokens, Grams in float64, the whole command with start-up.",
        "",
        f"Machine: {machine()}. {versions('sigmerge', 'numpy', 'torch', 'transformers')}.",
        "",
        *table(rows),
        "",
        f"- {'PASS' if ratio <= FLAT else 'MISS'} four times the layers take {ratio:.2f}× the "
        f"memory (bar {FLAT}×)",
        "",
    ])  # fmt: skip
    print(text)
    if not options.quick:
        Path("docs/results/capture.md").write_text(text, encoding="utf-8")
    return 0 if ratio <= FLAT else 1


if __name__ == "__main__":
    sys.exit(main())
