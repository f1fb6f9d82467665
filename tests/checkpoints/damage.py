"""Ways to damage a pool, and what every damaged pool must be told."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from sigmerge.checkpoints.folder import INDEX
from tests.command_line import refused
from tests.pools import PoolOnDisk, read_weights, write_weights

Break = Callable[[PoolOnDisk], Any]
NAME = "model.layers.0.mlp.up_proj.weight"


def check_refused(pool: PoolOnDisk, destroy: Break, words: list[str]) -> None:
    """The damage is found from headers, before anything is written, and told in these words."""
    recipe = pool.write(pool.recipe("task_arithmetic"))
    destroy(pool)
    said = refused(3, "merge", recipe, pool.root / "out", beside=pool.root)
    for word in words:
        assert word in said, said
    assert refused(3, "merge", recipe, pool.root / "out", "--dry-run", beside=pool.root) == said


def weights_file(pool: PoolOnDisk) -> Path:
    return pool.experts["math"] / "model.safetensors"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Break:
    """Rewrites the header of the expert's file and leaves the data as it is."""

    def apply(pool: PoolOnDisk) -> None:
        raw = weights_file(pool).read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        change(header)
        put_header(pool, json.dumps(header).encode(), raw[8 + length :])

    return apply


def put_header(pool: PoolOnDisk, header: bytes, data: bytes = b"") -> None:
    weights_file(pool).write_bytes(struct.pack("<Q", len(header)) + header + data)


def edit_index(change: Callable[[dict[str, str]], Any]) -> Break:
    def apply(pool: PoolOnDisk) -> None:
        weights = read_weights(pool.experts["math"])
        weights_file(pool).unlink()
        write_weights(pool.experts["math"], weights, shards=2)
        file = pool.experts["math"] / INDEX
        index = json.loads(file.read_text())
        change(index["weight_map"])
        file.write_text(json.dumps(index))

    return apply


def edit_weights(change: Callable[[dict[str, Any]], Any]) -> Break:
    def apply(pool: PoolOnDisk) -> None:
        tensors = load_file(weights_file(pool))
        change(tensors)
        save_file(tensors, weights_file(pool))

    return apply


def truncated(pool: PoolOnDisk) -> None:
    raw = weights_file(pool).read_bytes()
    weights_file(pool).write_bytes(raw[:-100])


def set_value(index: int, value: float, member: str = "math", name: str = NAME) -> Break:
    def apply(pool: PoolOnDisk) -> None:
        file = pool.root / member / "model.safetensors"
        tensors = load_file(file)
        tensors[name].view(-1)[index] = value
        save_file(tensors, file)

    return apply
