"""Opening a recipe's checkpoints, and checking them from their headers. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sigmerge.checkpoints.companions import tokenizer_files
from sigmerge.checkpoints.folder import Checkpoint, open_checkpoint
from sigmerge.checkpoints.pool import Pool, differences, open_pool
from sigmerge.errors import PoolError
from sigmerge.files.digests import sha256
from sigmerge.jobs.options import Options
from sigmerge.operators.base import Site
from sigmerge.recipe import Recipe
from sigmerge.records import InputFile, Member

COMPANIONS = ("config.json", "generation_config.json")
"""Files besides weights and tokenizer that go into a result."""


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


def open_repair_pool(recipe: Recipe, options: Options) -> Pool:
    """The pool for the profile and the repair, which read the numbered blocks only."""
    if recipe.reference is None:
        raise PoolError("base_model is missing: task vectors need the reference checkpoint.")
    pool = open_pool(
        recipe.reference,
        recipe.experts,
        allow_pickle=options.allow_pickle,
        mixed_dtypes=True,
        outside=False,
    )
    if pool.stack.depth == 0:
        raise PoolError(f"{pool.layout.path}: no numbered decoder stack found in the tensor names.")
    return pool


def open_anchor(path: Path, pool: Pool, options: Options) -> Checkpoint:
    """The anchor, checked against the pool: same architecture, same blocks."""
    stored = open_checkpoint(path, allow_pickle=options.allow_pickle)
    problems = differences("anchor", stored, pool.layout, mixed_dtypes=True, outside=False)
    if problems:
        raise PoolError("The anchor is no merge of this pool:", problems)
    return stored


def merged_sites(recipe: Recipe, pool: Pool, outside: bool) -> dict[str, Site]:
    """The tensors that the recipe's operator merges, with their settings."""
    sites = {}
    for name, stored in sorted(pool.layout.tensors.items()):
        block = pool.stack.block_of(name)
        if stored.floating and stored.size and (outside or block is not None):
            site = recipe.site(name, stored.size, block, pool.stack.depth)
            sites[name] = replace(site, shape=stored.shape)
    return sites


def block_sites(pool: Pool) -> list[list[Site]]:
    """The floating tensors of every numbered block in flat order (rulings 1 and 3)."""
    blocks: list[list[Site]] = [[] for _ in range(pool.stack.depth)]
    experts = tuple(pool.experts)
    for name, stored in sorted(pool.layout.tensors.items()):
        block = pool.stack.block_of(name)
        if block is not None and stored.floating and stored.size:
            blocks[block].append(Site(name, stored.size, block, len(blocks), experts, {}, 0))
    return blocks


def weight_digests(checkpoint: Checkpoint, options: Options) -> tuple[str, ...]:
    """SHA-256 of a checkpoint's weight files, in the files' order."""
    digests = sha256(checkpoint.files, options.threads)
    return tuple(digests[file] for file in checkpoint.files)


def member(checkpoint: Checkpoint, options: Options) -> Member:
    """A checkpoint as a plan names it."""
    return Member(path=str(checkpoint.path), sha256=weight_digests(checkpoint, options))


def companion_digests(checkpoint: Checkpoint, tokenizer: Path | None = None) -> dict[str, str]:
    """SHA-256 of the files beside the weights that go into a result or decide how it reads text."""
    files = [checkpoint.path / name for name in COMPANIONS]
    files += tokenizer_files(tokenizer or checkpoint.path)
    digests = sha256(file for file in files if file.is_file())
    return {file.name: digest for file, digest in sorted(digests.items())}


def input_files(
    members: Mapping[str, Checkpoint], options: Options, exemplars: Mapping[str, Path] | None = None
) -> tuple[InputFile, ...]:
    """Every file that was read, with its digest."""
    files = {file: name for name, member in members.items() for file in member.files}
    files |= {file: name for name, file in (exemplars or {}).items()}
    total = sum(file.stat().st_size for file in files)
    hashed = 0

    def progress(count: int) -> None:
        nonlocal hashed
        hashed += count
        options.progress("hashing inputs", hashed, total)

    digests = sha256(files, options.threads, progress)
    return tuple(
        InputFile(member=name, file=str(file), size=file.stat().st_size, sha256=digests[file])
        for file, name in files.items()
    )
