"""The dry run of a suite on a pool: merges, evaluations, items, tokens and disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sigmerge.engine.machine import LIBRARIES
from sigmerge.errors import RecipeError, ScoreError
from sigmerge.jobs import capture
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import merged_sites, open_merge_pool, open_repair_pool
from sigmerge.jobs.profile import describe_profile
from sigmerge.jobs.steps import AnchorsStep, Step, SuiteStep
from sigmerge.lab.experiments.plan import PoolPlan
from sigmerge.lab.experiments.scoring import benchmarks_of
from sigmerge.lab.experiments.suite import MethodSection
from sigmerge.recipe.scored import SearchSection


def describe_pool(plan: PoolPlan, options: Options) -> Step:
    """One pool of a suite as a step of a dry run. Every method is checked against its headers."""
    suite = plan.suite
    recipe = plan.recipe(suite.anchors[0], 0, suite.default, 0)
    pool = open_repair_pool(recipe, options)
    profile = describe_profile(recipe, pool, options)
    for method in (*suite.anchors, *suite.baselines):
        _check_merge(plan, method, options)
    anchors = sum(len(method.seeds) for method in suite.anchors)
    baselines = sum(len(method.seeds) for method in suite.baselines)
    variants = sum(len(setting.seeds) for setting in suite.variants())
    on = plan.place.variants_on
    studied = [m for m in suite.anchors if on is None or m.name in on]
    repairs = anchors + variants * len(studied)
    partitions = anchors * len(suite.section.partitions)
    experts = len(pool.experts)
    merges = anchors + repairs + baselines
    items, notes = _items(plan)
    calibrated, evaluated = experts + anchors + baselines, experts + merges
    searches = sum(
        SearchSection.model_validate(section).evaluation_calls * len(method.seeds)
        for method in suite.baselines
        if (section := method.content().get("search")) is not None
    )
    return SuiteStep(
        pool=plan.name,
        runs=experts + merges + partitions,
        experts=experts,
        anchors=anchors,
        repairs=repairs,
        partitions=partitions,
        baselines=baselines,
        merges=merges,
        evaluations={"calibration": calibrated, "evaluation": evaluated},
        search_calls=searches,
        items_at_most=_sum(items["items"], calibrated, evaluated),
        tokens_at_most=_sum(items["tokens"], calibrated, evaluated),
        disk_at_once=2 * pool.layout.nbytes,
        bytes_to_read=merges * sum(member.nbytes for member in pool.members.values()),
        bytes_to_write=merges * pool.layout.nbytes,
        peak_memory_bytes=max(profile.peak_memory_bytes, LIBRARIES),
        evaluation_calls=calibrated + evaluated + searches,
        notes=tuple(notes),
    )


def describe_ranking(plan: PoolPlan, options: Options) -> Step:
    """The ranking of a pool's anchors as a step of a dry run."""
    suite = plan.suite
    pool = open_repair_pool(plan.recipe(suite.anchors[0], 0, suite.default, 0), options)
    for method in suite.anchors:
        _check_merge(plan, method, options)
    items, notes = _items(plan)
    count, calls = len(suite.anchors), len(pool.experts) + len(suite.anchors)
    return AnchorsStep(
        pool=plan.name,
        experts=len(pool.experts),
        anchors=tuple(method.name for method in suite.anchors),
        items_at_most=_sum(items["items"], calls, 0),
        disk_at_once=pool.layout.nbytes,
        bytes_to_read=count * sum(member.nbytes for member in pool.members.values()),
        bytes_to_write=count * pool.layout.nbytes,
        peak_memory_bytes=LIBRARIES,
        evaluation_calls=calls,
        notes=tuple(notes),
    )


def _check_merge(plan: PoolPlan, method: MethodSection, options: Options) -> None:
    """The checks of `plan_dense`, without hashing weights for the keys of statistics."""
    recipe = plan.recipe(method, method.seeds[0], plan.suite.default, 0)
    pool, outside = open_merge_pool(recipe, options)
    assert recipe.operator is not None
    problems = recipe.operator.check(list(merged_sites(recipe, pool, outside).values()))
    if problems and recipe.search is None:
        raise RecipeError(f"{method.name}: the parameters do not fit:", problems)
    if recipe.operator.needs:
        capture.plan_captures(recipe, pool, options)


def _sum(each: dict[str, int] | None, calibrated: int, evaluated: int) -> int | None:
    if each is None:
        return None
    return calibrated * each["calibration"] + evaluated * each["evaluation"]


def _items(plan: PoolPlan) -> tuple[dict[str, dict[str, int] | None], list[str]]:
    """Items and tokens of one evaluation by split, and what about them is not known here."""
    if plan.suite.section.evaluate is None:
        return {"items": None, "tokens": None}, ["a command scores: its items are not known"]
    from sigmerge.evaluation import splits
    from sigmerge.evaluation.estimate import estimate

    suite, how = benchmarks_of(plan.place, plan.suite, plan.options)
    both = ("calibration", "evaluation")
    try:
        found, absent = splits.load_scored(suite, replace(how, data=replace(how.data, hub=False)))
    except ScoreError:
        records = [mark.records or 0 for mark in suite.benchmarks.values()]
        drawn = (suite.calibration_items or 0) * len(suite.domains)
        items = {"calibration": drawn, "evaluation": sum(n - n // splits.SHARE for n in records)}
        return {"items": items, "tokens": None}, [
            "no benchmark has its records here: items are those the suite declares, tokens unknown"
        ]
    content = splits.build(suite, found)
    chosen: dict[str, Any] = {
        split: {name: splits.members(content, name, split, each) for name, each in found.items()}
        for split in both
    }
    costs = {split: estimate(suite, chosen[split], chosen[split], None) for split in both}
    notes = [f"{name}: has no records here" for name in absent]
    return {
        "items": {split: costs[split]["items"] for split in both},
        "tokens": {split: costs[split]["tokens_at_most"] for split in both},
    }, notes
