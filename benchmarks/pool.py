"""A random Llama pool in bfloat16 on disk, made piece by piece and kept for the next run."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import SINGLE
from sigmerge.checkpoints.header import encode_header
from sigmerge.core.dtypes import NARROW, WIDEN

SUMS = "sums.json"
PIECE = 1 << 20
"""Coordinates that are made at a time."""


@dataclass(frozen=True)
class Shape:
    """A Llama-like model; `heads` of 128, a third of them for keys and values."""

    layers: int
    width: int
    hidden: int
    vocabulary: int

    @property
    def heads(self) -> tuple[int, int]:
        heads = self.width // 128
        return heads, max(1, heads // 3)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, _, shape in self.tensors())

    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        width, hidden = self.width, self.hidden
        narrow = self.heads[1] * 128
        layer = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (narrow, width),
            "self_attn.v_proj": (narrow, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (hidden, width),
            "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden),
        }
        named: dict[str, tuple[int, ...]] = {
            "model.embed_tokens": (self.vocabulary, width),
            **{
                f"model.layers.{i}.{name}": shape
                for i in range(self.layers)
                for name, shape in layer.items()
            },
            "model.norm": (width,),
            "lm_head": (self.vocabulary, width),
        }
        return [(f"{name}.weight", "BF16", shape) for name, shape in named.items()]

    def config(self) -> dict[str, Any]:
        heads, narrow = self.heads
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": narrow,
            "head_dim": 128,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


HALF_BILLION = Shape(layers=16, width=1536, hidden=4096, vocabulary=32000)
QUICK = Shape(layers=4, width=768, hidden=2048, vocabulary=8000)
TINY = Shape(layers=1, width=128, hidden=128, vocabulary=64)


@dataclass(frozen=True)
class BenchPool:
    folder: Path
    shape: Shape
    experts: tuple[str, ...]

    @property
    def reference(self) -> Path:
        return self.folder / "reference"

    @property
    def members(self) -> list[Path]:
        return [self.reference, *(self.folder / name for name in self.experts)]

    @staticmethod
    def weights(member: Path) -> Path:
        return member / SINGLE


def make_pool(folder: Path, shape: Shape, experts: int = 3) -> BenchPool:
    """Reference N(0, 0.02), experts N(0, 5e-4) away from it, all rounded to bfloat16.

    A pool that is there is taken if its sums are right. Either way its files have just been read
    or written, so that they are in the page cache.
    """
    pool = BenchPool(folder, shape, tuple(f"expert-{i}" for i in range(experts)))
    if not _intact(pool):
        shutil.rmtree(folder, ignore_errors=True)
        for member in pool.members:
            member.mkdir(parents=True)
            (member / "config.json").write_text(json.dumps(shape.config(), indent=2))
        _write_weights(pool)
        (folder / SUMS).write_text(json.dumps(_sums(pool)))
    return pool


def _write_weights(pool: BenchPool) -> None:
    """Piece by piece on all cores, each with random numbers of its own."""
    header, _ = encode_header(pool.shape.tensors())
    files = [
        os.open(pool.weights(member), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for member in pool.members
    ]
    for file in files:
        os.pwrite(file, header, 0)
    total = pool.shape.parameters

    def write(start: int) -> None:
        rng, size = np.random.default_rng(start), min(PIECE, total - start)
        raw, base = np.empty(size, np.uint16), np.zeros(size, np.float32)
        for file, spread in zip(files, [0.02] + [5e-4] * len(pool.experts), strict=True):
            noise = rng.standard_normal(size, np.float32)
            noise *= np.float32(spread)
            noise += base
            NARROW["BF16"](noise, raw)
            if spread == 0.02:
                WIDEN["BF16"](raw, base)
            os.pwrite(file, raw.data, len(header) + 2 * start)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as team:
        list(team.map(write, range(0, total, PIECE)))
    for file in files:
        os.close(file)


def _intact(pool: BenchPool) -> bool:
    try:
        sums = json.loads((pool.folder / SUMS).read_text())
        configs = [json.loads((member / "config.json").read_text()) for member in pool.members]
        found = _sums(pool)
    except (OSError, ValueError):
        return False
    return found == sums and all(config == pool.shape.config() for config in configs)


def _sums(pool: BenchPool) -> dict[str, int]:
    with ThreadPoolExecutor(len(pool.members)) as team:
        sums = team.map(_sum, [pool.weights(member) for member in pool.members])
        return {member.name: value for member, value in zip(pool.members, sums, strict=True)}


def _sum(file: Path) -> int:
    value, buffer = 0, memoryview(bytearray(1 << 22))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value
