"""Compile the kernels once, as a step of the installation: `python -m sigmerge.warm`.

A kernel is compiled when it is first called, and kept on disk. This merges and repairs a pool
of some hundred numbers in the ways that have kernels of their own: no later command compiles these.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.api import merge, repair
from sigmerge.checkpoints.header import encode_header
from sigmerge.checkpoints.truncation import exit_on_truncation
from sigmerge.progress import silent

TENSORS: list[tuple[str, str, tuple[int, ...]]] = [
    (f"model.layers.{i}.mlp.up_proj.weight", "BF16", (32, 16)) for i in range(2)
]
METHODS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("ties", 2, {"density": 0.2}),
    ("ties", 2, {"density": 0.2, "cancelled": "majority"}),
    ("linear", 2, {}),
    ("task_arithmetic", 2, {}),
    ("lines", 2, {}),
    ("dare_linear", 2, {"density": 0.5}),
    ("dare_ties", 2, {"density": 0.5}),
    ("dare_linear", 2, {"density": 0.5, "rescale": "none"}),
    ("dare_ties", 2, {"density": 0.5, "rescale": "none"}),
    ("cabs", 2, {"n": 1, "m": 4}),
    ("breadcrumbs", 2, {"density": 0.5, "rescale": True}),
    ("breadcrumbs_ties", 2, {"density": 0.5}),
    ("della", 2, {"density": 0.5}),
    ("della_linear", 2, {"density": 0.5}),
    ("sce", 2, {"select_topk": 0.5}),
    ("nuslerp", 2, {"nuslerp_flatten": False}),
    ("ramplus_tl", 2, {}),
    ("slerp", 1, {"t": 0.5}),
    ("arcee_fusion", 1, {}),
    ("nearswap", 1, {"t": 0.5}),
    ("passthrough", 1, {}),
)
"""With how many experts, and the parameters. What thins and combines alike has one loop."""


def warm(folder: Path) -> None:
    """Merge and repair in a folder that is empty."""
    rng, experts = np.random.default_rng(0), ("a", "b")
    for name in ("reference", *experts):
        _write(folder / name, rng.integers(0x3C00, 0x3E00, 2 * 32 * 16, np.uint16))
    recipe: dict[str, Any] = {
        "base_model": str(folder / "reference"),
        "models": [{"model": str(folder / expert)} for expert in experts],
    }
    for number, (method, count, given) in enumerate(METHODS):
        used = {"models": recipe["models"][:count], "merge_method": method, "parameters": given}
        dtype = "bfloat16" if method == "passthrough" else "float32"  # the former is copied
        merge({**recipe, **used, "dtype": dtype}, folder / str(number), progress=silent)
    scores = folder / "scores.json"
    scores.write_text(json.dumps({
        "experts": {e: {d: 0.9 if d == e else 0.3 for d in experts} for e in experts},
        "anchor": {"a": 0.8, "b": 0.7},
    }))  # fmt: skip
    repair(
        {**recipe, "merge_method": "ties", "repair": {"scores": str(scores)}},
        folder / "repaired",
        anchor=folder / "0",
        progress=silent,
    )


def _write(folder: Path, values: np.ndarray[Any, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    header, _ = encode_header(TENSORS)
    (folder / "model.safetensors").write_bytes(header + values.tobytes())


if __name__ == "__main__":
    start = time.perf_counter()
    exit_on_truncation()
    with tempfile.TemporaryDirectory() as made:
        warm(Path(made))
    print(f"Kernels compiled in {time.perf_counter() - start:.1f} s.")
