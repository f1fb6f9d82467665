"""`sigmerge profile`: how contested every layer is, and the capacity that leaves it.

Measured once per pool, independent of any anchor, and kept beside the pool by content.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.companions import TOKENIZER
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.pool import Pool, open_pool
from sigmerge.checkpoints.source import PoolSource
from sigmerge.commands.options import Options
from sigmerge.engine.machine import free_memory
from sigmerge.engine.stream import Stream
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError
from sigmerge.files.cache import beside
from sigmerge.files.digests import sha256
from sigmerge.files.documents import content_key, whole, write_json
from sigmerge.kernels import TILE
from sigmerge.kernels.signature import signature
from sigmerge.method import conflict
from sigmerge.operators.base import Chunk, Pass, Passes, Site
from sigmerge.recipe import Recipe, load_recipe

Views = dict[str, np.ndarray[Any, Any]]
FORMAT = 1


@dataclass(frozen=True)
class Profile:
    """The views that could be measured and the layer sizes n_i; the representation view needs
    probe prompts."""

    views: Views
    coordinates: np.ndarray[Any, Any]


def profile(recipe: Recipe | Path | str | Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """Views, conflict and capacity per layer of the recipe's pool, in plain numbers."""
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    options = Options(**how)
    measured = measure_profile(loaded, open_recipe_pool(loaded, options), options)
    section = loaded.repair
    c_min, c_max = (section.c_min, section.c_max) if section else (0.10, 0.45)
    names = [name for name in conflict.VIEWS if name in measured.views]
    score, warnings = conflict.conflict_score(measured.views, names)
    if "representation" not in names:
        warnings += ("No probe prompts: the representation view is left out. Add probe: to the "
                     "repair: section.",)  # fmt: skip
    return {
        "views": {name: measured.views[name].tolist() for name in names},
        "conflict": score.tolist(),
        "capacity": conflict.capacity(score, c_min, c_max).tolist(),
        "coordinates": measured.coordinates.tolist(),
        "c_min": c_min,
        "c_max": c_max,
        "warnings": list(warnings),
    }


def open_recipe_pool(recipe: Recipe, options: Options) -> Pool:
    """The recipe's pool for profile and repair, which read the numbered blocks only."""
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


def measure_profile(recipe: Recipe, pool: Pool, options: Options) -> Profile:
    coordinates = np.array([sum(site.size for site in block) for block in block_sites(pool)])
    views = _weight_views(pool, options)
    probe = recipe.repair.probe if recipe.repair else None
    if probe is not None:
        views["representation"] = _representation(recipe.folder / probe, pool, options)
    ordered: Views = {name: views[name] for name in conflict.VIEWS if name in views}
    return Profile(ordered, coordinates.astype(np.int64))


def block_sites(pool: Pool) -> list[list[Site]]:
    """The floating tensors of every numbered block in flat order (rulings 1 and 3)."""
    blocks: list[list[Site]] = [[] for _ in range(pool.stack.depth)]
    experts = tuple(pool.experts)
    for name, stored in sorted(pool.layout.tensors.items()):
        block = pool.stack.block_of(name)
        if block is not None and stored.floating and stored.size:
            blocks[block].append(Site(name, stored.size, block, len(blocks), experts, {}, 0))
    return blocks


def _weight_views(pool: Pool, options: Options) -> Views:
    """Direction and sign views: one pass that reads every weight once."""
    unchecked = ["unchecked"] if options.allow_nonfinite else []
    key = content_key(["weights", FORMAT, *unchecked, _weights_key(pool.layout, options),
                *(_weights_key(e, options) for e in pool.experts.values())])  # fmt: skip
    note = beside(pool.layout.path, f"signature-{key}.json")
    if note.exists():
        kept = json.loads(note.read_text())
        dots, mass = np.array(kept["dots"]), np.array(kept["mass"])
    else:
        dots, mass = _signature(pool, options)
        content = {"experts": list(pool.experts), "dots": dots.tolist(), "mass": mass.tolist()}
        write_json(note, content, indent=None)
    return {
        "direction": conflict.direction_view(dots),
        "sign": conflict.sign_view(mass[:, 0], mass[:, 1]),
    }


def _signature(pool: Pool, options: Options) -> tuple[Any, Any]:
    experts, depth = len(pool.experts), pool.stack.depth
    dots, mass = np.zeros((depth, experts, experts)), np.zeros((depth, 2))
    blocks = block_sites(pool)
    total = sum(site.size for block in blocks for site in block)
    done = 0

    def visit(chunk: Chunk) -> tuple[Site, int, Any, Any]:
        part, sums = np.zeros((experts, experts)), np.zeros(2)
        chunk.read(signature, TILE, part, sums)
        return chunk.site, chunk.size, part, sums

    def fold(_: None, result: tuple[Site, int, Any, Any]) -> None:
        nonlocal done
        site, size, part, sums = result
        assert site.block is not None
        dots[site.block] += part
        mass[site.block] += sums
        done += size
        options.progress("profiling weights", done, total)

    def passes() -> Passes:
        yield Pass(visit, fold)

    with (
        PoolSource(pool.members, allow_nonfinite=options.allow_nonfinite) as source,
        Workers(options.threads) as workers,
    ):
        Stream(blocks, source, workers, lambda site: 4).survey(passes())
    return dots, mass


def _representation(probe_file: Path, pool: Pool, options: Options) -> np.ndarray[Any, Any]:
    """The representation view: each expert is loaded and run once, one after the other."""
    from sigmerge.probing.exemplars import read_prompts

    prompts = read_prompts(probe_file)
    grams = []
    for number, (name, expert) in enumerate(pool.experts.items()):
        options.progress("probing experts", number, len(pool.experts))
        tokenizer = {f for pattern in TOKENIZER for f in expert.path.glob(pattern) if f.is_file()}
        files = [expert.path / "config.json", *sorted(tokenizer)]
        digests = sha256(files)
        key = content_key(["gram", FORMAT, prompts, _weights_key(expert, options),
                    *(f"{file.name} {digests[file]}" for file in files)])  # fmt: skip
        note = beside(pool.layout.path, f"gram-{key}.npy")
        if not note.exists():
            gram = _probed(expert, prompts, options)
            if len(gram) != pool.stack.depth:
                raise PoolError(f"{name}: {len(gram)} blocks answered the probe, the tensor names "
                                f"show {pool.stack.depth}.")  # fmt: skip
            with whole(note) as partial, partial.open("wb") as stream:
                np.save(stream, gram)
        grams.append(np.load(note))
    options.progress("probing experts", len(pool.experts), len(pool.experts))
    return conflict.representation_view(np.stack(grams))


def _probed(expert: Checkpoint, prompts: list[str], options: Options) -> np.ndarray[Any, Any]:
    """An expert's answer; layers that memory does not hold in float32 wait on the disk."""
    from sigmerge.probing.hidden import probe

    needed = 4 * sum(tensor.size for tensor in expert.tensors.values())
    if needed < 0.8 * free_memory():
        return probe(expert.path, prompts, trust_remote_code=options.trust_remote_code)
    room = beside(expert.path, "")
    room.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offload-", dir=room) as folder:
        return probe(expert.path, prompts, offload_folder=folder,
                     trust_remote_code=options.trust_remote_code)  # fmt: skip


def _weights_key(checkpoint: Checkpoint, options: Options) -> str:
    digests = sha256(checkpoint.files, options.threads)
    return " ".join(sorted(digests.values()))
