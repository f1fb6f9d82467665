"""The layer-domain budget, the integer quotas that realise it, and which domain claims first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sigmerge.errors import RecipeError
from sigmerge.method.deficit import descending
from sigmerge.method.shapes import Float64, Int64

GUARD: Final = 1e-9
"""A target this close to an integer, relatively, is that integer: 0.45 · 0.2 · 100 is 9, not 10."""


@dataclass(frozen=True)
class ClaimPlan:
    """How much of each layer is open, how much of that each domain claims, and who claims first.

    Layers stand in depth order, domains as given; `order` is the claim order π.
    """

    domains: tuple[str, ...]
    capacity: Float64[np.ndarray, "layers"]
    share: Float64[np.ndarray, "domains"]
    order: tuple[str, ...]
    coordinates: Int64[np.ndarray, "layers"]
    quota: Int64[np.ndarray, "layers domains"]


def claim_plan(
    domains: Sequence[str],
    capacity: Float64[np.ndarray, "layers"],
    share: Float64[np.ndarray, "domains"],
    coordinates: Int64[np.ndarray, "layers"],
    order: Int64[np.ndarray, "domains"] | None = None,
) -> ClaimPlan:
    """The quotas of a capacity and shares; RecipeError if a layer has too few coordinates."""
    quota = quotas(capacity, share, coordinates)
    if problems := infeasible(quota, coordinates):
        raise RecipeError(
            "The quotas do not fit; lower c_max, or the capacity that is given, or name fewer "
            "domains.",
            problems,
        )
    turns = tuple(domains[d] for d in (claim_order(share) if order is None else order))
    return ClaimPlan(tuple(domains), capacity, share, turns, coordinates, quota)


def budget(
    capacity: Float64[np.ndarray, "layers"], share: Float64[np.ndarray, "domains"]
) -> Float64[np.ndarray, "layers domains"]:
    """Eq. budget, B = Cρᵀ: the fraction of layer i that domain d may occupy."""
    return np.outer(capacity, share)


def quotas(
    capacity: Float64[np.ndarray, "layers"],
    share: Float64[np.ndarray, "domains"],
    coordinates: Int64[np.ndarray, "layers"],
) -> Int64[np.ndarray, "layers domains"]:
    """k_i,d = ⌈C_i ρ_d n_i⌉ of Alg. 1 and Theorem 1, with n_i = |Ω_i|. A share of 0 gives 0."""
    target = budget(capacity, share) * coordinates[:, None]
    nearest = np.rint(target)
    exact = np.abs(target - nearest) <= GUARD * target
    return np.where(exact, nearest, np.ceil(target)).astype(np.int64)


def infeasible(
    quota: Int64[np.ndarray, "layers domains"], coordinates: Int64[np.ndarray, "layers"]
) -> list[str]:
    """Layers whose quotas do not fit, K_i > n_i: Theorem 1's assumption fails there."""
    return [
        f"layer {layer}: the domains claim {wanted} of {available} coordinates"
        for layer, (wanted, available) in enumerate(
            zip(quota.sum(axis=1), coordinates, strict=True)
        )
        if wanted > available
    ]


def claim_order(share: Float64[np.ndarray, "domains"]) -> Int64[np.ndarray, "domains"]:
    """π: domain indices by decreasing ρ_d, equal shares (ruling 21) in the order of the domains."""
    return descending(share)
