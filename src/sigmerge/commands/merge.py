"""`sigmerge merge`: a dense merge, streamed from the experts' folders into a new one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.companions import copy_companions, model_card
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.pool import Pool, open_pool
from sigmerge.checkpoints.source import PoolSource
from sigmerge.checkpoints.statistics import StatisticsFolders
from sigmerge.checkpoints.writer import Layout, Output, check_target, parse_size, plan_layout
from sigmerge.commands.options import Meter, Options, versions
from sigmerge.engine.stream import CHUNK, Stream, StreamChunk, Workers
from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.files.digests import identity, sha256
from sigmerge.kernels import TILE
from sigmerge.kernels.convert import NARROW, STORAGE
from sigmerge.operators.base import Operator, Site
from sigmerge.operators.features import peak_bytes
from sigmerge.recipe import Recipe, load_recipe

INTERPRETER = 250_000_000
"""Resident bytes of Python with the libraries loaded, before any tensor."""


@dataclass(frozen=True)
class MergeJob:
    """A merge that passed every check that headers allow."""

    recipe: Recipe
    operator: Operator
    pool: Pool
    sites: Mapping[str, Site]
    """Tensors that are merged; the others are copied from the layout's checkpoint."""
    layout: Layout
    exemplars: Mapping[str, int] = field(default_factory=dict)
    """How many each expert is shown, where the operator reads data."""
    to_capture: Mapping[str, int] = field(default_factory=dict)
    """Experts that were not shown theirs yet: a bound on the memory that takes."""
    statistics: StatisticsFolders | None = None
    """What was captured on them; there once the job runs."""

    @property
    def members(self) -> dict[str, Any]:
        """Checkpoints that are read tensor by tensor."""
        if self.operator.gives_vector:
            return self.pool.members
        return dict(self.pool.experts)

    def fingerprint(self) -> str:
        recipe = self.recipe
        inputs = {
            name: [identity(file) for file in member.files]
            for name, member in self.pool.members.items()
        }
        content = [
            versions(),
            recipe.method,
            recipe.preset,
            recipe.seed,
            str(recipe.tokenizer),
            repr(self.sites),
            self.statistics.names if self.statistics else None,
            inputs,
            [hashlib.sha256(header).hexdigest() for header in self.layout.headers],
            TILE,
            CHUNK,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def bytes_in(self) -> int:
        """Bytes one pass over the merged tensors reads."""
        return sum(
            member.tensors[name].nbytes for member in self.members.values() for name in self.sites
        )

    def peak_memory(self, threads: int) -> int:
        """A bound on resident memory: it depends on experts and threads, not on the depth.

        Operators that read features hold a whole tensor of every expert, and Grams of its inputs.
        """
        experts = len(self.pool.experts)
        scratch = (experts + 4) * TILE * 4
        window = (experts + 1) * CHUNK * 4
        counts = 3 * experts * 65536 * 8
        whole = 0
        if self.operator.needs == "features":
            shapes = [s.shape for s in self.sites.values() if s.block is not None]
            sizes = [peak_bytes(experts, shape) for shape in shapes if len(shape) == 2]
            whole = max(sizes, default=0)
        merging = INTERPRETER + threads * (scratch + window + counts + whole)
        if not self.to_capture:
            return merging
        from sigmerge.commands.capture import LIBRARIES

        # Captures come first, in this process; their libraries stay.
        return max(*self.to_capture.values(), merging + LIBRARIES - INTERPRETER)

    def describe(self, threads: int) -> dict[str, Any]:
        """What `--dry-run` tells."""
        pool = self.pool
        return {
            "operator": self.recipe.method,
            "reference": str(pool.reference.path) if pool.reference else None,
            "experts": {name: str(member.path) for name, member in pool.experts.items()},
            "layers": pool.stack.depth,
            "tensors": len(self.layout.slots),
            "merged_tensors": len(self.sites),
            "coordinates": sum(site.size for site in self.sites.values()),
            "settings": summary(self.sites),
            **({"exemplars": dict(self.exemplars)} if self.exemplars else {}),
            "to_capture": list(self.to_capture),
            "bytes_to_read": self.bytes_in(),
            "bytes_to_write": self.layout.nbytes,
            "files": self.layout.files,
            "peak_memory_bytes": self.peak_memory(threads),
            "threads": threads,
            "notes": list(self.recipe.notes),
        }


def merge(
    recipe: Recipe | Path | str | Mapping[str, Any], out: Path | str, **how: Any
) -> dict[str, Any]:
    """Merge as the recipe says into a new folder; returns what was done (provenance).

    Keyword arguments are those of `Options`. A recipe with a `repair:` section is repaired too.
    """
    options = Options(**how)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if loaded.repair is not None:
        from sigmerge.commands.repair import merge_and_repair

        return merge_and_repair(loaded, Path(out), options)
    check_target(Path(out), options.overwrite, loaded.inputs)
    return make_merge(loaded, Path(out), options)


def make_merge(recipe: Recipe, out: Path, options: Options) -> dict[str, Any]:
    """The dense merge of a recipe; with a `search:` section its coefficients are searched first."""
    if recipe.search is not None:
        from sigmerge.commands.search import search_merge

        return search_merge(recipe, out, options)
    return run_merge(plan_merge(recipe, options), out, options)


def open_merge_pool(recipe: Recipe, options: Options) -> tuple[Pool, bool]:
    """The pool of a recipe that merges, and whether tensors outside the blocks are merged."""
    outside = recipe.parameters.get("outside") != "reference"
    pool = open_pool(
        recipe.reference,
        recipe.experts,
        allow_pickle=options.allow_pickle,
        mixed_dtypes=recipe.out_dtype is not None,
        outside=outside,
        soup=recipe.operator is not None and not recipe.operator.needs_reference,
    )
    return pool, outside


def plan_merge(recipe: Recipe, options: Options) -> MergeJob:
    """Check the recipe against the checkpoints' headers. Reads no tensor."""
    operator = recipe.operator
    if operator is None:
        raise RecipeError(
            "merge_method: checkpoint has nothing to merge; add a repair: section, or use "
            "`sigmerge repair`."
        )
    if recipe.search is not None:
        raise RecipeError("The recipe has a search: section: its coefficients are not known yet.")
    pool, outside = open_merge_pool(recipe, options)
    sites = _sites(recipe, pool, outside)
    problems = operator.check(list(sites.values()))
    if problems:
        raise RecipeError(f"{recipe.method}: the parameters do not fit:", problems)
    tensors = [
        (
            name,
            recipe.out_dtype if stored.floating and recipe.out_dtype else stored.dtype,
            stored.shape,
        )
        for name, stored in sorted(pool.layout.tensors.items(), key=lambda item: natural(item[0]))
    ]
    layout = plan_layout(tensors, parse_size(options.max_shard_size))
    exemplars, to_capture = {}, {}
    if operator.needs:
        from sigmerge.commands.capture import ignored_keys, missing, peak_memory, plan_captures

        captures = plan_captures(recipe, pool, options)
        exemplars = {planned.expert: len(planned.exemplars) for planned in captures}
        to_capture = {
            planned.expert: peak_memory(planned, recipe, options.threads)
            for planned in missing(captures, recipe, pool, options)
        }
        recipe = replace(recipe, notes=(*recipe.notes, *ignored_keys(recipe)))
    return MergeJob(recipe, operator, pool, sites, layout, exemplars, to_capture)


def _with_statistics(job: MergeJob, options: Options) -> MergeJob:
    """The job with what its operator needs to know, captured now or earlier."""
    from sigmerge.commands.capture import damaged, folders, plan_captures, run_captures

    captures = plan_captures(job.recipe, job.pool, options)
    places = folders(captures, job.recipe, job.pool, options)
    again = [f"{name}: captured again, since {why}" for name, why in damaged(places).items()]
    statistics = StatisticsFolders(run_captures(captures, job.recipe, job.pool, options, places))
    sites = {
        name: replace(
            site, measured=statistics.measured(name), transposed=statistics.transposed(name)
        )
        for name, site in job.sites.items()
    }
    problems = job.operator.check_statistics(list(sites.values()), statistics)
    if problems:
        raise PoolError(f"{job.recipe.method}: the exemplars do not suffice:", problems)
    notes = (*job.recipe.notes, *again, *_unmeasured(sites.values(), job.pool.stack.prefix))
    recipe = replace(job.recipe, notes=notes)
    return replace(job, recipe=recipe, sites=sites, statistics=statistics)


def _unmeasured(sites: Iterable[Site], prefix: str) -> list[str]:
    """What to say about matrices of blocks that no capture could measure, by name."""
    names = Counter(
        site.tensor.replace(f"{prefix}{site.block}.", f"{prefix}*.", 1)
        for site in sites
        if site.block is not None and len(site.shape) > 1 and not site.measured
    )
    return [
        f"{name} ({count} tensors): nothing was captured for it; the plan's tensors: say by which "
        "plainer rule it was merged"
        for name, count in names.items()
    ]


def run_merge(job: MergeJob, out: Path, options: Options) -> dict[str, Any]:
    meter = Meter()
    if job.operator.needs:
        job = _with_statistics(job, options)
    recipe, pool = job.recipe, job.pool
    source = PoolSource(job.members, allow_nonfinite=options.allow_nonfinite)
    # Blocks that were finished without the check for NaN are not taken over by a run that checks.
    fingerprint = job.fingerprint() + (" unchecked" if options.allow_nonfinite else "")
    with (
        Output(out, job.layout, fingerprint, overwrite=options.overwrite) as output,
        Workers(options.threads) as workers,
    ):
        resumed = sorted(output.done)
        merge_blocks(job, source, workers, output, options)
        exemplars = {m.name: m.exemplars for m in recipe.models if m.exemplars and job.statistics}
        inputs = input_files(pool.members, options, exemplars)
        copy_companions(output, pool, recipe.tokenizer, recipe.out_dtype)
        title = f"{job.operator.title} of {len(pool.experts)} experts"
        output.text("README.md", model_card(title, pool, recipe.text, list(recipe.notes)))
        output.text("sigmerge/recipe.yaml", recipe.text)
        plan = {
            "operator": recipe.method,
            "preset": recipe.preset,
            "seed": recipe.seed,
            "settings": summary(job.sites),
            "warnings": list(recipe.notes),
        }
        if job.statistics:
            notes = {n: v for record in output.done.values() for n, v in (record or {}).items()}
            shown = {"exemplars": dict(job.exemplars), "statistics": job.statistics.names}
            plan["capture"] = recipe.capture.model_dump() | shown
            plan["tensors"] = {name: notes[name] for name in sorted(notes, key=natural)}
        output.text("sigmerge/plan.json", json.dumps(plan, indent=2) + "\n")
        provenance = {
            "inputs": inputs,
            "versions": versions(),
            "device": "cpu",
            "engine": f"local, {options.threads} threads",
            "bytes_read": source.bytes_read,
            "bytes_written": job.layout.nbytes,
            "blocks_resumed": resumed,
            "warnings": list(recipe.notes),
            **meter.read(),
        }
        output.text("sigmerge/provenance.json", json.dumps(provenance, indent=2) + "\n")
        output.publish()
    return {"out": str(output.final), **provenance}


class Sink(Protocol):
    """Where the values of a merge go: an output folder, or a search's memory."""

    done: dict[str, Any]

    def write(self, tensor: str, start: int, raw: np.ndarray[Any, Any]) -> None: ...

    def write_bytes(self, tensor: str, data: memoryview) -> None: ...

    def finish(self, block: str, record: Any = None) -> None: ...


def merge_blocks(
    job: MergeJob, source: PoolSource, workers: Workers, output: Sink, options: Options
) -> None:
    """Merge block by block what `output` does not have yet."""
    operator, pool = job.operator, job.pool
    todo = [(key, names) for key, names in pool.blocks() if key not in output.done]
    stream = Stream(
        [[job.sites[name] for name in names if name in job.sites] for _, names in pool.blocks()],
        source,
        workers,
        operator.granule,
        statistics=job.statistics,
    )
    survey = stream.survey(operator.survey(list(job.sites.values()))) if todo else None
    total = sum(slot.nbytes for slot in job.layout.slots.values())
    written = total - sum(job.layout.slots[n].nbytes for _, names in todo for n in names)
    blocks = stream.ahead([[job.sites[n] for n in names if n in job.sites] for _, names in todo])
    for (key, names), block in zip(todo, blocks, strict=True):
        states = stream.prepare(block, lambda site: operator.prepare(site, survey))
        notes: dict[str, Any] = {}
        write = partial(_write_chunk, job, survey, output, source.allow_nonfinite, notes)
        stream.visit(block, states, write)
        for name in names:
            if name not in job.sites:
                _copy_tensor(job, source, output, name)
        output.finish(key, notes or None)
        written += sum(job.layout.slots[name].nbytes for name in names)
        options.progress("merging", written, total)


def _write_chunk(
    job: MergeJob,
    survey: Any,
    output: Sink,
    lenient: bool,
    notes: dict[str, Any],
    chunk: StreamChunk,
) -> int:
    tensor = chunk.site.tensor
    dtype = job.layout.slots[tensor].dtype
    for tile in job.operator.merge(chunk, survey):
        if job.operator.gives_vector:
            chunk.add_reference(tile)
        raw = np.empty(tile.out.size, STORAGE[dtype])
        store(output, tensor, tile.start, tile.out, raw, dtype, lenient)
    if chunk.notes:
        notes[tensor] = chunk.notes
    return chunk.stop - chunk.start


def store(
    output: Sink,
    tensor: str,
    start: int,
    values: Any,
    raw: Any,
    dtype: str,
    lenient: bool = False,
) -> None:
    """Round float32 values once to the stored type and write them; overflow is an error.

    `lenient` lets through what was not finite before it was rounded.
    """
    if not NARROW[dtype](values, raw):
        if lenient and dtype == "BF16":
            raw[np.isnan(values)] = 0x7FC0  # rounding can carry a NaN out of the NaNs
        wrong = _overflows(raw, dtype) & (np.isfinite(values) if lenient else True)
        if wrong.any():
            raise OutputError(
                f"{tensor}: the result at flat index {start + int(np.flatnonzero(wrong)[0])} is "
                f"not finite in {dtype}. The weights add up too large: lower them, or write a "
                "wider dtype."
            )
    output.write(tensor, start, raw)


def _overflows(raw: Any, dtype: str) -> Any:
    if dtype == "BF16":
        return (raw & 0x7F80) == 0x7F80
    return ~np.isfinite(raw)


def _copy_tensor(job: MergeJob, source: PoolSource, output: Sink, name: str) -> None:
    """A tensor that is not merged: the layout checkpoint's own values, cast if asked."""
    stored, slot = job.pool.layout.tensors[name], job.layout.slots[name]
    if not stored.floating:
        output.write_bytes(name, source.reader.bytes(stored))
        return
    member = "reference" if job.pool.reference else next(iter(job.pool.experts))
    origin = PoolSource({member: job.pool.layout}, allow_nonfinite=source.allow_nonfinite)
    for start in range(0, stored.size, TILE):
        values = np.empty(min(TILE, stored.size - start), np.float32)
        origin.fill(member, name, start, values)
        raw = np.empty(values.size, STORAGE[slot.dtype])
        store(output, name, start, values, raw, slot.dtype, source.allow_nonfinite)


def _sites(recipe: Recipe, pool: Pool, outside: bool) -> dict[str, Site]:
    sites = {}
    for name, stored in sorted(pool.layout.tensors.items()):
        block = pool.stack.block_of(name)
        if stored.floating and stored.size and (outside or block is not None):
            site = recipe.site(name, stored.size, block, pool.stack.depth)
            sites[name] = replace(site, shape=stored.shape)
    return sites


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


def input_files(
    members: Mapping[str, Checkpoint], options: Options, exemplars: Mapping[str, Path] | None = None
) -> list[dict[str, Any]]:
    files = {file: name for name, member in members.items() for file in member.files}
    files |= {file: name for name, file in (exemplars or {}).items()}
    total = sum(file.stat().st_size for file in files)
    hashed = 0

    def progress(count: int) -> None:
        nonlocal hashed
        hashed += count
        options.progress("hashing inputs", hashed, total)

    digests = sha256(files, options.threads, progress)
    return [
        {"member": name, "file": str(file), "size": file.stat().st_size, "sha256": digests[file]}
        for file, name in files.items()
    ]
