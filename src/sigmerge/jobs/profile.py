"""The profile of a pool: the conflict of every layer, and its capacity.

It is measured once per pool, does not depend on the anchor, and is cached beside the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sigmerge import kept
from sigmerge.checkpoints.blocks import find_stack
from sigmerge.checkpoints.companions import vocabulary
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.inputs import hashed_again
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.core import Array
from sigmerge.engine.machine import INTERPRETER, LIBRARIES, free_memory
from sigmerge.errors import PoolError, RecipeError, require
from sigmerge.files.digests import file_digests
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import block_sites, open_repair_pool
from sigmerge.jobs.signatures import signatures
from sigmerge.jobs.steps import Description, ProfileStep
from sigmerge.method import conflict
from sigmerge.probing.exemplars import check_same_vocabulary, read_exemplars
from sigmerge.probing.grams import prompt_grams, read_grams
from sigmerge.probing.loading import checked_device
from sigmerge.recipe import Recipe
from sigmerge.results import Profile

Views = dict[str, Array]


@dataclass(frozen=True)
class MeasuredViews:
    """The views that could be measured and the layer sizes n_i; the representation view needs
    probe prompts."""

    views: Views
    coordinates: Array


@dataclass(frozen=True)
class ProfileJob:
    """The profile of a recipe's pool."""

    recipe: Recipe
    options: Options

    def describe(self) -> Description:
        pool = open_repair_pool(self.recipe, self.options)
        return Description((describe_profile(self.recipe, pool, self.options),),
                           self.options.threads)  # fmt: skip

    def run(self) -> Profile:
        recipe = self.recipe
        pool = open_repair_pool(recipe, self.options)
        measured = measure_profile(recipe, pool, self.options)
        section = recipe.repair
        c_min, c_max = (section.c_min, section.c_max) if section else (0.10, 0.45)
        names = [name for name in conflict.VIEWS if name in measured.views]
        score, warnings = conflict.conflict_score(measured.views, names)
        if "representation" not in names:
            warnings += (
                "No probe prompts: the representation view is left out. Add probe: to the "
                "repair: section.",
            )
        return Profile(
            views={name: tuple(measured.views[name].tolist()) for name in names},
            conflict=tuple(score.tolist()),
            capacity=tuple(conflict.capacity(score, c_min, c_max).tolist()),
            coordinates=tuple(measured.coordinates.tolist()),
            c_min=c_min,
            c_max=c_max,
            warnings=warnings,
        )


def describe_profile(recipe: Recipe, pool: PoolMembers, options: Options) -> ProfileStep:
    """The profile as a step of a dry run: probe and tokenizers are checked, no tensor is read."""
    blocks = block_sites(pool)
    memory = INTERPRETER
    if prompts := check_probe(recipe, pool, options):
        largest = max(4 * sum(t.size for t in e.tensors.values()) for e in pool.experts.values())
        memory = LIBRARIES + min(largest, free_memory())
    return ProfileStep(
        experts={name: expert.place for name, expert in pool.experts.items()},
        layers=pool.stack.depth,
        coordinates=sum(site.size for block in blocks for site in block),
        probe_prompts=len(prompts),
        bytes_to_read=sum(member.nbytes for member in pool.members.values()),
        peak_memory_bytes=memory,
        notes=hashed_again(pool.members.values()),
    )


def check_probe(recipe: Recipe, pool: PoolMembers, options: Options) -> list[str]:
    """The probe prompts, after checking that all members tokenize alike; empty without a probe."""
    if recipe.repair is None or recipe.repair.probe is None:
        return []
    checked_device(_device(recipe))
    prompts = probe_prompts(recipe.folder / recipe.repair.probe)
    _check_vocabularies(pool, options)
    return prompts


def measure_profile(
    recipe: Recipe, pool: PoolMembers, options: Options, *, again: bool = False
) -> MeasuredViews:
    """Measure the views of a pool, from the cache unless `again` is set."""
    _ = options.cluster  # one that lacks something says so before anything is hashed
    coordinates = np.array([sum(site.size for site in block) for block in block_sites(pool)])
    views = _weight_views(pool, options, again)
    probe = recipe.repair.probe if recipe.repair else None
    if probe is not None:
        views["representation"] = _representation(recipe, pool, options, again)
    ordered: Views = {name: views[name] for name in conflict.VIEWS if name in views}
    return MeasuredViews(ordered, coordinates.astype(np.int64))


def _weight_views(pool: PoolMembers, options: Options, again: bool) -> Views:
    """Direction and sign views: one pass that reads every weight once."""
    members = pool.members.values()
    # All at once: at the end of a call threads wait for the last one.
    file_digests([file for each in members for file in each.files], options.threads)
    entry = kept.get(signatures(pool, block_sites(pool), options), again=again)
    dots, mass = np.array(entry.value["dots"]), np.array(entry.value["mass"])
    return {
        "direction": conflict.direction_view(dots),
        "sign": conflict.sign_view(mass[:, 0], mass[:, 1]),
    }


def _device(recipe: Recipe) -> str:
    return recipe.repair.device if recipe.repair else "cpu"


def _representation(recipe: Recipe, pool: PoolMembers, options: Options, again: bool) -> Array:
    """The representation view: each expert is loaded and run once, one after the other.

    All experts read the prompts through the reference's tokenizer (ruling 23).
    """
    assert recipe.repair is not None and recipe.repair.probe is not None
    prompts, trust = recipe.folder / recipe.repair.probe, options.trust_remote_code
    probe_prompts(prompts)
    _check_vocabularies(pool, options)
    tokenizer, device, near = _tokenizer(pool), checked_device(_device(recipe)), pool.layout.path
    found = []
    for number, (name, expert) in enumerate(pool.experts.items()):
        options.progress("probing experts", number, len(pool.experts))
        file_digests(expert.files, options.threads)
        wanted = prompt_grams(expert, tokenizer, prompts, device, trust, near)
        grams = read_grams(kept.get(wanted, again=again))
        layers = _own_layers(pool, expert)
        # A stack need not have all layers of an expert.
        if len(grams) <= max(layers) or (pool.output is None and len(grams) != len(layers)):
            raise PoolError(
                f"{name}: {len(grams)} blocks ran on the probe, the tensor names show "
                f"{max(layers) + 1}."
            )
        found.append(grams[layers])
    options.progress("probing experts", len(pool.experts), len(pool.experts))
    return conflict.representation_view(np.stack(found))


def probe_prompts(file: Path) -> list[str]:
    """The prompts of a probe, which models can be shown here.

    The representation view compares prompts: one alone shows nothing.
    """
    require("The representation view", models=["torch", "transformers"])
    exemplars = read_exemplars(file, what="prompts")
    if blank := [one.place for one in exemplars if not one.prompt.strip()]:
        raise RecipeError(f"{blank[0]}: its prompt is empty; take the line away.")
    prompts = [one.prompt for one in exemplars]
    if len(set(prompts)) < 2:
        raise RecipeError(
            f"{file}: the representation view compares prompts, and all of these are the same; "
            "give two that differ at least, or leave probe: out."
        )
    return prompts


def _own_layers(pool: PoolMembers, expert: Checkpoint) -> list[int]:
    """The index in the expert of each layer of the pool: they differ in a stack of slices.

    A probe runs the expert as it is.
    """
    if pool.output is None:
        return list(range(pool.stack.depth))
    own = find_stack((tensor.name, tensor.size) for tensor in expert.tensors.values())
    found = {pool.stack.block_of(n): own.block_of(t.name) for n, t in expert.tensors.items()}
    layers = [found.get(layer) for layer in range(pool.stack.depth)]
    return [layer for layer in layers if layer is not None]


def _tokenizer(pool: PoolMembers) -> Path:
    """The folder of the reference's tokenizer; the first expert's if the reference has none."""
    folders = [pool.layout.path, *(expert.path for expert in pool.experts.values())]
    found = next((folder for folder in folders if vocabulary(folder) is not None), None)
    if found is None:
        raise PoolError(
            f"{pool.layout.path}: has no tokenizer, and no expert has one; the probe needs it."
        )
    return found


def _check_vocabularies(pool: PoolMembers, options: Options) -> None:
    """PoolError if an expert's vocabulary differs from the reference's: the views would differ."""
    chosen = _tokenizer(pool)
    folders = {"reference": chosen}
    for name, expert in pool.experts.items():
        if vocabulary(expert.path) is not None:
            folders[name] = expert.path
    check_same_vocabulary(folders, options.trust_remote_code)
