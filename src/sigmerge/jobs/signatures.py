"""Cached sums over the task vectors of each layer, from which the direction and sign views follow.

The pass reads every weight once, on threads, a GPU or a cluster; all of them give the same sums.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge.checkpoints.declared import weight_files
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.source import OpenMembers, PoolSource
from sigmerge.core.products import signature
from sigmerge.engine.machine import INTERPRETER
from sigmerge.engine.stream import CHUNK, Stream
from sigmerge.engine.workers import Workers
from sigmerge.files.documents import content_key
from sigmerge.kept import Derivation, Given, Inputs
from sigmerge.operators.base import Chunk, Pass, Passes, Site

if TYPE_CHECKING:
    from sigmerge.checkpoints.pool import PoolMembers
    from sigmerge.jobs.options import Options

# Only types are imported of the pool and of the options: their code does not decide the sums.


def signatures(pool: PoolMembers, blocks: list[list[Site]], options: Options) -> Derivation:
    """Per layer the products of the experts' task vectors, and how much their signs agree."""
    members = pool.members.values()
    return Derivation(
        "signatures",
        partial(_measured, pool.members, blocks, options),
        Inputs.of(**{str(number): weight_files(member) for number, member in enumerate(members)}),
        {
            "unchecked": options.allow_nonfinite,
            "layers": content_key([_made_of(block, list(members)) for block in blocks]),
            **({"matched": content_key([pool.matched])} if pool.matched else {}),
        },
        of=", ".join(expert.place for expert in pool.experts.values()),
        near=pool.layout.path,
    )


def _made_of(block: list[Site], members: list[Checkpoint]) -> list[list[list[str | int]]]:
    """The tensors of a layer in every member: the same files may be stacked in another way."""
    tensors = [[(member, member.tensors[site.tensor]) for member in members] for site in block]
    return [[[t.name, member.files.index(t.file)] for member, t in row] for row in tensors]


def _measured(
    members: dict[str, Checkpoint], blocks: list[list[Site]], options: Options, given: Given
) -> Any:
    given.allow(file for member in members.values() for file in member.files)
    experts, depth = len(blocks[0][0].experts), len(blocks)
    dots, mass = np.zeros((depth, experts, experts)), np.zeros((depth, 2))
    total, done = sum(site.size for block in blocks for site in block), 0

    def visit(chunk: Chunk) -> tuple[Site, int, Any, Any]:
        products, masses = chunk.sums(experts, experts), chunk.sums(2)
        chunk.read(signature, chunk.step, products, masses)
        return chunk.site, chunk.size, products.sums, masses.sums

    def fold(_: None, result: tuple[Site, int, Any, Any]) -> None:
        nonlocal done
        site, size, products, masses = result
        assert site.block is not None
        for part, sums in zip(products, masses, strict=True):
            dots[site.block] += part
            mass[site.block] += sums
        done += size
        options.progress("profiling weights", done, total)

    def passes() -> Passes:
        yield Pass(visit, fold)

    with (
        PoolSource(members, allow_nonfinite=options.allow_nonfinite) as source,
        Workers(options.threads) as workers,
    ):
        _stream(members, blocks, source, workers, options).survey(passes())
    return {"dots": dots.tolist(), "mass": mass.tolist()}


def _stream(
    members: dict[str, Checkpoint],
    blocks: list[list[Site]],
    source: PoolSource,
    workers: Workers,
    options: Options,
) -> Stream:
    """A stream over the blocks, on threads of this process or on a cluster."""
    if (cluster := options.cluster) is None:
        device = options.gpu()
        return Stream(blocks, source, workers, _granule, device=device, anywhere=lambda _: True)
    from sigmerge.engine.cluster import ClusterStream

    return ClusterStream(
        blocks,
        source,
        workers,
        _granule,
        cluster=cluster,
        open_source=OpenMembers.of(members, allow_nonfinite=options.allow_nonfinite),
        memory=INTERPRETER + cluster.threads * len(members) * 4 * CHUNK,
        open_device=options.open_gpu,
    )


def _granule(site: Site) -> int:
    return 4
