"""What a repair: section that gives shares and capacity claims; nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.pool import PoolMembers
from sigmerge.checkpoints.writer import mirror_layout
from sigmerge.errors import RecipeError
from sigmerge.jobs.occupancy import OccupancyJob
from sigmerge.jobs.pools import block_sites
from sigmerge.method import budget
from sigmerge.method.occupancy import Update
from sigmerge.recipe.scored import RepairSection
from sigmerge.records import RepairPlan, Round


@dataclass(frozen=True)
class Decided:
    """What a recipe's own shares and capacity claim."""

    turn: Round
    capacity: tuple[float, ...]
    coordinates: tuple[int, ...]


def decide(section: RepairSection, pool: PoolMembers) -> Decided:
    """The quotas of a repair: section that gives shares and capacity; RecipeError if too many."""
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
    quota = budget.quotas(capacity, share, coordinates)
    if problems := budget.infeasible(quota, coordinates):
        raise RecipeError("The quotas do not fit; lower repair.capacity.", problems)
    turn = Round(
        order=tuple(domains[d] for d in budget.claim_order(share)),
        quota=tuple(map(tuple, quota.tolist())),
        share=dict(zip(domains, share.tolist(), strict=True)),
    )
    return Decided(turn, tuple(capacity.tolist()), tuple(coordinates.tolist()))


def decided_job(section: RepairSection, pool: PoolMembers, anchor: Checkpoint) -> OccupancyJob:
    """The repair of an anchor by such a section."""
    assert not isinstance(section.scale, str)
    update = Update(section.scale, section.update, seed=section.seed)
    rounds = (decide(section, pool).turn,)
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
    turn = decide(RepairSection.model_validate(given), pool).turn
    return given if (turn.order, turn.quota) == (plan.order, plan.quota) else None
