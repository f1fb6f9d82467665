"""`sigmerge extract`: what a model learnt beyond its base, as a LoRA adapter in PEFT's format."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.adapter_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, split_adapter
from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint, tied_head
from sigmerge.checkpoints.header import encode_header
from sigmerge.checkpoints.pool import Pool, differences, with_heads
from sigmerge.checkpoints.source import PoolSource
from sigmerge.checkpoints.writer import put_in_place, sync_tree
from sigmerge.engine.machine import INTERPRETER
from sigmerge.engine.workers import Workers
from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.files.locks import only_writer
from sigmerge.files.regular import remove, sync_folder
from sigmerge.jobs.options import Description, Options, Step
from sigmerge.jobs.work_folder import hidden
from sigmerge.kernels import Array
from sigmerge.method.low_rank import LowRank, truncated
from sigmerge.results import Extracted

STORED_PREFIX = "base_model.model."
TURNED = ("gpt2", "openai-gpt")
"""Models whose linear weights are stored as (in, out)."""


@dataclass
class _Found:
    """What goes into the adapter."""

    factors: dict[str, LowRank] = field(default_factory=dict)
    whole: dict[str, Array] = field(default_factory=dict)

    def tensors(self) -> dict[str, Array]:
        named = {STORED_PREFIX + self._stored(name): v for name, v in self.whole.items()}
        for module, low in self.factors.items():
            named[f"{STORED_PREFIX}{module}.lora_A.weight"] = low.a
            named[f"{STORED_PREFIX}{module}.lora_B.weight"] = low.b
        return {name: named[name] for name in sorted(named, key=natural)}

    def _stored(self, name: str) -> str:
        """A tensor's name in the adapted model, where a layer with an update is wrapped."""
        module, _, part = name.rpartition(".")
        return f"{module}.base_layer.{part}" if module in self.factors else name


@dataclass(frozen=True)
class ExtractJob:
    """The difference of a model and its base: matrices of the layers by truncated SVD.

    Other tensors that differ (embeddings, head, norms, biases) are stored whole.
    """

    model: Path
    base: Path
    out: Path
    options: Options
    rank: int | None = None
    energy: float | None = None

    @property
    def _most(self) -> int | None:
        """The largest rank: what is said, else 16 unless an energy decides it."""
        return 16 if self.rank is None and self.energy is None else self.rank

    def check(self) -> Pool:
        if self.rank is not None and self.rank < 1:
            raise RecipeError(f"--rank: must be 1 or more, not {self.rank}.")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise RecipeError(f"--energy: must lie between 0 and 1, not {self.energy:g}.")
        for folder in (f for path in (self.model, self.base) for f in split_adapter(path) if f):
            if self.out.resolve().is_relative_to(folder.resolve()):
                raise OutputError(f"{self.out}: lies inside an input, {folder}; choose another.")
            if folder.resolve().is_relative_to(self.out.resolve()):
                raise OutputError(f"{self.out}: holds an input, {folder}; choose another folder.")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            if not (self.out / ADAPTER_CONFIG).exists():
                raise OutputError(f"{self.out}: is no adapter; choose a new folder.")
            if not self.options.overwrite:
                raise OutputError(f"{self.out}: exists already; pass --overwrite to replace it.")
        opened = {
            name: open_checkpoint(path, allow_pickle=self.options.allow_pickle)
            for name, path in (("base", self.base), ("model", self.model))
        }
        pool = with_heads(Pool(opened["base"], {"model": opened["model"]}))
        if problems := differences("model", pool.experts["model"], pool.layout, outside=True):
            raise PoolError("The model is not one of this base:", problems)
        return pool

    def describe(self) -> Description:
        pool = self.check()
        targets = [pool.layout.tensors[name] for name in _matrices(pool.layout)]
        sides = [t.shape for t in targets]
        ranks = [min(self._most or math.inf, *shape) for shape in sides]
        largest = max((t.size for t in targets), default=0)
        factors = sum(int(r) * sum(shape) for r, shape in zip(ranks, sides, strict=True))
        step = Step(
            "extract",
            {"model": str(self.model), "base": str(self.base), "matrices": len(targets)},
            bytes_to_read=sum(member.nbytes for member in pool.members.values()),
            bytes_to_write=4 * factors,
            peak_memory_bytes=INTERPRETER + 4 * factors + 32 * largest * self.options.threads,
        )
        return Description((step,), self.options.threads)

    def run(self) -> Extracted:
        pool = self.check()
        found = self._found(pool)
        if not found.factors and not found.whole:
            raise PoolError(f"{self.model}: every tensor equals the base's; nothing to extract.")
        partial = hidden(self.out, "partial")
        message = f"{self.out}: another run is writing it."
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with only_writer(hidden(self.out, "lock"), message):
            remove(partial)
            partial.mkdir()
            size = self._write(partial, pool.layout, found)
            if self.options.durable:
                sync_tree(partial)
            old = hidden(self.out, "old")
            put_in_place(partial, self.out, old)
            if self.options.durable:
                sync_folder(self.out.parent)
            for leftover in (partial, old):
                shutil.rmtree(leftover, ignore_errors=True)
        kept = sum(low.kept for low in found.factors.values())
        total = sum(low.total for low in found.factors.values())
        return Extracted(
            out=str(self.out),
            modules=len(found.factors),
            rank=max((low.a.shape[0] for low in found.factors.values()), default=0),
            kept=kept / total if total else 1.0,
            whole=tuple(sorted(found.whole, key=natural)),
            bytes_written=size,
        )

    def _found(self, pool: Pool) -> _Found:
        """Every tensor that differs, in the order of names; matrices as factors."""
        found, layout = _Found(), pool.layout
        matrices, turned = set(_matrices(layout)), layout.config.get("model_type") in TURNED
        names = [n for n in sorted(layout.tensors) if layout.tensors[n].floating]
        done = 0

        def visit(name: str) -> tuple[str, LowRank | None, Array | None]:
            shape = layout.tensors[name].shape
            base, own = (np.empty(shape, np.float32) for _ in range(2))
            source.fill("reference", name, 0, base.reshape(-1))
            source.fill("model", name, 0, own.reshape(-1))
            source.done(name, 0, own.size)
            if np.array_equal(base, own):
                return name, None, None
            if name not in matrices:
                return name, None, own
            change = own - base
            return name, truncated(change.T if turned else change, self._most, self.energy), None

        with (
            PoolSource(pool.members, allow_nonfinite=self.options.allow_nonfinite) as source,
            Workers(self.options.threads) as workers,
        ):
            for name, low, whole in workers.map(visit, names):
                done += 1
                self.options.progress("extracting", done, len(names))
                if low is not None:
                    found.factors[name.removesuffix(".weight")] = low
                if whole is not None:
                    found.whole[name] = whole
        return _with_head(_with_bias_owners(found, layout), layout)

    def _write(self, folder: Path, layout: Checkpoint, found: _Found) -> int:
        tensors = found.tensors()
        header, _ = encode_header([(name, "F32", v.shape) for name, v in tensors.items()])
        try:
            with (folder / ADAPTER_WEIGHTS).open("wb") as stream:
                stream.write(header)
                for values in tensors.values():
                    stream.write(np.ascontiguousarray(values, "<f4").data)
            config = adapter_settings(layout, found.factors, list(found.whole), str(self.base))
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise OutputError(f"{self.out}: cannot be written ({error.strerror}).") from None
        return (folder / ADAPTER_WEIGHTS).stat().st_size


def _matrices(layout: Checkpoint) -> list[str]:
    """Matrices of the layers: those are linear maps. Embedding and head lie outside."""
    return [
        name
        for name, tensor in sorted(layout.tensors.items())
        if tensor.floating and len(tensor.shape) == 2 and name.endswith(".weight")
        and layout.stack.block_of(name) is not None
    ]  # fmt: skip


def _with_bias_owners(found: _Found, layout: Checkpoint) -> _Found:
    """PEFT stores a bias with the update of its weight: one whose weight is equal gets a zero."""
    matrices = set(_matrices(layout))
    for name in found.whole:
        module = name.removesuffix(".bias")
        owned = name.endswith(".bias") and f"{module}.weight" in matrices
        if owned and module not in found.factors:
            shape = layout.tensors[f"{module}.weight"].shape
            found.factors[module] = truncated(np.zeros(shape, np.float32), 1, None)
    return found


def _with_head(found: _Found, layout: Checkpoint) -> _Found:
    """PEFT's copy of an embedding has no part in its head: a head that is tied is stored too."""
    if layout.head is None and layout.embedding in found.whole:
        found.whole[tied_head(layout.embedding)] = found.whole[layout.embedding]
    return found


def adapter_settings(
    layout: Checkpoint, factors: Mapping[str, LowRank], whole: list[str], base: str
) -> dict[str, Any]:
    """adapter_config.json. Every α is its rank, so that the update is b a itself."""
    ranks = {module: low.a.shape[0] for module, low in factors.items()}
    usual = max(ranks.values(), default=1)
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    biases = [n for n in whole if n.endswith(".bias") and n.removesuffix(".bias") in factors]
    modules = dict.fromkeys(n.rpartition(".")[0] for n in whole if n not in biases)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(factors, key=natural),
        "modules_to_save": sorted(modules, key=natural) or None,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": layout.config.get("model_type") in TURNED,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "ensure_weight_tying": layout.head is None,
        "inference_mode": True,
    }
