"""The repair's writing side: claim block by block, update, store (Algorithm 1, lines 10-18)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.companions import copy_companions, model_card
from sigmerge.checkpoints.folder import INDEX, Checkpoint
from sigmerge.checkpoints.pool import Pool
from sigmerge.checkpoints.source import PoolSource
from sigmerge.checkpoints.writer import Layout, Output
from sigmerge.commands.merge import hash_inputs, input_files
from sigmerge.commands.options import Meter, Options, versions
from sigmerge.commands.profile import block_sites
from sigmerge.engine.beside import beside
from sigmerge.engine.layer import LayerBlock, Piece
from sigmerge.engine.stream import ahead
from sigmerge.engine.workers import Workers
from sigmerge.files.digests import identity
from sigmerge.method.occupancy import Update, admission, claim
from sigmerge.operators.base import Site

Guard = Callable[[Path], dict[str, Any]]
"""Looks at a repaired folder and returns what it found: verdict, warning, what is kept."""


@dataclass(frozen=True)
class Round:
    """One round of claiming: who may claim how much of every layer, and in which order."""

    order: tuple[str, ...]
    quota: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RepairJob:
    """Everything that decides the bytes of a repair."""

    pool: Pool
    anchor: Checkpoint
    rounds: tuple[Round, ...]
    update: Update
    mask_seed: int | None
    layout: Layout

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self.pool.experts)

    @property
    def idle(self) -> bool:
        """Nobody may claim anything: the result is the anchor."""
        return not any(k for r in self.rounds for row in r.quota for k in row)

    def fingerprint(self) -> str:
        members = {**self.pool.members, "": self.anchor}
        inputs = {name: [identity(f) for f in member.files] for name, member in members.items()}
        content = [versions(), inputs, repr(self.rounds), repr(self.update), self.mask_seed,
                   [hashlib.sha256(h).hexdigest() for h in self.layout.headers]]  # fmt: skip
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def write_repair(
    job: RepairJob,
    plan: dict[str, Any],
    recipe: str,
    out: Path,
    options: Options,
    meter: Meter,
    guard: Guard | None = None,
) -> dict[str, Any]:
    """Write the repaired checkpoint with its records; returns what was done.

    `guard` sees the finished folder before it is published, and may have the anchor put back.
    """
    lenient = options.allow_nonfinite
    fingerprint = job.fingerprint() + (" unchecked" if lenient else "")
    with (
        Output(out, job.layout, fingerprint, overwrite=options.overwrite) as output,
        PoolSource(job.pool.members, allow_nonfinite=lenient) as source,
        PoolSource({"anchor": job.anchor}, allow_nonfinite=lenient) as anchor,
    ):
        resumed = sorted(output.done)
        members = {**job.pool.members, "anchor": job.anchor}
        with (
            Workers(options.threads) as workers,
            beside(partial(hash_inputs, members if recipe else {}, options)) as hashed,
        ):
            layers = _write_layers(job, source, anchor, workers, output, options)
            hashed()
        _copy_outside(job, anchor, output)
        plan |= _claimed(layers)
        copy_companions(output, Pool(job.anchor, {}), None, None)
        if guard is not None:
            found = guard(_readable(output))
            plan["guard"] = found
            if warning := found.get("warning"):
                plan["warnings"] = [*dict.fromkeys([*plan.get("warnings", []), warning])]
            if found.get("kept") == "anchor":
                _put_back(job, anchor, output)
        inputs = input_files(members, options) if recipe else []
        provenance = {
            "inputs": inputs,
            "versions": versions(),
            "device": "cpu",
            "engine": f"local, {options.threads} threads",
            "bytes_read": source.bytes_read + anchor.bytes_read,
            "bytes_written": job.layout.nbytes,
            "blocks_resumed": resumed,
            **meter.read(),
        }
        notes = [f"Repaired with sigmerge, variant {plan.get('variant', 'default')}."]
        output.text("README.md", model_card("SigMerge repair", job.pool, recipe, notes))
        output.text("sigmerge/recipe.yaml", recipe)
        output.text("sigmerge/plan.json", json.dumps(plan, indent=2) + "\n")
        output.text("sigmerge/provenance.json", json.dumps(provenance, indent=2) + "\n")
        output.publish()
    return {"out": str(output.final), "plan": plan, **provenance}


def _readable(output: Output) -> Path:
    """The unpublished folder, complete enough to be loaded and scored."""
    index = output.layout.index()
    if index is not None:
        output.text(INDEX, json.dumps(index, indent=2) + "\n")
    return output.partial


def _put_back(job: RepairJob, anchor: PoolSource, output: Output) -> None:
    for name, stored in job.anchor.tensors.items():
        output.write_bytes(name, anchor.reader.bytes(stored))


def _write_layers(
    job: RepairJob,
    source: PoolSource,
    anchor: PoolSource,
    workers: Workers,
    output: Output,
    options: Options,
) -> list[list[dict[str, Any]]]:
    """Claim and update block by block; per layer, per round what was claimed."""
    blocks = block_sites(job.pool)
    keys = [f"layer {index}" for index in range(len(blocks))]
    sizes = [sum(job.layout.slots[site.tensor].nbytes for site in sites) for sites in blocks]
    written = sum(size for key, size in zip(keys, sizes, strict=True) if key in output.done)

    def prefetch(index: int) -> None:
        names = [site.tensor for site in blocks[index]]
        source.prefetch(names)
        anchor.prefetch(names)

    todo = [index for index, key in enumerate(keys) if key not in output.done]

    def layer(index: int) -> list[dict[str, Any]]:
        return _write_layer(job, index, blocks[index], source, anchor, workers, output)

    records = workers.overlap(layer, ahead(todo, prefetch))
    for index, record in zip(todo, records, strict=True):
        output.finish(keys[index], record)
        written += sizes[index]
        options.progress("repairing", written, job.layout.nbytes)
    return [output.done[key] for key in keys]


def _write_layer(
    job: RepairJob,
    index: int,
    sites: Sequence[Site],
    source: PoolSource,
    anchor: PoolSource,
    workers: Workers,
    output: Output,
) -> list[dict[str, Any]]:
    block = LayerBlock(index, sites, job.domains, source, anchor)
    owner = None
    records = []
    for turn in job.rounds:
        order = [job.domains.index(domain) for domain in turn.order]
        claims = claim(block, order, turn.quota[index], owner=owner, mask_seed=job.mask_seed,
                       run=workers.map)  # fmt: skip
        owner = claims.owner
        records.append({"claimed": claims.claimed, "support": claims.support, "mass": claims.mass})
    assert owner is not None
    owners = [d for d in range(len(job.domains)) if any(r["claimed"][d] for r in records)]
    update = admission(block, owners, job.update)

    def write(piece: Piece) -> None:
        dtype = job.layout.slots[piece.tensor].dtype
        output.write(piece.tensor, piece.start, block.repaired(piece, update, owner, dtype))

    for _ in workers.map(write, block.pieces):
        pass
    return records


def _copy_outside(job: RepairJob, anchor: PoolSource, output: Output) -> None:
    """Everything the repair does not touch is the anchor's, byte for byte."""
    inside = {site.tensor for block in block_sites(job.pool) for site in block}
    for name, stored in job.anchor.tensors.items():
        if name not in inside:
            if stored.floating:
                anchor.check("anchor", name)
            output.write_bytes(name, anchor.reader.bytes(stored))


def _claimed(layers: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Claimed counts, support and admitted mass of all rounds together, layers × domains."""

    def total(key: str) -> list[list[Any]]:
        return [np.sum([turn[key] for turn in layer], axis=0).tolist() for layer in layers]

    return {"claimed": total("claimed"), "support": total("support"),
            "admitted_mass": total("mass")}  # fmt: skip
