"""The method and every ablation and control of the paper, as one table; and the allocation itself.

A variant changes named parts of the default and leaves the rest untouched. `allocate` takes the
measurements to the quotas that claiming spends.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sigmerge.errors import RecipeError
from sigmerge.method import budget, conflict, deficit
from sigmerge.method.shapes import Float64, Int64

ONE_SEED: Final = (0,)
THREE_SEEDS: Final = (0, 1, 2)
FIVE_SEEDS: Final = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Variant:
    """One row of the table. A deterministic variant needs one seed only."""

    description: str
    seeds: tuple[int, ...] = ONE_SEED
    views: tuple[str, ...] = conflict.VIEWS
    capacity: Literal["measured", "uniform", "inverted", "slope_inverted", "permuted"] = "measured"
    share: Literal["measured", "equal", "inverted", "random"] = "measured"
    order: Literal["deficit", "random", "reverse"] = "deficit"
    selection: Literal["magnitude", "random"] = "magnitude"
    update: Literal["dense", "sparse"] = "dense"


VARIANTS: Final[Mapping[str, Variant]] = {
    "default": Variant("the method as the paper states it"),
    "uniform_capacity": Variant("every layer opens the mean capacity", capacity="uniform"),
    "equal_share": Variant("every domain gets the same share", share="equal"),
    "sparse_update": Variant(
        "admitted entries are dropped at random and the rest rescaled",
        seeds=THREE_SEEDS,
        update="sparse",
    ),
    "inverted_capacity": Variant(
        "the layer that opened most opens least (same capacities, ranks reversed)",
        capacity="inverted",
    ),
    "slope_inverted_capacity": Variant(
        "capacity grows with conflict (the slope's sign is changed)", capacity="slope_inverted"
    ),
    "permuted_capacity": Variant(
        "capacities are shuffled over layers", seeds=THREE_SEEDS, capacity="permuted"
    ),
    "inverted_share": Variant(
        "the smallest deficit gets the largest share (same shares, ranks reversed)",
        share="inverted",
    ),
    "random_share": Variant(
        "shares are drawn uniformly from the simplex", seeds=THREE_SEEDS, share="random"
    ),
    "random_mask": Variant(
        "same quotas, coordinates drawn at random", seeds=THREE_SEEDS, selection="random"
    ),
    "all_random": Variant(
        "permuted capacity, random share and random mask together",
        seeds=FIVE_SEEDS,
        capacity="permuted",
        share="random",
        selection="random",
    ),
    "view_representation": Variant(
        "capacity from the representation view alone", views=("representation",)
    ),
    "view_direction": Variant("capacity from the direction view alone", views=("direction",)),
    "view_sign": Variant("capacity from the sign view alone", views=("sign",)),
    "order_random": Variant("domains claim in random order", seeds=THREE_SEEDS, order="random"),
    "order_reverse": Variant("the smallest share claims first", order="reverse"),
}
"""Name -> variant: the default, the component ablations, the directional controls, the single
views and the claim orders of the paper's appendix."""


@dataclass(frozen=True)
class Allocation(budget.ClaimPlan):
    """Claims, and every number that led to them. `deficit` is what was measured, `share` and
    `capacity` are those of the variant."""

    variant: str
    seed: int
    c_min: float
    c_max: float
    views: dict[str, Float64[np.ndarray, "layers"]]
    conflict: Float64[np.ndarray, "layers"]
    deficit: Float64[np.ndarray, "domains"]
    selection: Literal["magnitude", "random"]
    update: Literal["dense", "sparse"]
    warnings: tuple[str, ...]


def allocate(
    views: Mapping[str, Float64[np.ndarray, "layers"]],
    gaps: Float64[np.ndarray, "domains"],
    coordinates: Int64[np.ndarray, "layers"],
    domains: Sequence[str],
    *,
    c_min: float,
    c_max: float,
    variant: str = "default",
    seed: int = 0,
    admit: int | None = None,
) -> Allocation:
    """Algorithm 1, lines 2–9 and the quotas of line 14, under one of the variants.

    `gaps` are the deficits g_d in the order of `domains`, `coordinates` the layer sizes n_i.
    `admit` opens capacity to that many of the most deficient domains only (ours).
    Without any deficit all quotas are 0, whatever the variant: the anchor is the result.
    """
    chosen = VARIANTS[variant]
    if not 0.0 <= c_min <= c_max <= 1.0:
        raise RecipeError(f"Capacity needs 0 ≤ c_min ≤ c_max ≤ 1, not {c_min:g} and {c_max:g}.")
    measured = [name for name in chosen.views if name in views]
    if not measured:
        raise RecipeError(f"Variant {variant} needs the {chosen.views[0]} view, not measured.")
    score, warnings = conflict.conflict_score(views, measured)
    if len(measured) < len(chosen.views):
        warnings += (f"Conflict is the mean of these views only: {', '.join(measured)}.",)
    capacity = _capacity(score, chosen, c_min, c_max, seed)
    admitted = gaps if admit is None else deficit.most_deficient(gaps, admit)
    share = deficit.shares(admitted)
    if share.any():
        some = np.flatnonzero(share) if admit is not None else np.arange(share.size)
        share[some] = _share(share[some], chosen, seed)
    else:
        warnings += ("No domain falls short of its reference: the anchor is returned unchanged.",)
    order = _order(share, chosen, seed)
    plan = budget.claim_plan(domains, capacity, share, coordinates, order)
    return Allocation(
        **vars(plan),
        variant=variant,
        seed=seed,
        c_min=c_min,
        c_max=c_max,
        views=dict(views),
        conflict=score,
        deficit=gaps,
        selection=chosen.selection,
        update=chosen.update,
        warnings=warnings,
    )


def rank_reversed(values: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """The same values, assigned so that the largest goes where the smallest was, and so on."""
    ranking = np.argsort(values, kind="stable")
    reversed_ = np.empty_like(values)
    reversed_[ranking] = values[ranking[::-1]]
    return reversed_


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Random numbers for one purpose. No other purpose, present or future, shifts them."""
    digest = hashlib.sha256(f"{seed}\0{purpose}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def _capacity(
    score: Float64[np.ndarray, "layers"], variant: Variant, c_min: float, c_max: float, seed: int
) -> Float64[np.ndarray, "layers"]:
    measured = conflict.capacity(score, c_min, c_max)
    match variant.capacity:
        case "measured":
            return measured
        case "uniform":
            return np.full_like(measured, measured.mean())
        case "inverted":
            return rank_reversed(measured)
        case "slope_inverted":
            return conflict.capacity(1.0 - score, c_min, c_max)
        case "permuted":
            return generator(seed, "capacity permutation").permutation(measured)


def _share(
    measured: Float64[np.ndarray, "domains"], variant: Variant, seed: int
) -> Float64[np.ndarray, "domains"]:
    match variant.share:
        case "measured":
            return measured
        case "equal":
            return np.full_like(measured, 1.0 / measured.size)
        case "inverted":
            return rank_reversed(measured)
        case "random":
            return generator(seed, "random share").dirichlet(np.ones_like(measured))


def _order(
    share: Float64[np.ndarray, "domains"], variant: Variant, seed: int
) -> Int64[np.ndarray, "domains"]:
    match variant.order:
        case "deficit":
            return budget.claim_order(share)
        case "reverse":
            return budget.claim_order(share)[::-1]
        case "random":
            return generator(seed, "claim order").permutation(share.size)
