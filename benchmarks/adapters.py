"""Five LoRA experts as they are, and merged into five models first: disk, CPU time, memory.

    python -m benchmarks.adapters [--quick]

The reference is stored in bfloat16, the adapters (rank 16, all matrices of the layers) in float32,
the models that they make in float32. Both pools go through the same recipes; their results must be
the same files.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import Cost, best, machine, run, versions
from benchmarks.pool import QUICK, Shape, make_pool
from sigmerge.checkpoints.header import encode_header

SHAPE = Shape(layers=6, width=768, hidden=2048, vocabulary=8000)
EXPERTS, RANK = 5, 16
OUT = Path("bench-out")
PAGE = Path("docs/results/adapters.md")
METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ties": {"parameters": {"density": 0.2}},
    "task_arithmetic, repaired": {
        "repair": {"shares": {f"expert-{i}": 0.2 for i in range(EXPERTS)}, "capacity": 0.3}
    },
}
POOLS = ("adapters", "models")


@dataclass(frozen=True)
class Measured:
    method: str
    costs: dict[str, Cost]
    same: bool


def write_adapter(folder: Path, shape: Shape, seed: int) -> Path:
    """Factors N(0, 0.02) for every matrix of the layers."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, _, sides in shape.tensors():
        if ".layers." in name and len(sides) == 2:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for end, size in (("A", (RANK, sides[1])), ("B", (sides[0], RANK))):
                values = 0.02 * rng.standard_normal(size, np.float32)
                tensors[f"{module}.lora_{end}.weight"] = values.astype(np.float32)
    folder.mkdir(parents=True)
    header, _ = encode_header([(name, "F32", values.shape) for name, values in tensors.items()])
    with (folder / "adapter_model.safetensors").open("wb") as stream:
        stream.write(header)
        for values in tensors.values():
            stream.write(values.data)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK,
              "base_model_name_or_path": "../reference"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def command(recipe: dict[str, Any], file: Path, out: Path) -> list[str | Path]:
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    shutil.rmtree(out, ignore_errors=True)
    return [sys.executable, "-m", "sigmerge", "merge", file, out, "--overwrite"]


def prepare(shape: Shape) -> dict[str, dict[str, str]]:
    """The experts of both pools; the stored ones are made of the adapters, by passthrough."""
    root = OUT / "adapter-pool"
    shutil.rmtree(root, ignore_errors=True)
    reference = make_pool(root, shape, experts=0).reference.resolve()
    found: dict[str, dict[str, str]] = {name: {} for name in POOLS}
    for i in range(EXPERTS):
        name = f"expert-{i}"
        adapter = write_adapter(root / "adapters" / name, shape, i).resolve()
        found["adapters"][name] = f"{reference}+{adapter}"
        stored = (root / "models" / name).resolve()
        recipe = {"merge_method": "passthrough", "dtype": "float32",
                  "models": [{"model": f"{reference}+{adapter}"}]}  # fmt: skip
        stored.parent.mkdir(exist_ok=True)
        run(command(recipe, OUT / "recipe.yaml", stored))
        found["models"][name] = str(stored)
    return found


def measure(pools: dict[str, dict[str, str]], method: str, more: dict[str, Any]) -> Measured:
    costs, outs = {}, {}
    for pool, experts in pools.items():
        named = method.partition(",")[0]
        models = [{"model": path, "name": name, "parameters": {"weight": 0.3}}
                  for name, path in experts.items()]  # fmt: skip
        base = {} if named == "linear" else {
            "base_model": str((OUT / "adapter-pool/reference").resolve())
        }  # fmt: skip
        recipe = {"merge_method": named, **base, "models": models, "dtype": "bfloat16", **more}
        outs[pool] = OUT / f"from-{pool}"
        words = command(recipe, OUT / f"{pool}.yaml", outs[pool])
        costs[pool] = best([run(words) for _ in range(2)])
    files = [outs[pool] / "model.safetensors" for pool in POOLS]
    return Measured(method, costs, filecmp.cmp(*files, shallow=False))


def size(folders: list[str]) -> int:
    """Bytes of weights in the last folders of these paths."""
    return sum(f.stat().st_size for p in folders
               for f in Path(p.rpartition("+")[2]).glob("*.safetensors"))  # fmt: skip


def page(found: list[Measured], pools: dict[str, dict[str, str]], shape: Shape) -> str:
    disk = {name: size(list(experts.values())) for name, experts in pools.items()}
    lines = [
        "# Adapters as experts",
        "",
        f"`python -m benchmarks.adapters`. A generated Llama model of {shape.parameters / 1e6:.0f} "
        f"M parameters in bfloat16 and {EXPERTS} LoRA experts of rank {RANK} in float32, as "
        "adapters and merged into models first (float32, by `passthrough`). Start-up is part of "
        "every time, files are in the page cache, the least of two runs.",
        "",
        f"Machine: {machine()}. {versions('sigmerge', 'numpy')}.",
        "",
        f"Disk of the {EXPERTS} experts: {disk['adapters'] / 1e6:.0f} MB as adapters, "
        f"{disk['models'] / 1e6:.0f} MB as models "
        f"({disk['models'] / disk['adapters']:.0f} times as much).",
        "",
        "| method | experts | CPU s | peak MB | same bytes |",
        "|---|---|--:|--:|---|",
    ]
    for one in found:
        for pool, cost in one.costs.items():
            same = ("yes" if one.same else "NO") if pool == POOLS[0] else ""
            lines.append(
                f"| {one.method if pool == POOLS[0] else ''} | {pool} | "
                f"{cost.cpu:.2f} | {cost.memory / 1e6:.0f} | {same} |"
            )
    block = sum(math.prod(sides) for name, _, sides in shape.tensors() if ".layers.0." in name)
    lines += [
        "",
        f"A repair holds the block it works on ({block / 1e6:.0f} M coordinates, two at a time) of "
        "every adapter in float32; of a stored model the pages of its file.",
        "",
    ]
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small pool, and no page")
    given = parser.parse_args(words)
    shape = QUICK if given.quick else SHAPE
    OUT.mkdir(exist_ok=True)
    pools = prepare(shape)
    found = [measure(pools, method, more) for method, more in METHODS.items()]
    text = page(found, pools, shape)
    print(text)
    if not given.quick:
        PAGE.write_text(text)
    return int(not all(one.same for one in found))


if __name__ == "__main__":
    sys.exit(main())
