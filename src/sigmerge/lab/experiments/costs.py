"""The cost of building a checkpoint from nothing, cached parts included (ruling 25)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.folder import RECORDS_FOLDER
from sigmerge.jobs.repair import RepairJob
from sigmerge.jobs.scores import MeasuredScores
from sigmerge.lab.experiments.store import BuildCost
from sigmerge.probing.exemplars import read_prompts
from sigmerge.recipe import Recipe
from sigmerge.records import PLAN, PROVENANCE, Provenance, SearchRecord, read, read_plan
from sigmerge.results import Captured, Merged


@dataclass(frozen=True)
class Shared:
    """Costs that the repairs of a pool share: seconds of the profile, measured once."""

    profile_seconds: float


def on_gpu(recipe: Recipe) -> bool:
    """Whether models that score this recipe's checkpoints answer on a GPU."""
    if recipe.repair is None or recipe.repair.evaluate is None or find_spec("torch") is None:
        return False
    from sigmerge.probing.generate import model_device

    return model_device() == "cuda"


def merge_cost(recipe: Recipe, folder: Path, captures: Iterable[Captured]) -> BuildCost:
    """Cost of a dense merge with the captures it reads, or of a search."""
    records = folder / RECORDS_FOLDER
    if recipe.search is not None:
        return _search_cost(read(SearchRecord, records / "search.json"), on_gpu(recipe))
    provenance = read(Provenance, records / PROVENANCE)
    parts = [one.seconds for one in captures]
    whole = None if provenance.blocks_resumed else provenance.wall_seconds
    seconds = _sum([whole, *parts])
    captured_on_gpu = recipe.capture.device.startswith("cuda")
    without = 0.0 if on_gpu(recipe) else None
    captured: Mapping[str, Any] = read_plan(records / PLAN).capture or {}
    shown = captured.get("exemplars", {})
    return BuildCost(
        wall_seconds=seconds,
        gpu_seconds=_sum(parts) if captured_on_gpu and parts else without,
        spent_seconds=seconds,
        forward_calls=len(shown),
        unlabelled=sum(shown.values()),
    )


def _search_cost(found: SearchRecord, gpu: bool) -> BuildCost:
    """Candidates that answer side by side share the GPU: their seconds are not added up."""
    labelled, each = sum(found.labelled_items.values()), sum(found.items_per_call.values())
    asked = found.asked_seconds
    seconds = None if asked is None else found.wall_seconds
    return BuildCost(
        wall_seconds=seconds,
        gpu_seconds=min(asked, found.wall_seconds) if gpu and asked is not None else None,
        spent_seconds=seconds,
        evaluation_calls=found.evaluation_calls,
        labelled=labelled,
        iterations=found.evaluation_calls,
        spent_calls=found.evaluation_calls + found.ability_runs,
        spent_labelled=found.evaluation_calls * each + found.ability_runs * labelled,
    )


def repair_cost(job: RepairJob, made: Merged, anchor: MeasuredScores, shared: Shared) -> BuildCost:
    """Cost of a repair beyond its anchor; `anchor` has the anchor's calibration scores.

    The looks of the job's scorer are at the experts, the anchor and the candidates, in this order.
    """
    recipe, plan = job.recipe, made.repair
    assert job.scorer is not None
    experts, looks = len(recipe.experts), job.scorer.looks
    counted = _sum([look.seconds for look in looks[experts:]])
    claims = made.provenance.wall_seconds - sum(look.waited for look in looks)
    whole = None if made.provenance.blocks_resumed else max(0.0, claims)
    items = sum(metric.items for metric in anchor.metrics if metric.headline)
    probe = recipe.repair.probe if recipe.repair else None
    return BuildCost(
        wall_seconds=_sum([whole, shared.profile_seconds, counted]),
        gpu_seconds=_sum([counted]) if on_gpu(recipe) else None,
        spent_seconds=_sum([whole, shared.profile_seconds, *(look.seconds for look in looks)]),
        forward_calls=experts if probe else 0,
        evaluation_calls=len(plan.domains),
        labelled=items,
        unlabelled=len(read_prompts(Path(probe))) if probe else 0,
        spent_calls=len(looks) * len(plan.domains),
        spent_labelled=sum(items if look.labelled is None else look.labelled for look in looks),
    )


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return round(sum(known), 3) if len(known) == len(parts) else None
