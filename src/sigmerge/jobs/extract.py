"""`sigmerge extract`: the difference of a model and its base as a LoRA adapter in PEFT's format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sigmerge.checkpoints.adapter_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, split_adapter
from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.computed import disagreements
from sigmerge.checkpoints.folder import (
    SHOWN,
    Checkpoint,
    is_embedding,
    is_head,
    open_checkpoint,
)
from sigmerge.checkpoints.header import encode_header
from sigmerge.checkpoints.inputs import hashed_again
from sigmerge.checkpoints.layers import Layer
from sigmerge.checkpoints.peft_settings import (
    STORED_PREFIX,
    bias_name,
    factor_names,
    peft_settings,
)
from sigmerge.checkpoints.pool import PoolMembers, differences, together
from sigmerge.checkpoints.publishing import (
    ResultKind,
    check_space,
    check_target,
    only_target,
    publish,
    real_target,
    writing,
)
from sigmerge.checkpoints.source import PoolSource
from sigmerge.core import Array
from sigmerge.engine.machine import INTERPRETER
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.digests import prove
from sigmerge.files.identity import identify, unchanged
from sigmerge.files.safe_open import remove
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import say_before
from sigmerge.jobs.steps import Description, ExtractStep
from sigmerge.jobs.work_folder import hidden
from sigmerge.method.low_rank import LowRank, truncated
from sigmerge.probing.layers import model_layers
from sigmerge.results import Extracted

_ADAPTER: ResultKind = "an adapter"


@dataclass
class _Found:
    """The parts of the adapter, by the model's names; and what no adapter can hold."""

    factors: dict[str, LowRank] = field(default_factory=dict)
    biases: dict[str, Array] = field(default_factory=dict)
    saved: dict[str, Layer] = field(default_factory=dict)
    whole: dict[str, Array] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def tensors(self) -> dict[str, Array]:
        named = {STORED_PREFIX + name: values for name, values in self.whole.items()}
        for name, values in self.biases.items():
            named[bias_name(name.removesuffix(".bias"))] = values
        for module, low in self.factors.items():
            named |= zip(factor_names(module), (low.a, low.b), strict=True)
        return {name: named[name] for name in sorted(named, key=natural)}


@dataclass(frozen=True)
class Wanted:
    """Which modules go into an adapter, by their names, and how.

    Regular expressions are searched in names. Modules named in `save`, by their whole name or its
    last part, are stored whole; those that fit no update are too, unless `skip_others`. Singular
    values up to `least` are left out.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    least: float = 0.0
    skip_others: bool = False

    def check(self) -> None:
        for pattern in (*self.include, *self.exclude):
            try:
                re.compile(pattern)
            except re.error as error:
                raise RecipeError(f"{pattern!r}: is no regular expression ({error}).") from None
        if self.least < 0:
            raise RecipeError(f"singular values are 0 or more, not {self.least:g}.")

    def whole(self, layer: Layer) -> bool:
        return any(name in self.save or name.rpartition(".")[2] in self.save
                   for name in layer.modules)  # fmt: skip

    def takes(self, layer: Layer) -> bool:
        """Embeddings and heads are asked for by no pattern, and kept out by one."""
        if self.whole(layer):
            return True
        if any(re.search(p, name) for p in self.exclude for name in layer.modules):
            return False
        ends = any(is_embedding(name) or is_head(name) for name in layer.tensors)
        if not layer.linear and self.skip_others and not ends:
            return False
        asked = any(re.search(p, name) for p in self.include for name in layer.modules)
        return asked or ends or not self.include


_Visited = tuple[Layer, LowRank | None, dict[str, Array]]
"""A layer with its update, and its tensors that are stored whole."""


@dataclass(frozen=True)
class ExtractJob:
    """The difference of a model and its base: matrices of linear layers by truncated SVD.

    Other modules that differ (embeddings, head, norms, routers) and biases are stored whole. What
    PEFT loads neither as an update nor as a module of its own is left out and reported.
    """

    model: Path
    base: Path
    out: Path
    options: Options
    rank: int | None = None
    energy: float | None = None
    wanted: Wanted = Wanted()

    @property
    def _most(self) -> int | None:
        """The maximum rank: the given one, else 16 unless `energy` decides it."""
        return 16 if self.rank is None and self.energy is None else self.rank

    def check(self) -> PoolMembers:
        if self.rank is not None and self.rank < 1:
            raise RecipeError(f"--rank: must be 1 or more, not {self.rank}.")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise RecipeError(f"--energy: must lie between 0 and 1, not {self.energy:g}.")
        self.wanted.check()
        inputs = [f for path in (self.model, self.base) for f in split_adapter(path) if f]
        check_target(self.out, self.options.overwrite, inputs, _ADAPTER)
        opened = {
            name: open_checkpoint(path, allow_pickle=self.options.allow_pickle)
            for name, path in (("base", self.base), ("model", self.model))
        }
        if told := _apart(opened["base"], opened["model"]):
            raise PoolError(f"{self.model}: {told}")
        pool = together(opened["base"], {"model": opened["model"]})
        if problems := differences("model", pool.experts["model"], pool.layout, outside=True):
            raise PoolError("The model is not one of this base:", problems)
        found = disagreements({name: one.config for name, one in opened.items()}, "base")
        say_before(found, self.options)
        return replace(pool, disagreements=tuple(found))

    def describe(self) -> Description:
        pool = self.check()
        chosen = filter(self.wanted.takes, model_layers(pool.layout))
        matrices = [layer.weight for layer in chosen if layer.linear]
        targets = [pool.layout.tensors[name] for name in matrices]
        sides = [t.shape for t in targets]
        ranks = [min(self._most or math.inf, *shape) for shape in sides]
        largest = max((t.size for t in targets), default=0)
        factors = sum(int(r) * sum(shape) for r, shape in zip(ranks, sides, strict=True))
        step = ExtractStep(
            model=str(self.model),
            base=str(self.base),
            matrices=len(targets),
            bytes_to_read=sum(member.nbytes for member in pool.members.values()),
            bytes_to_write=4 * factors,
            peak_memory_bytes=INTERPRETER + 4 * factors + 32 * largest * self.options.threads,
            notes=hashed_again(pool.members.values()),
        )
        return Description((step,), self.options.threads)

    def run(self) -> Extracted:
        pool = self.check()
        before = identify(file for member in pool.members.values() for file in member.files)
        found = self._found(pool)
        unchanged(before)
        prove((one.file for one in before if not one.version), self.options.threads)
        tensors = found.tensors()
        if not tensors:
            why = (
                "what differs fits no adapter"
                if found.left_out
                else "every tensor equals the base's"
            )
            raise PoolError(f"{self.model}: {why}; nothing to extract.")
        out, options = real_target(self.out), self.options
        check_space(out, sum(values.nbytes for values in tensors.values()))
        partial = hidden(out, "partial")
        with only_target(out, options.overwrite, _ADAPTER):
            try:
                size = self._write(partial, pool.layout, found, tensors)
                publish(
                    partial, out, overwrite=options.overwrite, durable=options.durable,
                    kind=_ADAPTER,
                )  # fmt: skip
            finally:
                remove(partial, if_possible=True)
        kept = sum(low.kept for low in found.factors.values())
        total = sum(low.total for low in found.factors.values())
        return Extracted(
            out=str(out),
            modules=len(found.factors),
            rank=max((low.a.shape[0] for low in found.factors.values()), default=0),
            kept=kept / total if total else 1.0,
            whole=tuple(sorted((*found.whole, *found.biases), key=natural)),
            bytes_written=size,
            warnings=(*pool.disagreements, *_warnings(found.left_out)),
        )

    def _found(self, pool: PoolMembers) -> _Found:
        """Every layer that differs; matrices as factors."""
        found = _Found()
        layers = [each for each in model_layers(pool.layout) if self.wanted.takes(each)]

        with (
            PoolSource(pool.members, allow_nonfinite=self.options.allow_nonfinite) as source,
            Workers(self.options.threads) as workers,
        ):

            def visit(layer: Layer) -> _Visited:
                return self._visited(source, pool.layout, layer)

            for done, (layer, low, whole) in enumerate(workers.map(visit, layers), 1):
                self.options.progress("extracting", done, len(layers))
                if not layer.fits:
                    found.left_out += whole
                elif low is not None:
                    found.factors[layer.module] = low
                    found.biases |= {f"{layer.module}.bias": values for values in whole.values()}
                elif whole:
                    found.saved[layer.module] = layer
                    found.whole |= {n: v for own, v in whole.items() for n in layer.tensors[own]}
        return _with_targets(found, layers, pool.layout)

    def _visited(self, source: PoolSource, layout: Checkpoint, layer: Layer) -> _Visited:
        """A linear layer's update and bias, if they differ; all of another layer that differs."""
        own, base = (
            {name: _values(source, member, layout, name) for name in layer.tensors}
            for member in ("model", "reference")
        )
        for name, values in own.items():
            source.done(name, 0, values.size)
        changed = {n: v for n, v in own.items() if not np.array_equal(v, base[n])}
        if not changed or not layer.fits:
            return layer, None, changed
        if not layer.linear or self.wanted.whole(layer):
            return layer, None, own
        change = own[layer.weight] - base[layer.weight]
        change = change.T if layer.turned else change
        low = truncated(change, self._most, self.energy, self.wanted.least)
        changed.pop(layer.weight, None)
        return layer, low, changed

    def _write(
        self, folder: Path, layout: Checkpoint, found: _Found, tensors: Mapping[str, Array]
    ) -> int:
        header, _ = encode_header([(name, "F32", v.shape) for name, v in tensors.items()])
        with writing(folder):
            remove(folder)
            folder.mkdir()
            with (folder / ADAPTER_WEIGHTS).open("wb") as stream:
                stream.write(header)
                for values in tensors.values():
                    stream.write(np.ascontiguousarray(values, "<f4").data)
            ranks = {module: low.a.shape[0] for module, low in found.factors.items()}
            config = peft_settings(
                layout, str(self.base), ranks, found.saved.values(), bool(found.biases)
            )
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        return (folder / ADAPTER_WEIGHTS).stat().st_size


def _apart(base: Checkpoint, model: Checkpoint) -> str:
    """Why no adapter can turn the base into the model, and what to do; empty if one may."""
    if model.config.get("architectures") != base.config.get("architectures"):
        return ""
    if model.stack.depth != base.stack.depth:
        return (
            f"has {model.stack.depth} layers, and the base {base.stack.depth}; an adapter changes "
            "layers, and adds none. Give the model that it was tuned from as --base."
        )
    if base.embedding is None or model.embedding is None:
        return ""
    ours, theirs = (one.tensors[str(one.embedding)].shape[0] for one in (base, model))
    if ours == theirs:
        return ""
    return (
        f"has a vocabulary of {theirs} tokens, and the base {ours}; an adapter adds no rows. Give "
        "as --base what `sigmerge merge` makes of the base with merge_method: passthrough and "
        "tokenizer: {source: MODEL}, with pad_to_multiple_of: where the model's rows are padded."
    )


def _values(source: PoolSource, member: str, layout: Checkpoint, name: str) -> Array:
    values = np.empty(layout.tensors[name].shape, np.float32)
    source.fill(member, name, 0, values.reshape(-1))
    return values


def _with_targets(found: _Found, layers: list[Layer], layout: Checkpoint) -> _Found:
    """PEFT loads no adapter without an update, and joins experts only if all have the same rank."""
    linear = {layer.module: layer for layer in layers if layer.linear}
    even = [module for module, layer in linear.items() if layer.even]
    needed = even if any(module in found.factors for module in even) else []
    if found.whole and not found.factors:
        needed = [next(iter(linear))] if linear else []
    for module in needed:
        if module not in found.factors:
            shape = layout.tensors[linear[module].weight].shape
            zeros = np.zeros(shape[::-1] if linear[module].turned else shape, np.float32)
            found.factors[module] = truncated(zeros, 1, None)
    usual = max((low.a.shape[0] for low in found.factors.values()), default=1)
    for module in needed if even else ():
        found.factors[module] = _padded(found.factors[module], usual)
    return found


def _padded(low: LowRank, rank: int) -> LowRank:
    """The same product with factors of a larger rank."""
    more = rank - low.a.shape[0]
    a, b = np.pad(low.a, ((0, more), (0, 0))), np.pad(low.b, ((0, 0), (0, more)))
    return low._replace(a=a, b=b)


def _warnings(left_out: list[str]) -> tuple[str, ...]:
    if not left_out:
        return ()
    some = ", ".join(sorted(left_out, key=natural)[:SHOWN]) + (", …" if left_out[SHOWN:] else "")
    return (
        f"left out: {len(left_out)} tensors that differ from the base, as PEFT loads no update of "
        f"them ({some}). The adapter does not give this model without them.",
    )
