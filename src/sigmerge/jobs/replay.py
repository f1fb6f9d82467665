"""The repair of a stored plan again, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.publishing import check_target
from sigmerge.checkpoints.remote import place_of
from sigmerge.engine.machine import Meter
from sigmerge.errors import PoolError, RecipeError
from sigmerge.jobs.occupancy import Guard, describe_occupancy, run_occupancy
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import (
    block_sites,
    open_anchor,
    open_repair_pool,
    recipe_of,
    weight_digests,
)
from sigmerge.jobs.steps import Description
from sigmerge.records import RepairPlan, read_repair_plan
from sigmerge.results import Merged


@dataclass(frozen=True)
class ReplayJob:
    """The repair of a plan.json. It needs no scores and no probe."""

    plan_file: Path
    out: Path
    options: Options
    given_anchor: Path | None = None

    def describe(self) -> Description:
        _, pool, _, _ = self._planned()
        return Description((describe_occupancy(pool, self.options.threads),), self.options.threads)

    def run(self) -> Merged:
        meter = Meter()
        plan, pool, stored, text = self._planned()
        verdict = plan.guard
        kept = verdict is not None and verdict.kept == "anchor"
        guard: Guard | None = (lambda folder: verdict) if verdict is not None and kept else None
        return run_occupancy(plan, pool, stored, text, self.out, self.options, meter, guard)

    def _planned(self) -> tuple[RepairPlan, PoolMembers, Checkpoint, str]:
        """The plan, its pool, its anchor, and a recipe that says where it came from."""
        plan = read_repair_plan(self.plan_file)
        recipe = recipe_of(plan)
        pool = open_repair_pool(recipe, self.options)
        path = self.given_anchor or plan.anchor.path
        if path is None:
            raise RecipeError(
                f"{self.plan_file}: the anchor it repaired was not kept; make it again with "
                "`sigmerge merge` (the recipe without repair:) and pass --anchor FOLDER."
            )
        check_target(
            self.out, self.options.overwrite, [*recipe.inputs, place_of(path), self.plan_file]
        )
        stored = open_anchor(place_of(path), pool, self.options, any_architecture=True)
        _check_plan(self.plan_file, plan, pool)
        _check_digests(plan, {**pool.members, "anchor": stored}, self.options)
        return plan, pool, stored, f"# replayed from a plan\n{recipe.text}"


def _check_plan(file: Path, plan: RepairPlan, pool: PoolMembers) -> None:
    """Whether a plan's claims fit the pool."""
    experts, depth = sorted(pool.experts), pool.stack.depth
    sizes = [sum(site.size for site in block) for block in block_sites(pool)]
    claims = np.zeros(depth)
    for turn in plan.rounds:
        if sorted(turn.order) != experts:
            raise RecipeError(f"{file}: order must name each of {', '.join(experts)} once.")
        if len(turn.quota) != depth or any(len(row) != len(experts) for row in turn.quota):
            raise RecipeError(f"{file}: quota must have {depth} rows of {len(experts)} numbers.")
        claims += np.sum(turn.quota, axis=1)
    for layer, (wanted, size) in enumerate(zip(claims, sizes, strict=True)):
        if wanted > size:
            raise RecipeError(f"{file}: layer {layer}: {wanted:g} of {size} coordinates claimed.")


def _check_digests(plan: RepairPlan, members: Mapping[str, Checkpoint], options: Options) -> None:
    promised = {"reference": plan.reference, "anchor": plan.anchor, **plan.experts}
    changed = [
        name
        for name, checkpoint in members.items()
        if (expected := promised[name]) is None
        or sorted(weight_digests(checkpoint, options)) != sorted(expected.sha256)
    ]
    if changed:
        raise PoolError(f"The plan was made with other weights of: {', '.join(changed)}.")
