"""`output: adapter`: LoRA adapters of one model become one, by any method, and no matrix is formed.

The method merges the adapters' coordinates in common bases (checkpoints/low_rank_space.py) as it
merges weights, block by block; each block of the result is then written as factors. What adapters
store whole (modules_to_save, biases) is merged as in any merge.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.adapter_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, split_adapter
from sigmerge.checkpoints.adapters import AdaptedTensor, are_equal, module_of_factor
from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.card import model_card
from sigmerge.checkpoints.folder import RECORDS_FOLDER, Checkpoint, on_hub, open_checkpoint
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.layers import Layer
from sigmerge.checkpoints.lazy import FormedTensor, stored_pieces
from sigmerge.checkpoints.low_rank_space import (
    MATRICES_HELD,
    CoordinateTensor,
    ScaledFactors,
    SharedMatrix,
    ZeroTensor,
    let_go,
    placed,
)
from sigmerge.checkpoints.peft_settings import (
    STORED_PREFIX,
    bias_name,
    factor_names,
    peft_settings,
)
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.source import FormedValues, PoolSource
from sigmerge.checkpoints.writer import Layout, plan_layout
from sigmerge.core import Array
from sigmerge.engine.machine import Meter, versions
from sigmerge.engine.overlap import beside
from sigmerge.engine.sink import Sink
from sigmerge.engine.stream import rounded
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.objects import address
from sigmerge.files.sources import code_digest
from sigmerge.jobs.dense import DenseJob, merge_blocks, merge_plan
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import PoolInputs, idle_settings, lacking, merged_sites, open_merge_pool
from sigmerge.jobs.steps import MergeStep
from sigmerge.jobs.work_folder import open_output
from sigmerge.messages import counted
from sigmerge.operators.base import Site
from sigmerge.probing.layers import model_layers
from sigmerge.recipe import Recipe
from sigmerge.recipe.record import AdapterRequest
from sigmerge.records import PLAN, PROVENANCE, RECIPE, Provenance
from sigmerge.results import Merged

PAPERS = {
    "core": "Panariello et al., Accurate and efficient low-rank model merging in core space, "
            "NeurIPS 2025 (arXiv:2509.17786)",
    "knots": "Stoica et al., Model merging with SVD to tie the KnOTS, ICLR 2025 (arXiv:2410.19735)",
}  # fmt: skip
_BLOCKS_HELD = 2
"""Whose coordinates lie in memory at a time."""


@dataclass(frozen=True)
class AdapterJob:
    """A merge of adapters that passed every check that headers allow.

    `dense` merges coordinates under the names of the matrices that they belong to, and whole
    tensors; `layout` is the file that is written.
    """

    dense: DenseJob
    request: AdapterRequest
    layout: Layout
    matrices: Mapping[str, SharedMatrix]
    whole: Mapping[str, tuple[str, ...]]
    """PEFT's names of every tensor that is stored whole."""
    settings: Mapping[str, Any]
    """adapter_config.json"""

    def written(self, name: str) -> tuple[str, ...]:
        """What is stored of a tensor of the model."""
        matrix = self.matrices.get(name)
        return self.whole[name] if matrix is None else factor_names(matrix.module, matrix.embedding)

    def fingerprint(self) -> str:
        headers = [hashlib.sha256(header).hexdigest() for header in self.layout.headers]
        asked = repr((self.request, self.settings))
        content = [self.dense.fingerprint(), code_digest(run_adapter), asked, *headers]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def peak_memory(self, threads: int) -> int:
        """A bound on resident memory: it grows with the ranks, and not with the depth."""
        scratch = max((each.scratch for each in self.matrices.values()), default=0)
        experts = len(self.dense.pool.experts)
        blocks = (
            sum(4 * int(np.prod(self.matrices[n].shape)) for n in names if n in self.matrices)
            for _, names in self.dense.pool.blocks()
        )
        held = _BLOCKS_HELD * (experts + 2) * max(blocks, default=0)
        return self.dense.peak_memory(threads) + (threads + 1 + MATRICES_HELD) * scratch + held

    def describe(self, threads: int) -> MergeStep:
        """The merge as a step of a dry run."""
        pieces = {
            (part.file, part.begin): part.nbytes
            for member in self.dense.members.values()
            for tensor in member.tensors.values()
            for part, _, _ in stored_pieces(tensor, 0, tensor.size)
        }
        return replace(
            self.dense.describe(threads),
            tensors=len(self.layout.slots),
            files=self.layout.files,
            bytes_to_read=sum(pieces.values()),
            bytes_to_write=self.layout.nbytes,
            peak_memory_bytes=self.peak_memory(threads),
        )


def plan_adapter(recipe: Recipe, options: Options) -> AdapterJob:
    """Check the recipe against the adapters' headers. Reads no factor."""
    operator, request = recipe.operator, recipe.adapter
    assert operator is not None and request is not None
    if options.engine != "local":
        raise RecipeError("output: adapter: merges on this machine only; leave out --engine.")
    pool, outside = open_merge_pool(recipe, options)
    base = _base(recipe, pool, options)
    matrices, others = _shared(pool, base, request)
    saved, biases, whole = _stored_whole(pool.layout, others)
    sites = {
        name: site
        for name, site in merged_sites(recipe, pool, outside).items()
        if name in matrices or name in whole
    }
    sites = {n: _in_coordinates(s, matrices[n]) if n in matrices else s for n, s in sites.items()}
    matrices = {name: matrix for name, matrix in matrices.items() if name in sites}
    if not sites:
        raise PoolError("The adapters change no tensor that is merged; there is nothing to write.")
    if problems := lacking(operator, sites) or operator.check(list(sites.values())):
        raise RecipeError(f"{recipe.method}: the parameters do not fit:", problems)
    notes = (
        *idle_settings(recipe, pool, sites),
        *pool.notes,
        _told(request, matrices, operator.name),
    )
    recipe = replace(recipe, notes=(*recipe.notes, *notes))
    dtype = recipe.out_dtype or "F32"
    inner = [(n, "F32" if n in matrices else dtype, s.shape) for n, s in sorted(sites.items())]
    coordinates = _coordinate_pool(pool, matrices, list(sites))
    dense = DenseJob(recipe, operator, coordinates, sites, plan_layout(inner),
                     allow_nonfinite=options.allow_nonfinite)  # fmt: skip
    ranks = {m.module: m.written_rank(request.rank) for m in matrices.values()}
    specs = {own: sites[name].shape for name, names in whole.items() if name in sites
             for own in names}  # fmt: skip
    for matrix in matrices.values():
        a, b = factor_names(matrix.module, matrix.embedding)
        (outputs, inputs), rank = matrix.sides, ranks[matrix.module]
        specs |= {a: (rank, inputs), b: (outputs, rank)}
    planned = plan_layout([(n, dtype, specs[n]) for n in sorted(specs, key=natural)], 1 << 62)
    layout = replace(planned, files=(ADAPTER_WEIGHTS,), parts={})
    named = on_hub(base.path) or address(base.path)
    settings = peft_settings(pool.layout, named, ranks, saved, biases)
    return AdapterJob(dense, request, layout, matrices, whole, settings)


def _told(request: AdapterRequest, matrices: Mapping[str, SharedMatrix], method: str) -> str:
    ranks = {matrix.written_rank(request.rank) for matrix in matrices.values()} or {0}
    full = all(m.written_rank(request.rank) == min(m.rank, *m.shape) for m in matrices.values())
    kept = "" if full else ", the largest singular values of the result"
    return (f"{method} merges the adapters' coordinates in {request.space} space; the adapter has "
            f"rank {max(ranks)}{kept}")  # fmt: skip


def _base(recipe: Recipe, pool: PoolMembers, options: Options) -> Checkpoint:
    """The model that all adapters are of; a member that is no adapter is this model itself."""
    first = next(iter(pool.experts.values())).path
    base = pool.reference or open_checkpoint(first, allow_pickle=options.allow_pickle)
    problems = []
    if pool.reference is not None and pool.reference.adapter is not None:
        problems = [f"base_model: {pool.reference.place} is a model with an adapter; store it "
                    "first, by merge_method: passthrough"]  # fmt: skip
    for name, path in recipe.experts.items():
        model, adapter = split_adapter(path)
        if model.resolve() != base.path.resolve():
            told = "is no adapter" if adapter is None else f"is an adapter of {model}"
            problems.append(f"{name}: {told}, and the others are of {address(base.path)}")
        elif adapter is None and path != recipe.reference:
            problems.append(f"{name}: is no adapter; `sigmerge extract` makes one of a model")
    if problems:
        raise PoolError("output: adapter takes adapters of one model:", problems)
    return base


def _shared(
    pool: PoolMembers, base: Checkpoint, request: AdapterRequest
) -> tuple[dict[str, SharedMatrix], list[str]]:
    """Matrices that have updates only, and the names of what some adapter stores whole."""
    members, matrices, whole, problems = pool.experts, dict[str, SharedMatrix](), [], []
    for name in pool.names:
        tensors = [member.tensors[name] for member in members.values()]
        updates = [each if isinstance(each, AdaptedTensor) else None for each in tensors]
        problems += [f"{expert}: {name}: DoRA"
                     for expert, one in zip(members, updates, strict=True)
                     if one is not None and one.magnitude is not None]  # fmt: skip
        known = [one for one in updates if one is not None]
        untouched = _untouched(name, base)
        plain = [t for t, one in zip(tensors, updates, strict=True) if one is None]
        if any(not _same(each, untouched) for each in plain):
            whole.append(name)
        elif known:
            matrices[name] = SharedMatrix(
                module_of_factor(known[0].a.name),
                "lora_embedding" in known[0].a.name,
                tuple(
                    one if one is None else ScaledFactors(one.a, one.b, one.scale)
                    for one in updates
                ),
                request.space,
            )
    if problems:
        some = problems[:6] + ([f"and {len(problems) - 6} more"] if problems[6:] else [])
        raise PoolError(
            "output: adapter takes LoRA, whose update is s·BA. Convert other kinds with PEFT first "
            "(peft.save_as_lora(folder, model, rank=…), or merge_and_unload and `sigmerge "
            "extract`):",
            some,
        )
    return matrices, whole


def _untouched(name: str, base: Checkpoint) -> Tensor:
    """The model's own tensor; a head that is parted from the embedding begins as that."""
    return base.tensors.get(name) or base.tensors[str(base.embedding)]


def _same(one: Tensor, other: Tensor) -> bool:
    return not isinstance(one, FormedTensor) and are_equal(one, other)


def _stored_whole(
    layout: Checkpoint, names: Iterable[str]
) -> tuple[list[Layer], bool, dict[str, tuple[str, ...]]]:
    """The modules that are stored whole, whether biases are, and PEFT's names of all tensors."""
    wanted = list(names)
    if not wanted:
        return [], False, {}
    owners = {name: layer for layer in model_layers(layout) for name in layer.tensors}
    saved, stored, biases = dict[int, Layer](), dict[str, tuple[str, ...]](), False
    for name in wanted:
        layer = owners.get(name)
        if layer is None or not layer.fits:
            raise PoolError(f"{name}: PEFT has no place for it in an adapter; merge the adapters "
                            "into a model, without output: adapter.")  # fmt: skip
        if layer.linear and name != layer.weight:
            stored[name], biases = (bias_name(layer.module),), True
            continue
        saved[id(layer)] = layer
    for layer in saved.values():
        for name, theirs in layer.tensors.items():
            stored[name] = tuple(STORED_PREFIX + each for each in theirs)
    return list(saved.values()), biases, stored


def _in_coordinates(site: Site, matrix: SharedMatrix) -> Site:
    return replace(site, size=int(np.prod(matrix.shape)), shape=matrix.shape)


def _coordinate_pool(
    pool: PoolMembers, matrices: Mapping[str, SharedMatrix], names: list[str]
) -> PoolMembers:
    """Members whose matrices are coordinates; the reference has zeros.

    Of files only those are inputs that are read: most adapters need no weight of their model.
    """

    def moved(member: Checkpoint, form: Callable[[Tensor, SharedMatrix], Tensor]) -> Checkpoint:
        tensors = {n: form(member.tensors[n], matrices[n]) if n in matrices else member.tensors[n]
                   for n in names}  # fmt: skip
        read = {part.file for tensor in tensors.values()
                for part, _, _ in stored_pieces(tensor, 0, tensor.size)}  # fmt: skip
        own = set() if member.adapter is None else {member.adapter / ADAPTER_CONFIG}
        files = tuple(file for file in member.files if file in read or file in own)
        return member.with_tensors(tensors, files)

    def zero(stored: Tensor, matrix: SharedMatrix) -> Tensor:
        return ZeroTensor(**placed(stored, matrix.shape))

    def own(place: int, stored: Tensor, matrix: SharedMatrix) -> Tensor:
        return CoordinateTensor(**placed(stored, matrix.shape), matrix=matrix, place=place)

    experts = {
        name: moved(member, partial(own, place))
        for place, (name, member) in enumerate(pool.experts.items())
    }
    reference = pool.reference and moved(pool.reference, zero)
    return replace(pool, reference=reference, experts=experts, output=None)


class _AsFactors:
    """A sink that writes merged coordinates as factors, and whole tensors as they come."""

    def __init__(self, job: AdapterJob, sink: Sink, values: FormedValues) -> None:
        self.done = sink.done
        self._job, self._sink, self._values = job, sink, values
        self._held: dict[str, Array] = {}
        self._lock = threading.Lock()

    def write(self, tensor: str, start: int, raw: Array) -> None:
        matrix = self._job.matrices.get(tensor)
        if matrix is None:
            for name in self._job.whole[tensor]:
                self._sink.write(name, start, raw)
            return
        with self._lock:
            if tensor not in self._held:
                self._held[tensor] = np.empty(int(np.prod(matrix.shape)), np.float32)
            room = self._held[tensor]
        room[start : start + raw.size] = raw.view(np.float32)

    def write_bytes(self, tensor: str, data: memoryview) -> None:
        for name in self._job.written(tensor):
            self._sink.write_bytes(name, data)

    def finish(self, block: str, record: Any = None, tensors: Iterable[str] | None = None) -> None:
        own = list(tensors or ())
        for name in own:
            if name in self._job.matrices:
                self._write_factors(name)
        self._sink.finish(block, record, [each for name in own for each in self._job.written(name)])

    def _write_factors(self, name: str) -> None:
        job, matrix = self._job, self._job.matrices[name]
        merged = self._held.pop(name).reshape(matrix.shape)
        b, a = matrix.factored(merged, job.request.rank, self._values)
        for stored, factor in zip(job.written(name), (a, b), strict=True):
            flat = np.ascontiguousarray(factor, np.float32).reshape(-1)
            dtype = job.layout.slots[stored].dtype
            self._sink.write(stored, 0, rounded(stored, 0, flat, dtype, job.dense.allow_nonfinite))


def merge_factors(job: AdapterJob, sink: Sink, options: Options) -> int:
    """Merge the blocks that the sink does not have yet; the bytes that were read."""
    with ExitStack() as stack:
        stack.callback(let_go)
        reader = stack.enter_context(Reader())
        source = stack.enter_context(
            PoolSource(job.dense.members, allow_nonfinite=job.dense.allow_nonfinite)
        )
        workers = stack.enter_context(Workers(options.workers))
        merge_blocks(
            job.dense, source, workers, _AsFactors(job, sink, FormedValues(reader)), options
        )
        return source.bytes_read


def run_adapter(job: AdapterJob, out: Path, options: Options) -> Merged:
    """Merge into a new folder that PEFT loads, with its records."""
    meter, recipe, pool = Meter(), job.dense.recipe, job.dense.pool
    inputs = PoolInputs.of(pool.members)
    with open_output(out, job.layout, job.fingerprint(), options) as output:
        resumed = sorted(output.done)
        with beside(partial(inputs.hash, options)) as hashed:
            read = merge_factors(job, output, options)
            output.seal()
            hashed()
        output.json(ADAPTER_CONFIG, dict(job.settings))
        title = f"{job.dense.operator.title} of {counted(len(pool.experts), 'adapter')}"
        about = [f"Method: {job.dense.operator.paper}", f"Space: {PAPERS[job.request.space]}"]
        card = model_card(title, pool, recipe.text, recipe.notes, about, library="peft")
        output.text("README.md", card)
        output.text(f"{RECORDS_FOLDER}/{RECIPE}", recipe.text)
        digests = inputs.digested(options)
        plan = merge_plan(job.dense, output.done, options)
        output.json(f"{RECORDS_FOLDER}/{PLAN}", plan.as_json())
        provenance = Provenance(
            inputs=digests,
            outputs=output.digests,
            versions=versions(),
            job=job.fingerprint(),
            engine=options.engine_name,
            bytes_read=read,
            bytes_written=job.layout.nbytes,
            blocks_resumed=tuple(resumed),
            warnings=recipe.notes,
            wall_seconds=meter.wall_seconds,
            peak_memory_bytes=meter.peak_memory_bytes,
        )
        output.json(f"{RECORDS_FOLDER}/{PROVENANCE}", provenance.as_file())
        output.publish()
    return Merged(out=output.name, plan=plan, provenance=provenance)
