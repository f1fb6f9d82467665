"""What a repair: section that gives shares and capacity claims; nothing is measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.writer import mirror_layout
from sigmerge.errors import RecipeError
from sigmerge.jobs.occupancy import OccupancyJob
from sigmerge.jobs.pools import block_sites
from sigmerge.method.budget import ClaimPlan, claim_plan
from sigmerge.method.controls import Allocation
from sigmerge.method.occupancy import Update
from sigmerge.recipe.scored import RepairSection
from sigmerge.records import RepairPlan, Round


def decide(section: RepairSection, pool: PoolMembers) -> ClaimPlan:
    """The claims of a repair: section that gives shares and capacity; RecipeError if too many."""
    assert section.shares is not None and section.capacity is not None
    domains = tuple(pool.experts)
    coordinates = np.array([sum(site.size for site in block) for block in block_sites(pool)])
    given = section.capacity
    capacity = np.array(given if isinstance(given, list) else [given] * coordinates.size)
    if capacity.size != coordinates.size:
        raise RecipeError(
            f"repair.capacity: has {capacity.size} numbers for {coordinates.size} layers."
        )
    share = np.array([section.shares.get(domain, 0.0) for domain in domains])
    return claim_plan(domains, capacity, share, coordinates)


def round_of(found: ClaimPlan) -> Round:
    """The claims of one round as a plan has them, with the deficits if any were measured."""
    by_domain = partial(zip, found.domains, strict=True)
    return Round(
        order=found.order,
        quota=tuple(map(tuple, found.quota.tolist())),
        deficit=dict(by_domain(found.deficit.tolist())) if isinstance(found, Allocation) else {},
        share=dict(by_domain(found.share.tolist())),
    )


def planned(found: ClaimPlan) -> dict[str, Any]:
    """The claims of a first round, under the names of a plan."""
    return {
        **dict(round_of(found)),
        "capacity": tuple(found.capacity.tolist()),
        "coordinates": tuple(found.coordinates.tolist()),
    }


def decided_job(section: RepairSection, pool: PoolMembers, anchor: Checkpoint) -> OccupancyJob:
    """The repair of an anchor by such a section."""
    assert not isinstance(section.scale, str)
    update = Update(section.scale, section.update, seed=section.seed)
    rounds = (round_of(decide(section, pool)),)
    return OccupancyJob(pool, anchor, rounds, update, None, mirror_layout(anchor))


def decided_of(plan: RepairPlan, pool: PoolMembers) -> dict[str, Any] | None:
    """The repair: section that claims what a plan claims, without any score; None if none can."""
    if plan.selection != "magnitude" or plan.update == "sparse" or plan.later_rounds:
        return None
    if not any(plan.share.values()):
        return None
    given = {
        "shares": dict(plan.share),
        "capacity": list(plan.capacity),
        "update": plan.update,
        "scale": plan.scale,
        "guard": "off",
        "seed": plan.seed,
    }
    turn = round_of(decide(RepairSection.model_validate(given), pool))
    return given if (turn.order, turn.quota) == (plan.order, plan.quota) else None
