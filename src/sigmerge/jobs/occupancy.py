"""Carries out the plan of a repair: reads a plan, writes a folder, decides nothing.

Claim block by block, update, store (Algorithm 1, lines 10-18).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.card import model_card
from sigmerge.checkpoints.companions import copy_companions
from sigmerge.checkpoints.folder import RECORDS_FOLDER, Checkpoint
from sigmerge.checkpoints.inputs import fingerprint, hashed_again
from sigmerge.checkpoints.lazy import FormedTensor
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.source import OpenMembers, PoolSource, read_ahead
from sigmerge.checkpoints.writer import Layout, Output, mirror_layout
from sigmerge.core import claim as compiled
from sigmerge.core.dtypes import is_finite
from sigmerge.engine.layer import LayerBlock, Piece
from sigmerge.engine.machine import INTERPRETER, Meter, versions
from sigmerge.engine.overlap import beside
from sigmerge.engine.sink import Sink
from sigmerge.engine.stream import ahead
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError
from sigmerge.files.opened import named_reads
from sigmerge.files.sources import code_digest
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import PoolInputs, block_sites
from sigmerge.jobs.steps import RepairStep
from sigmerge.jobs.work_folder import open_output
from sigmerge.method.deficit import best_scores
from sigmerge.method.occupancy import Update, admission, claim
from sigmerge.operators.base import Site
from sigmerge.records import (
    PLAN,
    PROVENANCE,
    RECIPE,
    GuardVerdict,
    InputFile,
    Provenance,
    RepairPlan,
    Round,
)
from sigmerge.results import Merged

if TYPE_CHECKING:
    from sigmerge.core import Array
    from sigmerge.engine.cluster import Cluster
    from sigmerge.engine.gpu import Gpu

SMALL, SMALL_FOR_MANY = 48 << 20, 56 << 20
"""Coordinates of a block up to which several are repaired at a time, so that one fills the threads
that the end of a pass over the other leaves idle. Larger blocks have long passes, and take
memory."""
FEW_THREADS = 4
"""Threads for which two blocks are enough. Of more, each so many have a block of their own."""
MOST_BLOCKS = 8
"""Maximum number of blocks that are repaired at a time."""
WRITERS = 6
"""Threads that write a block at a time. It lies in one file, which takes one write at a time: more
threads wait for one another, and have other blocks to claim meanwhile."""
OUTSIDE_LAYERS = "outside"
"""The tensors that lie in no layer, as one block."""
COPIED = 1 << 22
"""Coordinates of what is only copied that one worker takes at a time."""
Guard = Callable[[Path], GuardVerdict]
"""Called with a repaired folder before it is published; decides whether the repair is kept."""


@dataclass(frozen=True)
class OccupancyJob:
    """Everything that decides the bytes of a repair."""

    pool: PoolMembers
    anchor: Checkpoint
    rounds: tuple[Round, ...]
    update: Update
    mask_seed: int | None
    layout: Layout

    @classmethod
    def of(cls, plan: RepairPlan, pool: PoolMembers, anchor: Checkpoint) -> OccupancyJob:
        drop = {} if plan.drop is None else {"drop": plan.drop}
        update = Update(plan.scale, plan.update, seed=plan.seed, **drop)
        mask_seed = plan.seed if plan.selection == "random" else None
        unknown = {domain for turn in plan.rounds for domain in turn.order} - set(pool.experts)
        if unknown:
            raise PoolError(
                f"The plan claims for {', '.join(sorted(unknown))}, which is no expert."
            )
        return cls(pool, anchor, plan.rounds, update, mask_seed, mirror_layout(anchor))

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self.pool.experts)

    def fingerprint(self, options: Options) -> str:
        """Identifies the job: equal for runs that end in the same files.

        A run that checks for NaN does not resume blocks that were finished without the check.
        """
        rounds = [[turn.order, turn.quota] for turn in self.rounds]
        content = [
            code_digest(run_occupancy),
            versions(),
            options.allow_nonfinite,
            fingerprint({**self.pool.members, "": self.anchor}),
            rounds,
            repr(self.update),
            self.mask_seed,
            [hashlib.sha256(header).hexdigest() for header in self.layout.headers],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _together(coordinates: int, threads: int) -> int:
    """How many blocks of at most so many coordinates are repaired at a time."""
    if threads <= FEW_THREADS:
        return 2 if coordinates <= SMALL else 1
    return min(max(threads // FEW_THREADS, 3), MOST_BLOCKS) if coordinates <= SMALL_FOR_MANY else 1


def describe_occupancy(pool: PoolMembers, threads: int) -> RepairStep:
    """The writing of a repair as a step of a dry run."""
    blocks = block_sites(pool)
    largest = max(sum(pool.layout.tensors[s.tensor].nbytes for s in block) for block in blocks)
    members = len(pool.experts) + 2
    coordinates = max(sum(site.size for site in block) for block in blocks)
    together = _together(coordinates, threads)
    formed = max(4 * sum(_formed(pool, site.tensor) for site in block) for block in blocks)
    return RepairStep(
        layers=pool.stack.depth,
        experts={name: member.place for name, member in pool.experts.items()},
        coordinates=sum(site.size for block in blocks for site in block),
        bytes_to_read=sum(m.nbytes for m in pool.members.values()) + pool.layout.nbytes,
        bytes_to_write=pool.layout.nbytes,
        peak_memory_bytes=INTERPRETER
        + read_ahead(pool.members.values())
        + together * (largest * members + coordinates + formed),
        notes=hashed_again(pool.members.values()),
    )


def _formed(pool: PoolMembers, tensor: str) -> int:
    """Coordinates of lazy tensors of all experts, which are held in float32."""
    found = [member.tensors[tensor] for member in pool.members.values()]
    return sum(one.size for one in found if isinstance(one, FormedTensor))


def run_occupancy(
    plan: RepairPlan,
    pool: PoolMembers,
    anchor: Checkpoint,
    recipe: str,
    out: Path,
    options: Options,
    meter: Meter,
    guard: Guard | None = None,
) -> Merged:
    """Write the repaired checkpoint with its records.

    `guard` is called with the finished folder before it is published; it may restore the anchor.
    """
    job, engine = OccupancyJob.of(plan, pool, anchor), options.engine_name
    inputs = PoolInputs.of({**pool.members, "anchor": anchor})
    with (
        open_output(out, job.layout, job.fingerprint(options), options) as output,
        _sources(job, options) as sources,
    ):
        resumed = sorted(output.done)
        with beside(partial(inputs.hash, options)) as hashed:
            claims = _write(job, sources, output, options)
            output.seal()
            hashed()
        plan = plan.model_copy(update=claims)
        if guard is not None:
            plan = _guarded(plan, guard(_readable(output)), job, sources[1], output)
        card = model_card("SigMerge repair", pool, recipe, plan.warnings, _scored(plan))
        output.text("README.md", card)
        output.text(f"{RECORDS_FOLDER}/{RECIPE}", recipe)
        output.json(f"{RECORDS_FOLDER}/{PLAN}", plan.as_json())
        provenance = Provenance(
            inputs=_lasting(inputs.digested(options), plan),
            outputs=output.digests,
            versions=versions(),
            engine=engine,
            bytes_read=sum(source.bytes_read for source in sources),
            bytes_written=job.layout.nbytes,
            blocks_resumed=tuple(resumed),
            warnings=plan.warnings,
            wall_seconds=meter.wall_seconds,
            peak_memory_bytes=meter.peak_memory_bytes,
        )
        output.json(f"{RECORDS_FOLDER}/{PROVENANCE}", provenance.as_file())
        output.publish()
    return Merged(out=output.name, plan=plan, provenance=provenance)


def _scored(plan: RepairPlan) -> list[str]:
    """What a card says of a repair: its shares, and the scores before and after where known."""
    lines = [f"Repaired with sigmerge, variant {plan.variant}."]
    if plan.scores is None:
        return lines
    best = best_scores(plan.scores.experts)
    after = plan.guard.scores if plan.guard else None
    columns = [best, plan.scores.anchor, *([after] if after else [])]
    heads = ["domain", "best expert", "merge", *(["repaired"] if after else []), "share"]
    lines += ["", "Scores on the calibration items, which decided the repair, in percent:", ""]
    lines += [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for domain in plan.domains:
        cells = [f"{100 * scores[domain]:.2f}" for scores in columns]
        lines.append(f"| {domain} | {' | '.join(cells)} | {plan.share[domain]:.3f} |")
    return lines


def _lasting(inputs: tuple[InputFile, ...], plan: RepairPlan) -> tuple[InputFile, ...]:
    """The inputs that remain afterwards: without an anchor that is removed."""
    return tuple(one for one in inputs if one.member != "anchor" or plan.anchor.path is not None)


def write_candidate(job: OccupancyJob, folder: Path, options: Options) -> None:
    """Write a repaired checkpoint that is only measured: weights and companions, no records."""
    with (
        open_output(folder, job.layout, job.fingerprint(options), options) as output,
        _sources(job, options) as sources,
    ):
        _write(job, sources, output, options)
        output.publish()


def claim_into(job: OccupancyJob, sink: Sink, options: Options) -> None:
    """The weights of a repaired checkpoint that is not stored."""
    with _sources(job, options) as (source, anchor), Workers(options.workers) as workers:
        write_blocks(job, source, anchor, workers, sink, options)


@contextmanager
def _sources(job: OccupancyJob, options: Options) -> Iterator[tuple[PoolSource, PoolSource]]:
    """The pool's values, and the anchor's."""
    lenient = options.allow_nonfinite
    with (
        PoolSource(job.pool.members, allow_nonfinite=lenient) as source,
        PoolSource({"anchor": job.anchor}, allow_nonfinite=lenient) as anchor,
    ):
        yield source, anchor


def _write(
    job: OccupancyJob, sources: tuple[PoolSource, PoolSource], output: Output, options: Options
) -> dict[str, Any]:
    """All weights and companions; returns what was claimed."""
    source, anchor = sources
    with Workers(options.workers) as workers:
        layers = write_blocks(job, source, anchor, workers, output, options)
    copy_companions(output, PoolMembers(job.anchor, {}), None, None)
    return claimed_in(layers)


def _guarded(
    plan: RepairPlan, verdict: GuardVerdict, job: OccupancyJob, anchor: PoolSource, output: Output
) -> RepairPlan:
    """The plan with the guard's verdict, which may put the anchor's weights back."""
    warnings = plan.warnings
    if verdict.warning is not None:
        warnings = tuple(dict.fromkeys([*warnings, verdict.warning]))
    if verdict.kept == "anchor":
        for name, stored in job.anchor.tensors.items():
            if not stored.floating or not stored.size:
                output.write_bytes(name, anchor.reader.bytes(stored))
                continue
            for start in range(0, stored.size, COPIED):
                stop = min(start + COPIED, stored.size)
                output.write(name, start, anchor.reader.raw(stored, start, stop))
    return plan.model_copy(update={"guard": verdict, "warnings": warnings})


def _readable(output: Output) -> Path:
    """The unpublished folder, complete enough to be loaded and scored."""
    for name, index in output.layout.indexes().items():
        output.json(name, index)
    return output.partial


def write_blocks(
    job: OccupancyJob,
    source: PoolSource,
    anchor: PoolSource,
    workers: Workers,
    output: Sink,
    options: Options,
) -> list[list[dict[str, Any]]]:
    """All weights; per layer, per round what was claimed.

    What lies outside the layers is copied beside them, since a layer leaves threads idle now and
    then; after them, where files are best read in order, and where a cluster makes the layers: who
    waits for its tasks stays in the calling thread, which an interruption reaches.
    """
    works: list[Callable[[], Any]] = [
        partial(_write_layers, job, source, anchor, workers, output, options),
        partial(_copy_outside, job, anchor, workers, output),
    ]
    in_turn = source.in_order or anchor.in_order or options.cluster is not None
    layers, _ = workers.overlap(lambda work: work(), works, most=1 if in_turn else 2)
    return layers


def _write_layers(
    job: OccupancyJob,
    source: PoolSource,
    anchor: PoolSource,
    workers: Workers,
    output: Sink,
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

    left = [index for index, key in enumerate(keys) if key not in output.done]
    todo = job.layout.in_turn(
        left,
        lambda index: [site.tensor for site in blocks[index]],
        in_order=source.in_order or anchor.in_order,
    )

    cluster = options.cluster
    # What is not finite has no order but that of its bits, which a GPU need not keep.
    gpu = None if options.allow_nonfinite or cluster else options.gpu()

    largest = max(sum(site.size for site in sites) for sites in blocks)
    members = max(sizes) * (len(job.pool.experts) + 2)
    most = gpu.blocks(members) if gpu else _together(largest, workers.threads)

    def layer(index: int) -> list[dict[str, Any]]:
        loops = gpu.claims(workers.map, most) if gpu else compiled
        return _write_layer(job, index, blocks[index], source, anchor, workers, output, loops)

    if cluster is not None:
        records = _layers_on(cluster, job, todo, source, output, options)
    else:
        records = workers.overlap(layer, ahead(todo, prefetch), most=most)
    for index, record in zip(todo, records, strict=True):
        output.finish(keys[index], record, [site.tensor for site in blocks[index]])
        written += sizes[index]
        options.progress("repairing", written, sum(sizes))
    return [output.done[key] for key in keys]


def _layers_on(
    cluster: Cluster,
    job: OccupancyJob,
    todo: Sequence[int],
    source: PoolSource,
    output: Sink,
    options: Options,
) -> Iterator[list[dict[str, Any]]]:
    """Layers as tasks of a cluster; what they return is written here."""
    lenient = options.allow_nonfinite
    open_gpu = None if lenient else options.open_gpu
    members = OpenMembers.of(job.pool.members, allow_nonfinite=lenient)
    anchor = OpenMembers.of({"anchor": job.anchor}, allow_nonfinite=lenient)
    layer = partial(_layer_elsewhere, job, members, anchor, cluster.threads, open_gpu)
    memory = describe_occupancy(job.pool, cluster.threads).peak_memory_bytes
    done = cluster.map(layer, todo, lambda index: f"repair: layer {index}", memory=memory)
    for record, pieces, read in done:
        for piece in pieces:
            output.write(*piece)
        source.read_elsewhere(read)
        yield record


def _layer_elsewhere(
    job: OccupancyJob,
    members: OpenMembers,
    anchor: OpenMembers,
    threads: int,
    open_gpu: Callable[[], Gpu] | None,
    index: int,
) -> tuple[list[dict[str, Any]], list[tuple[str, int, Array]], int]:
    """One layer in a task: what was claimed, its values, and the bytes read for them."""
    from sigmerge.engine.cluster import Pieces

    pieces, sites = Pieces(), block_sites(job.pool)[index]
    with members() as source, anchor() as start, Workers(threads) as workers:
        loops = open_gpu().claims(workers.map) if open_gpu else compiled
        record = _write_layer(job, index, sites, source, start, workers, pieces, loops)
        return record, pieces.written, source.bytes_read + start.bytes_read


@named_reads()
def _write_layer(
    job: OccupancyJob,
    index: int,
    sites: Sequence[Site],
    source: PoolSource,
    anchor: PoolSource,
    workers: Workers,
    output: Sink,
    loops: Any = compiled,
) -> list[dict[str, Any]]:
    """Claim and update one layer in all rounds; returns the claims of each round."""
    names = [site.tensor for site in sites]
    for one in (source, anchor):
        one.hold(names, workers.map)
    block = LayerBlock(index, sites, job.domains, source, anchor, loops)
    if loops is not compiled:
        claiming = {d for turn in job.rounds for d, quota in enumerate(turn.quota[index]) if quota}
        rows = [*sorted(claiming), *([-2] if claiming else []), -1]
        loops.bring(block.all_sources[rows], block.edges)
    owner = None
    records = []
    for turn in job.rounds:
        order = [job.domains.index(domain) for domain in turn.order]
        claims = claim(block, order, turn.quota[index], owner=owner, mask_seed=job.mask_seed,
                       run=workers.map if loops is compiled else map, loops=loops)  # fmt: skip
        owner = claims.owner
        records.append({"claimed": claims.claimed, "support": claims.support, "mass": claims.mass})
    assert owner is not None
    owners = [d for d in range(len(job.domains)) if any(r["claimed"][d] for r in records)]
    update = admission(block, owners, job.update)

    def write(piece: Piece) -> None:
        dtype = job.layout.slots[piece.tensor].dtype
        if isinstance(output, Output) and block.wrote(piece, update, owner, dtype, output):
            return
        values = block.repaired(piece, update, owner, dtype)
        output.write(piece.tensor, piece.start, values)

    # A device's pieces are long and few: all threads take them.
    most = WRITERS if loops is compiled else None
    for _ in workers.map(write, block.pieces, most=most):
        pass
    for one in (source, anchor):
        one.let_go(names)
    return records


def _copy_outside(job: OccupancyJob, anchor: PoolSource, workers: Workers, output: Sink) -> None:
    """Copy everything outside the layers from the anchor, byte for byte."""
    if OUTSIDE_LAYERS in output.done:
        return
    inside = {site.tensor for block in block_sites(job.pool) for site in block}
    outside = {name: t for name, t in job.anchor.tensors.items() if name not in inside}
    pieces: list[tuple[str, int, int]] = []
    for name, stored in outside.items():
        if not stored.floating or not stored.size:
            output.write_bytes(name, anchor.reader.bytes(stored))
            continue
        anchor.prefetch([name])
        starts = range(0, stored.size, COPIED)
        pieces += [(name, start, min(start + COPIED, stored.size)) for start in starts]

    def copy(piece: tuple[str, int, int]) -> None:
        name, start, stop = piece
        with named_reads():
            raw = anchor.piece("anchor", name, start, stop).array()
        if not is_finite(raw):
            anchor.not_finite(["anchor"], name, start, stop)
        output.write(name, start, raw)
        anchor.done(name, start, stop)

    for _ in workers.map(copy, pieces, most=WRITERS):
        pass
    output.finish(OUTSIDE_LAYERS, tensors=outside)


def claimed_in(layers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Claimed counts, support and admitted mass of all rounds together, layers × domains."""

    def total(key: str) -> tuple[tuple[Any, ...], ...]:
        sums = [np.sum([turn[key] for turn in layer], axis=0).tolist() for layer in layers]
        return tuple(map(tuple, sums))

    return {
        "claimed": total("claimed"),
        "support": total("support"),
        "admitted_mass": total("mass"),
    }
