"""The dense merge: streamed from the experts' folders into a new folder."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmerge import kept
from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.blocks import natural, starred
from sigmerge.checkpoints.card import model_card
from sigmerge.checkpoints.companions import (
    check_tokenizer,
    copy_companions,
    merged_config,
    token_clashes,
)
from sigmerge.checkpoints.folder import RECORDS_FOLDER, Checkpoint
from sigmerge.checkpoints.inputs import fingerprint, hashed_again
from sigmerge.checkpoints.pool import PoolMembers, kept_numbers, twins
from sigmerge.checkpoints.source import OpenMembers, PoolSource, read_ahead
from sigmerge.checkpoints.writer import Layout, Output, plan_layout, plan_parts
from sigmerge.core import TILE
from sigmerge.core.dtypes import STORAGE, is_finite
from sigmerge.engine.machine import INTERPRETER, LIBRARIES, Meter, versions
from sigmerge.engine.overlap import beside
from sigmerge.engine.sink import Sink
from sigmerge.engine.stream import CHUNK, Stream, rounded
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.opened import named_reads
from sigmerge.files.sources import code_digest
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import (
    PoolInputs,
    check_loads,
    idle_settings,
    lacking,
    member,
    merged_sites,
    mixed_precision,
    open_merge_pool,
    other_inputs,
    planned_slices,
    written_dtypes,
)
from sigmerge.jobs.steps import MergeStep
from sigmerge.jobs.work_folder import open_output
from sigmerge.operators.base import Operator, Site
from sigmerge.operators.features import is_stack, matrix_of, reached
from sigmerge.recipe import Recipe
from sigmerge.recipe.record import MERGEKIT_CONFIG
from sigmerge.records import PLAN, PROVENANCE, RECIPE, MergePlan, Provenance
from sigmerge.results import Merged

if TYPE_CHECKING:
    from sigmerge.checkpoints.statistics import StatisticsFolders

SOLVED_THERE = (
    "matrices are solved on the GPU in float64; its weights may differ from the processor's by a "
    "millionth of the largest of their tensor"
)
"""The note of a merge that solves on a GPU; docs/results/gpu.md has the test."""
MERGED_HERE = "the GPU has no program for its formula: it may count and add, the processor merges"
"""The note of a merge whose operator has no GPU program."""


@dataclass(frozen=True)
class DenseJob:
    """A dense merge that passed every check that headers allow."""

    recipe: Recipe
    operator: Operator
    pool: PoolMembers
    sites: Mapping[str, Site]
    """Tensors that are merged; the others are copied from the layout's checkpoint."""
    layout: Layout
    exemplars: Mapping[str, int] = field(default_factory=dict)
    """How many each expert is shown, where the operator reads data."""
    to_capture: Mapping[str, int] = field(default_factory=dict)
    """Experts whose statistics are missing, each with a bound on the memory of its capture."""
    solved_on: str = "cpu"
    """The device on which operators solve; their last bits depend on it."""
    statistics_keys: Mapping[str, str] = field(default_factory=dict)
    """The cache key of each expert's statistics."""
    allow_nonfinite: bool = False
    statistics: StatisticsFolders | None = None
    """The captured statistics; set when the job runs."""

    @property
    def members(self) -> dict[str, Checkpoint]:
        """Checkpoints that are read tensor by tensor."""
        return self.pool.members if self.operator.needs_reference else dict(self.pool.experts)

    def fingerprint(self) -> str:
        """Identifies the job: equal for runs that end in the same files.

        A partial result is resumed, and a stored anchor is current, if this is equal. Statistics
        count by their keys, since they may not be loaded.
        """
        recipe = self.recipe
        sites = {n: replace(s, measured="", transposed=False) for n, s in self.sites.items()}
        content = [
            code_digest(run_dense),
            versions(),
            self.allow_nonfinite,
            recipe.method,
            self.operator.revision,
            recipe.preset,
            recipe.seed,
            str(recipe.tokenizer),
            *([repr(recipe.slices)] if recipe.slices else []),
            *([repr(recipe.vocabulary)] if recipe.vocabulary else []),
            *([recipe.architecture] if recipe.architecture else []),
            *([matched] if (matched := self.pool.matched) else []),
            repr(sites),
            dict(self.statistics_keys),
            *([self.solved_on] if self.solved_on != "cpu" else []),
            fingerprint(self.pool.members, other_inputs(recipe, False)),
            recipe.chat_template,
            [hashlib.sha256(header).hexdigest() for header in self.layout.headers],
            TILE,
            CHUNK,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def bytes_in(self) -> int:
        """Bytes that one pass over the merged tensors reads."""
        return sum(
            member.tensors[name].nbytes
            for member in self.members.values()
            for name in self.sites
            if name in member.tensors
        )

    def peak_memory(self, threads: int) -> int:
        """A bound on resident memory, which depends on experts and threads, not on the depth.

        Operators that solve hold a whole tensor of every expert, and intermediate matrices.
        """
        experts = len(self.pool.experts)
        scratch = (experts + 4) * TILE * 4
        window = (experts + 1) * CHUNK * 4
        counts = 3 * experts * 65536 * 8
        whole = max((self.operator.scratch(site) for site in self.sites.values()), default=0)
        merging = INTERPRETER + threads * (scratch + window + counts + whole)
        merging += read_ahead(self.members.values())
        if self.recipe.vocabulary and self.recipe.vocabulary.missing:
            from sigmerge.checkpoints.vocabularies import rows_memory

            merging += rows_memory(t for m in self.members.values() for t in m.tensors.values())
        if not self.to_capture:
            return merging
        # Captures come first, in this process; their libraries stay.
        return max(*self.to_capture.values(), merging + LIBRARIES - INTERPRETER)

    def describe(self, threads: int) -> MergeStep:
        """The merge as a step of a dry run."""
        pool = self.pool
        operations = float(sum(map(self.operator.operations, self.sites.values())))
        return MergeStep(
            operator=self.recipe.method,
            reference=pool.reference.place if pool.reference else None,
            experts={name: expert.place for name, expert in pool.experts.items()},
            layers=pool.stack.depth,
            tensors=len(self.layout.slots),
            merged_tensors=len(self.sites),
            coordinates=sum(site.size for site in self.sites.values()),
            settings=summary(self.sites),
            exemplars=dict(self.exemplars),
            to_capture=tuple(self.to_capture),
            files=tuple(self.layout.files),
            operations=operations,
            solved_on=self.solved_on if operations else "cpu",
            bytes_to_read=self.bytes_in(),
            bytes_to_write=self.layout.nbytes,
            peak_memory_bytes=self.peak_memory(threads),
            notes=(*self.recipe.notes, *hashed_again(pool.members.values())),
        )


def plan_dense(recipe: Recipe, options: Options) -> DenseJob:
    """Check the recipe against the checkpoints' headers. Reads no tensor."""
    operator = recipe.operator
    if operator is None:
        raise RecipeError(
            "merge_method: checkpoint has nothing to merge; add a repair: section, or use "
            "`sigmerge repair`."
        )
    if recipe.adapter is not None:
        raise RecipeError("output: adapter is made by `sigmerge merge`; leave it out here.")
    if recipe.search is not None:
        raise RecipeError("The recipe has a search: section: its coefficients are not known yet.")
    pool, outside = open_merge_pool(recipe, options)
    check_tokenizer(recipe.tokenizer or pool.layout.path)
    written = merged_config(pool.layout.config, pool.untied, None, recipe.architecture)
    doubts = check_loads(pool.layout, written, options)
    sites = merged_sites(recipe, pool, outside)
    problems = lacking(operator, sites) or operator.check(list(sites.values()))
    if problems:
        raise RecipeError(f"{recipe.method}: the parameters do not fit:", problems)
    dtypes = written_dtypes(recipe, pool)
    notes = (*idle_settings(recipe, pool, sites), *mixed_precision(recipe, pool, dtypes))
    notes = (*notes, *pool.notes, *doubts, *kept_numbers(pool), *twins(pool))
    if outside and recipe.vocabulary is None:
        notes += tuple(token_clashes({n: home_of(m.path) for n, m in pool.members.items()}))
    recipe = replace(recipe, notes=(*recipe.notes, *notes))
    tensors = [
        (name, dtypes[name], stored.shape)
        for name, stored in sorted(pool.layout.tensors.items(), key=lambda item: natural(item[0]))
    ]
    parts, most = pool.layout.parts, options.max_shard_bytes
    layout = plan_parts(tensors, parts, most) if parts else plan_layout(tensors, most)
    exemplars, to_capture, keys, solved_on = {}, {}, {}, "cpu"
    if operator.solves and options.device != "cpu":
        solved_on = options.device
        recipe = replace(recipe, notes=(*recipe.notes, f"{recipe.method}: {SOLVED_THERE}"))
    if not operator.merges_on_gpu and options.device != "cpu":
        recipe = replace(recipe, notes=(*recipe.notes, f"{recipe.method}: {MERGED_HERE}"))
    if operator.needs:
        from sigmerge.jobs import capture

        captures = capture.plan_captures(recipe, pool, options)
        exemplars = {planned.expert: len(planned.exemplars) for planned in captures}
        wanted = capture.derivations(captures, recipe, pool, options)
        entries = {expert: kept.look(one) for expert, one in wanted.items()}
        keys = {name: capture.key_of(one, entries[name]) for name, one in wanted.items()}
        to_capture = {
            planned.expert: capture.peak_memory(planned, options.threads)
            for planned in captures
            if entries[planned.expert] is None
        }
        recipe = replace(recipe, notes=(*recipe.notes, *capture.ignored_keys(recipe)))
    return DenseJob(
        recipe, operator, pool, sites, layout, exemplars, to_capture, solved_on, keys,
        options.allow_nonfinite,
    )  # fmt: skip


def _dtype(job: DenseJob) -> str | None:
    """The type that the configuration names; None leaves what it says."""
    if job.recipe.out_dtype is not None:
        return job.recipe.out_dtype
    stored = {name: t.dtype for name, t in job.pool.layout.tensors.items() if t.floating}
    written = {name: job.layout.slots[name].dtype for name in stored}
    one = len(set(written.values())) == 1 and written != stored
    return next(iter(written.values())) if one else None


def with_statistics(job: DenseJob, options: Options) -> DenseJob:
    """The job with the statistics that its operator needs, captured now or taken from the cache."""
    from sigmerge.checkpoints.statistics import StatisticsFolders
    from sigmerge.jobs import capture

    captures = capture.plan_captures(job.recipe, job.pool, options)
    wanted = capture.derivations(captures, job.recipe, job.pool, options)
    entries = capture.run_captures(captures, wanted, options)
    statistics = StatisticsFolders(
        {expert: entry.folder for expert, entry in entries.items()},
        {expert: entry.value.get("norm", 0.0) for expert, entry in entries.items()},
    )
    sites = {
        name: replace(
            site, measured=statistics.measured(name), transposed=statistics.transposed(name)
        )
        for name, site in job.sites.items()
    }
    problems = job.operator.check_statistics(list(sites.values()), statistics)
    if problems:
        raise PoolError(f"{job.recipe.method}: the exemplars do not suffice:", problems)
    notes = (*job.recipe.notes, *_unmeasured(sites.values(), statistics))
    recipe = replace(job.recipe, notes=notes)
    return replace(job, recipe=recipe, sites=sites, statistics=statistics)


def _unmeasured(sites: Iterable[Site], statistics: StatisticsFolders) -> list[str]:
    """Notes about matrices of blocks that no capture measured, by name without numbers."""
    matrices = [site for site in sites if site.block is not None and len(site.shape) > 1]
    alone = Counter(starred(site.tensor) for site in matrices if not site.measured)
    stacked = Counter(
        starred(site.tensor)
        for site in matrices
        if site.measured == "gram" and is_stack(site)
        for number in range(site.shape[0])
        if not reached(matrix_of(site, number), statistics)
    )
    return [
        f"{name} ({count} tensors): nothing was captured for it; tensors: in the plan names the "
        "plainer rule that merged it"
        for name, count in alone.items()
    ] + [
        f"{name} ({count} of its matrices): no exemplar reaches them; they are merged by the "
        "plainer rule for what is not captured"
        for name, count in stacked.items()
    ]


def run_dense(job: DenseJob, out: Path, options: Options) -> Merged:
    """Merge into a new folder, with its records."""
    meter, engine = Meter(), options.engine_name  # a cluster that lacks something says so now
    if job.operator.needs:
        job = with_statistics(job, options)
    recipe, pool = job.recipe, job.pool
    here = job.members.values() if options.engine == "local" else ()
    others = other_inputs(recipe, job.statistics is not None)
    inputs = PoolInputs.of(pool.members, others, read=here)
    lenient, passing = options.allow_nonfinite, inputs.leaves.take
    with (
        open_output(out, job.layout, job.fingerprint(), options) as output,
        PoolSource(job.members, allow_nonfinite=lenient, passing=passing) as source,
        Workers(options.workers) as workers,
    ):
        resumed = sorted(output.done)
        with beside(partial(inputs.hash, options)) as hashed:
            merge_blocks(job, source, workers, output, options)
            output.seal()
            hashed()
        chosen = recipe.tokenizer, _dtype(job), recipe.chat_template, recipe.architecture
        copy_companions(output, pool, *chosen)
        title = job.operator.heading(len(pool.experts))
        about = [f"Method: {job.operator.paper}"]
        card = model_card(title, pool, recipe.text, recipe.notes, about, job.operator.role)
        output.text("README.md", card)
        output.text(f"{RECORDS_FOLDER}/{RECIPE}", recipe.text)
        if recipe.is_mergekits:
            output.text(MERGEKIT_CONFIG, recipe.text)
        read = inputs.digested(options)  # before the plan, which names members by their digests
        plan = merge_plan(job, output.done, options)
        output.json(f"{RECORDS_FOLDER}/{PLAN}", plan.as_json())
        provenance = Provenance(
            inputs=read,
            outputs=output.digests,
            versions=versions(),
            job=job.fingerprint(),
            engine=engine,
            bytes_read=source.bytes_read,
            bytes_written=job.layout.nbytes,
            blocks_resumed=tuple(resumed),
            warnings=recipe.notes,
            wall_seconds=meter.wall_seconds,
            peak_memory_bytes=meter.peak_memory_bytes,
        )
        output.json(f"{RECORDS_FOLDER}/{PROVENANCE}", provenance.as_file())
        output.publish()
    return Merged(out=output.name, plan=plan, provenance=provenance)


def merge_plan(job: DenseJob, done: Mapping[str, Any], options: Options) -> MergePlan:
    """The record of a merge whose blocks are done."""
    recipe, captured = job.recipe, None
    notes = {n: v for record in done.values() for n, v in (record or {}).items()}
    if job.statistics:
        shown = {"exemplars": dict(job.exemplars), "statistics": job.statistics.names}
        captured = recipe.capture.model_dump() | shown
    return MergePlan(
        operator=recipe.method,
        revision=job.operator.revision,
        preset=recipe.preset,
        seed=recipe.seed,
        reference=member(job.pool.reference, options) if job.pool.reference else None,
        experts={name: member(expert, options) for name, expert in job.pool.experts.items()},
        settings=summary(job.sites),
        capture=captured,
        tensors={name: notes[name] for name in sorted(notes, key=natural)},
        slices=planned_slices(recipe, job.pool),
        matched=job.pool.matched,
        warnings=recipe.notes,
    )


def merge_into(job: DenseJob, sink: Sink, options: Options) -> None:
    """Merge all blocks in memory; writes no record and hashes no input."""
    if job.operator.needs:
        job = with_statistics(job, options)
    with (
        PoolSource(job.members, allow_nonfinite=options.allow_nonfinite) as source,
        Workers(options.workers) as workers,
    ):
        merge_blocks(job, source, workers, sink, options)


def merge_blocks(
    job: DenseJob, source: PoolSource, workers: Workers, output: Sink, options: Options
) -> None:
    """Merge the blocks that `output` does not have yet."""
    operator, pool = job.operator, job.pool
    left = [block for block in pool.blocks() if block[0] not in output.done]
    todo = job.layout.in_turn(left, itemgetter(1), in_order=source.in_order)
    direct = output if isinstance(output, Output) else None
    stream = _stream(job, source, workers, options, written=direct is not None)
    survey = stream.survey(operator.survey(list(job.sites.values()))) if todo else None
    total = sum(slot.nbytes for slot in job.layout.slots.values())
    written = total - sum(job.layout.slots[n].nbytes for _, names in todo for n in names)
    blocks = [[job.sites[n] for n in names if n in job.sites] for _, names in todo]
    dtypes = {name: slot.dtype for name, slot in job.layout.slots.items()}
    merged = stream.merge(operator, blocks, survey, dtypes, output.write, direct)
    for (key, names), notes in zip(todo, merged, strict=True):
        for name in names:
            if name not in job.sites:
                _copy_tensor(job, source, workers, output, name)
        output.finish(key, notes or None, names)
        written += sum(job.layout.slots[name].nbytes for name in names)
        options.progress("merging", written, total)


def _stream(
    job: DenseJob, source: PoolSource, workers: Workers, options: Options, *, written: bool
) -> Stream:
    """A stream over the job's blocks, on threads of this process or on a cluster.

    Chunks are long only if results are `written` immediately, without a buffer in memory.
    """
    named = [[n for n in names if n in job.sites] for _, names in job.pool.blocks()]
    blocks = [[job.sites[name] for name in names] for names in named]
    how = (blocks, source, workers, job.operator.granule, job.statistics)
    if (cluster := options.cluster) is None:
        device = options.gpu()
        longer = job.operator.ends_anywhere if device or written else lambda site: False
        return Stream(*how, device=device, anywhere=longer)
    from sigmerge.engine.cluster import ClusterStream

    largest = max(sum(job.layout.slots[name].nbytes for name in names) for names in named)
    return ClusterStream(
        *how,
        cluster=cluster,
        open_source=OpenMembers.of(job.members, allow_nonfinite=options.allow_nonfinite),
        memory=job.peak_memory(cluster.threads) + largest,
        open_device=options.open_gpu,
    )


def _copy_tensor(
    job: DenseJob, source: PoolSource, workers: Workers, output: Sink, name: str
) -> None:
    """A tensor that is not merged: the layout checkpoint's own values, cast to the output type."""
    stored, dtype = job.pool.layout.tensors[name], job.layout.slots[name].dtype
    if not stored.floating:
        output.write_bytes(name, source.reader.bytes(stored))
        return
    member = "reference" if job.pool.reference else next(iter(job.pool.experts))
    lenient, passing = source.allow_nonfinite, source.passing
    layout = {member: job.pool.layout}
    with PoolSource(layout, allow_nonfinite=lenient, passing=passing) as origin:

        def copy(first: int) -> None:
            last = min(first + CHUNK, stored.size)
            with named_reads():
                raw = origin.piece(member, name, first, last).array()
            if raw.dtype == STORAGE[dtype] and is_finite(raw):
                output.write(name, first, raw)
            else:
                for start in range(first, last, TILE):
                    values = np.empty(min(TILE, last - start), np.float32)
                    origin.fill(member, name, start, values)
                    output.write(name, start, rounded(name, start, values, dtype, lenient))
            origin.done(name, first, last)

        origin.prefetch([name])
        for _ in workers.map(copy, range(0, stored.size, CHUNK)):
            pass


def summary(sites: Mapping[str, Site]) -> dict[str, Any]:
    """Settings by name; where tensors differ, the distinct values."""
    seen: dict[str, list[Any]] = {}
    for site in sites.values():
        for name, value in site.settings.items():
            values = seen.setdefault(name, [])
            plain = (
                dict(zip(site.experts, value, strict=True)) if isinstance(value, tuple) else value
            )
            if plain not in values:
                values.append(plain)
    return {
        name: values[0] if len(values) == 1 else {"by tensor": values}
        for name, values in seen.items()
    }
