"""Recipes by the options of mergekit's small commands."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sigmerge.compat.mergekit import MergeConfiguration
from sigmerge.errors import RecipeError
from sigmerge.messages import shown


def shuffled(
    depths: Mapping[str, int], weights: Sequence[float], seed: int, *, full: bool, half: bool
) -> MergeConfiguration:
    """A stack whose layers are drawn from models of these depths.

    Every layer stays at its place, from a model that is drawn by weight; `full`: of each model that
    part of its layers, any of them, in any order.
    """
    models = list(depths)
    chances = list(weights) or [1.0] * len(models)
    if len(chances) != len(models):
        raise RecipeError(f"--weight: {len(chances)} are given for {len(models)} models.")
    draw = random.Random(seed)
    if full:
        picked = [
            (model, draw.randrange(depths[model]))
            for model, part in zip(models, chances, strict=True)
            for _ in range(int(depths[model] * part))
        ]
        draw.shuffle(picked)
        runs = [(model, layer, layer + 1) for model, layer in picked]
    else:
        depth = depths[models[0]]
        if others := [model for model in models if depths[model] != depth]:
            raise RecipeError(f"{others[0]}: has {depths[others[0]]} layers, not {depth}.")
        drawn = [draw.choices(models, chances)[0] for _ in range(depth)]
        runs, first = [], 0
        for model, run in groupby(drawn):
            last = first + len(list(run))
            runs.append((model, first, last))
            first = last
    if not runs:
        raise RecipeError("--weight: no layer is left; give larger ones.")
    return _stack([{"model": m, "layer_range": [a, b]} for m, a, b in runs], half)


def of_layers(content: Any, *, half: bool) -> MergeConfiguration:
    """A stack by a file of bakllama: layers of models, with a factor of what each adds."""
    pieces = content.get("layer_slices") if isinstance(content, dict) else None
    if not isinstance(pieces, list) or not pieces:
        raise RecipeError("layer_slices: is missing; list model, start and end of every slice.")
    sources = []
    for number, piece in enumerate(pieces):
        if not isinstance(piece, dict) or not {"model", "start", "end"} <= piece.keys():
            raise RecipeError(f"layer_slices[{number}]: has model, start and end, not "
                              f"{shown(piece)}.")  # fmt: skip
        source = {"model": piece["model"], "layer_range": [piece["start"], piece["end"]]}
        if piece.get("scale") is not None:
            rules = [{"filter": "down_proj", "value": piece["scale"]}, {"value": 1.0}]
            source["parameters"] = {"scale": rules}
        sources.append(source)
    return _stack(sources, half)


def _stack(sources: Sequence[Mapping[str, Any]], half: bool) -> MergeConfiguration:
    slices = [{"sources": [dict(source)]} for source in sources]
    dtype = {"dtype": "float16"} if half else {}
    return MergeConfiguration(merge_method="passthrough", slices=slices, **dtype)


def of_options(
    models: Sequence[str], densities: Sequence[float], weights: Sequence[float], method: str,
    base_model: str | None, normalize: bool, bf16: bool, naive_count: bool,
) -> MergeConfiguration:  # fmt: skip
    """A merge of models with values of their own; one value is that of all."""
    entries: list[dict[str, Any]] = [{"model": model, "parameters": {}} for model in models]
    shared: dict[str, Any] = {"normalize": normalize}
    lists = {"density": densities, "weight": weights}
    if method == "slerp":
        if len(weights) != 1:
            raise RecipeError("--weight: slerp takes one, its t.")
        shared["t"], lists["weight"] = weights[0], ()
    for key, values in lists.items():
        every = list(values) * len(entries) if len(values) == 1 else list(values)
        if every and len(every) != len(entries):
            raise RecipeError(f"--{key}: {len(every)} are given for {len(entries)} models.")
        for entry, value in zip(entries, every, strict=False):
            entry["parameters"][key] = value
    if base_model and base_model not in models:
        entries.append({"model": base_model})
    if naive_count:
        shared["consensus_method"] = "count"
    content = {"merge_method": method, "models": entries, "parameters": shared}
    base = {"base_model": base_model} if base_model else {}
    return MergeConfiguration({**content, **base, **({"dtype": "bfloat16"} if bf16 else {})})


def of_genome(
    content: Any, calls: int, seed: int
) -> tuple[MergeConfiguration, list[str], list[str]]:
    """The recipe that tunes what a genome of mergekit-evolve would, its tasks, and what is lost."""
    genome = content.get("genome") if isinstance(content, dict) else None
    if not isinstance(genome, dict) or not isinstance(genome.get("models"), list):
        raise RecipeError("genome: is missing; it has models and merge_method.")
    listed = content.get("tasks") or []
    tasks = [str(each.get("name") if isinstance(each, dict) else each) for each in listed]
    method = genome.get("merge_method")
    told = {
        "layer_granularity": "a weight holds for all layers",
        "smooth": "a weight holds for all layers",
        "filters": "a weight holds for all tensors",
        "allow_negative_weights": "weights are not negative",
    }
    lost = [f"genome.{key}: not tuned here: {why}" for key, why in told.items() if genome.get(key)]
    if method == "slerp":
        raise RecipeError("genome.merge_method: slerp has no weights that a tuning moves; take "
                          "linear or task_arithmetic.")  # fmt: skip
    parameters: dict[str, Any] = {"weight": 1 / max(len(genome["models"]), 1)}
    if method in ("ties", "dare_ties"):
        parameters["density"] = 1.0
        lost.append("genome: a density stays as the recipe has it; weights are tuned")
    normalize = genome.get("normalize")
    if normalize is None:
        normalize = method in ("ties", "dare_ties", "linear")
    keys = ("base_model", "tokenizer_source")
    taken = {key: genome[key] for key in keys if genome.get(key) is not None}
    recipe = {
        "merge_method": method, **taken, "models": [{"model": each} for each in genome["models"]],
        "parameters": parameters | ({} if method == "linear" else {"normalize": normalize}),
        "dtype": "bfloat16", "seed": seed, "tune": {"calls": calls, "anchors": [method]},
    }  # fmt: skip
    return MergeConfiguration(recipe), tasks, lost
