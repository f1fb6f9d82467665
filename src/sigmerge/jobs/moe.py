"""`sigmerge moe`: dense models as the experts of one mixture.

It is a merge that takes every tensor from one member, so it is resumed, verified and recorded as
merges are. Only the rows of its routers are computed: from prompts, or drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sigmerge import kept
from sigmerge.checkpoints.blocks import natural
from sigmerge.checkpoints.companions import check_tokenizer
from sigmerge.checkpoints.computed import disagreements
from sigmerge.checkpoints.folder import RECORDS_FOLDER, Checkpoint
from sigmerge.checkpoints.mixture import (
    DenseExpert,
    Family,
    Mixture,
    fitting,
    mixture,
    stored_type,
    with_rows,
)
from sigmerge.checkpoints.pool import PoolMembers, open_members
from sigmerge.checkpoints.publishing import check_space, check_target, real_target
from sigmerge.checkpoints.writer import plan_layout
from sigmerge.engine.machine import INTERPRETER, LIBRARIES
from sigmerge.errors import PoolError, require
from sigmerge.jobs.dense import DenseJob, run_dense
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import say_before
from sigmerge.jobs.steps import Description, GatesStep
from sigmerge.kept import Derivation
from sigmerge.operators.base import Site
from sigmerge.operators.passthrough import SideBySide
from sigmerge.probing.gates import gate_rows, random_gates, read_gates, undecided
from sigmerge.probing.loading import checked_device
from sigmerge.recipe import Recipe
from sigmerge.recipe.moe import BASE, RANDOM, MixtureRecipe
from sigmerge.recipe.record import RecipeModel
from sigmerge.records import RECIPE
from sigmerge.results import Merged

METHOD = SideBySide.name
_POWER = "{} experts are no power of two; llama.cpp loads only mixtures whose number is one"


@dataclass(frozen=True)
class _Opened:
    """The models of a file, and the mixture that they make; its routers have no rows yet."""

    members: Mapping[str, Checkpoint]
    family: Family
    made: Mixture
    notes: tuple[str, ...]


@dataclass(frozen=True)
class MoeJob:
    """A mixture in a new folder."""

    recipe: MixtureRecipe
    out: Path
    options: Options

    def check(self) -> None:
        again = real_target(self.out) / RECORDS_FOLDER / RECIPE
        files = [place for place in self.recipe.kept if place != again]
        check_target(self.out, self.options.overwrite, files)

    def describe(self) -> Description:
        self.check()
        opened = _open(self.recipe, self.options)
        merging = _dense(self.recipe, opened, self.options).describe(self.options.threads)
        check_space(self.out, merging.bytes_to_write)
        return Description((_gates_step(self.recipe, opened, self.options), merging),
                           self.options.threads)  # fmt: skip

    def run(self) -> Merged:
        self.check()
        return run_dense(plan_mixture(self.recipe, self.options), self.out, self.options)


def plan_mixture(recipe: MixtureRecipe, options: Options) -> DenseJob:
    """The merge that makes the mixture, with the rows of its routers."""
    opened = _open(recipe, options)
    base, depth = opened.members[BASE], opened.made.layout.stack.depth
    wanted = _derivation(recipe, base, options)
    if wanted is None:
        width = int(base.config["hidden_size"])
        shape = depth, len(recipe.gated), width
        gates, keys = random_gates(shape, recipe.gate_mode, recipe.seed), {}
    else:
        entry = kept.get(wanted)
        gates, keys = read_gates(entry), {"gates": wanted.full}
    if len(gates) != depth:
        raise PoolError(f"{base.place}: {len(gates)} blocks ran, the tensor names show {depth}.")
    alike = undecided(gates) if len(recipe.gated) > 1 else []
    notes = opened.notes
    if alike:
        told = "all blocks" if len(alike) == depth else f"blocks {', '.join(map(str, alike))}"
        notes += (f"the rows of the router are much alike in {told}: some experts will hardly be "
                  "chosen; give prompts that differ more",)  # fmt: skip
    made = with_rows(opened.made, BASE, gates)
    job = _dense(recipe, replace(opened, made=made, notes=notes), options)
    return replace(job, statistics_keys=keys)


def _open(recipe: MixtureRecipe, options: Options) -> _Opened:
    """The models, checked from their headers."""
    members = open_members(recipe.members, options.allow_pickle)

    def dense(which: str) -> list[DenseExpert]:
        return [
            DenseExpert(one.member, members[one.member], one.noise, one.scale)
            for one in getattr(recipe, which)
        ]

    experts, shared = dense("experts"), dense("shared")
    base = members[BASE]
    family = fitting(base, experts, shared, recipe.architecture)
    if family.shared_gate and len(recipe.gated) == len(recipe.experts):
        raise PoolError(f"{family.title} has a gate for the shared expert: give it "
                        "positive_prompts, or gate_mode: random.")  # fmt: skip
    made = mixture(
        family, (BASE, base), experts, shared, per_token=recipe.per_token, seed=recipe.seed
    )
    check_tokenizer(base.path)
    if recipe.gate_mode not in RANDOM:
        purpose = f"gate_mode: {recipe.gate_mode}"
        require(purpose, models=["torch", "transformers"])
        checked_device(options.device)
    said = disagreements({name: one.config for name, one in members.items()}, BASE)
    say_before(said, options)
    own = [f"{name}: {note}" for name, one in members.items() for note in one.notes]
    count = len(experts)
    powers = [_POWER.format(count)] if count & (count - 1) else []
    return _Opened(members, family, made, (*recipe.notes, *own, *said, *powers))


def _dense(recipe: MixtureRecipe, opened: _Opened, options: Options) -> DenseJob:
    """The mixture as a merge that takes every tensor from one member."""
    made, written = opened.made, recipe.out_dtype or stored_type(opened.members[BASE])
    sites = {}
    for member, tensors in made.tensors.items():
        for name, tensor in tensors.items():
            if tensor.floating and tensor.size:
                block, depth = made.layout.stack.block_of(name), made.layout.stack.depth
                settings = {"scale": (made.scales.get(name, 1.0),)}
                sites[name] = Site(name, tensor.size, block, depth, (member,), settings,
                                   recipe.seed, tensor.shape)  # fmt: skip
    specs = [
        (name, written if tensor.floating else tensor.dtype, tensor.shape)
        for name, tensor in sorted(made.layout.tensors.items(), key=lambda one: natural(one[0]))
    ]
    experts = {
        name: replace(opened.members[name], tensors=tensors)
        for name, tensors in made.tensors.items()
    }
    pool = PoolMembers(None, experts, output=made.layout)
    layout = plan_layout(specs, options.max_shard_bytes)
    operator = SideBySide(opened.family.title, len(recipe.experts), recipe.per_token)
    return DenseJob(_as_recipe(recipe, operator, opened.notes, written), operator, pool,
                    dict(sorted(sites.items())), layout,
                    allow_nonfinite=options.allow_nonfinite)  # fmt: skip


def _as_recipe(
    recipe: MixtureRecipe, operator: SideBySide, notes: tuple[str, ...], written: str
) -> Recipe:
    models = (RecipeModel(name, path, {}) for name, path in recipe.members.items())
    return Recipe(
        operator=operator,
        method=METHOD,
        reference=None,
        models=tuple(models),
        parameters={},
        preset="mergekit",
        seed=recipe.seed,
        out_dtype=written,
        tokenizer=None,
        anchor=None,
        repair=None,
        folder=recipe.folder,
        text=recipe.text,
        notes=notes,
        files=recipe.files,
    )


def _derivation(recipe: MixtureRecipe, base: Checkpoint, options: Options) -> Derivation | None:
    """The rows as they are kept; None where they are drawn."""
    if recipe.gate_mode in RANDOM:
        return None

    def progress(done: int, total: int) -> None:
        options.progress("reading prompts", done, total)

    prompts = [one.prompts for one in recipe.gated]
    device, trust = options.device, options.trust_remote_code
    return gate_rows(base, prompts, recipe.gate_mode, device, trust, progress)


def _gates_step(recipe: MixtureRecipe, opened: _Opened, options: Options) -> GatesStep:
    """The rows of the routers as a step of a dry run."""
    base = opened.members[BASE]
    wanted = _derivation(recipe, base, options)
    there = wanted is None or kept.look(wanted) is not None
    prompts = {text for one in recipe.gated for side in one.prompts for text in side}
    reads = not there and recipe.gate_mode != "cheap_embed"
    blocks = [0] * (base.stack.depth + 1)
    for name, tensor in base.tensors.items():
        block = base.stack.block_of(name)
        blocks[base.stack.depth if block is None else block] += 4 * tensor.size
    return GatesStep(
        family=opened.family.title,
        experts=len(recipe.experts),
        mode=recipe.gate_mode,
        prompts=0 if wanted is None else len(prompts),
        state="drawn" if wanted is None else "kept" if there else "to be computed",
        bytes_to_read=base.nbytes if reads else 0,
        peak_memory_bytes=LIBRARIES + 2 * max(blocks) if reads else INTERPRETER,
    )
