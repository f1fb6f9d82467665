"""Files of mergekit's other commands: what takes them here, what differs, what it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge.errors import RecipeError
from sigmerge.files.yaml_documents import as_yaml, decoded, documents, parse_yaml
from sigmerge.recipe.moe import RANDOM
from sigmerge.recipe.sections import MixtureSection
from sigmerge.recipe.space import CALLS, SPACES


@dataclass(frozen=True)
class Foreign:
    """A file for another of mergekit's commands. `files` are written by hand from what it says."""

    tool: str
    command: str
    differences: tuple[str, ...]
    files: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        yield f"a file of {self.tool}; here: {self.command}"
        yield from (f"- {text}" for text in self.differences)
        for name, text in self.files.items():
            yield ""
            yield f"{name}:"
            yield from (f"  {line}" for line in text.rstrip().splitlines())


def foreign_file(file: Path) -> Foreign | None:
    """What a file is, where it is no recipe of a merge."""
    text = decoded(file, "a recipe in YAML", RecipeError)
    if "---" in text and len(documents(text)) > 1:
        return None
    found = parse_yaml(text, str(file), RecipeError).value
    if not isinstance(found, dict) or "merge_method" in found:
        return None
    if "experts" in found:
        return _mixture(file, found)
    if "genome" in found:
        return _evolved(file, found)
    return None


def _mixture(file: Path, given: Mapping[str, Any]) -> Foreign:
    mode = str(given.get("gate_mode") or "hidden")
    told = ["the file runs as it is; --dry-run checks it against the models' headers"]
    if mode in ("hidden", "hidden_last"):
        told.append(
            "gate_mode: hidden: the base passes the prompts in float32, block by block; mergekit "
            "passes them in bfloat16, so the rows differ in their last digits"
        )
    if mode == "hidden_avg":
        told.append("gate_mode: hidden_avg: padding is not averaged; mergekit counts it")
    if mode in RANDOM:
        told.append("the rows come from another generator, by seed: of the file")
    if mode == "cheap_embed":
        told.append("gate_mode: cheap_embed: the rows are equal to mergekit's")
    if any(isinstance(one, dict) and one.get("noise_scale") for one in given["experts"] or ()):
        told.append("noise_scale: the noise comes from another generator, by seed: of the file")
    told.append("experts are stored one by one, under the names of the published models; mergekit "
                "stacks those of Mixtral and Qwen3-MoE")  # fmt: skip
    unknown = [key for key in given if key not in MixtureSection.model_fields]
    told += [f"{key}: is no key of such a file" for key in unknown]
    return Foreign("mergekit-moe", f"sigmerge moe {file} OUT", tuple(told), {})


def _evolved(file: Path, given: Mapping[str, Any]) -> Foreign:
    genome = given["genome"]
    if not isinstance(genome, dict) or not genome.get("models") or "merge_method" not in genome:
        raise RecipeError(f"{file}: genome: names no models, or no merge_method.")
    method = str(genome["merge_method"])
    tasks = [
        {"name": one} if isinstance(one, str) else dict(one) for one in given.get("tasks") or ()
    ]
    told = list(_other_genes(genome, method))
    if any(float(task.get("weight", 1.0)) != 1.0 for task in tasks):
        told.append(
            "tasks: the mean over them has no weights; a domain of the suite for each task and "
            "objective: domains look for the trade-offs"
        )
    for key in ("limit", "shuffle", "random_init", "fewshot_as_multiturn"):
        if key in given:
            told.append(f"{key}: has no counterpart in a recipe; {_INSTEAD[key]}")
    if "num_fewshot" in given:
        told.append("num_fewshot: is that of the task's own file")
    told.append("a fifth of each task's items calibrates, and the search answers few of those; the "
                "winner is scored on items that it has not seen")  # fmt: skip
    told.append(
        f"the search is MERGE³'s, with {CALLS} evaluation calls by default (mergekit: CMA-ES and "
        "100); interrupted, the same command goes on"
    )
    searchable = method in SPACES
    recipe = {
        "merge_method": method,
        "base_model": genome.get("base_model"),
        "tokenizer_source": genome.get("tokenizer_source"),
        "models": [{"model": str(model)} for model in genome["models"]],
        "parameters": {"normalize": genome["normalize"]} if "normalize" in genome else None,
        "search": {"suite": "suite.yaml"} if searchable else None,
    }
    benchmarks = {
        re.sub(r"\W", "_", str(task["name"])): {
            "harness": "lm_eval",
            "task": task["name"],
            "metrics": {"score": task.get("metric", "acc,none")},
            "chat_template": bool(given.get("apply_chat_template", True)),
        }
        for task in tasks
    }
    suite = {"name": "tasks", "domains": {"tasks": benchmarks}}
    files = {
        "recipe.yaml": as_yaml({key: value for key, value in recipe.items() if value is not None}),
        "suite.yaml": as_yaml(suite),
    }
    verb = "search" if searchable else "tune"
    suffix = "" if searchable else " --suite suite.yaml"
    return Foreign(
        "mergekit-evolve", f"sigmerge {verb} recipe.yaml OUT{suffix}", tuple(told), files
    )


_INSTEAD = {
    "limit": "search: items says how many items a candidate answers",
    "shuffle": "the split draws items by its own seed",
    "random_init": "the first generation is spread over the whole space",
    "fewshot_as_multiturn": "the task's own file says how it is asked",
}


def _other_genes(genome: Mapping[str, Any], method: str) -> Iterator[str]:
    """Where mergekit's genotype has other entries than ours."""
    if method not in SPACES:
        yield (
            f"merge_method: {method} is not searched ({', '.join(SPACES)} are); sigmerge tune "
            "tries anchors and steers their weights"
        )
    if genome.get("layer_granularity"):
        yield (
            f"layer_granularity: {genome['layer_granularity']}: a model has one weight for all of "
            "its layers here, and so fewer numbers to find"
        )
    if genome.get("filters"):
        yield "filters: a model has one weight for all of its tensors here"
    if genome.get("allow_negative_weights"):
        yield "allow_negative_weights: weights lie between 0 and 1 here"
    if genome.get("smooth"):
        yield "smooth: has no meaning where weights do not change from layer to layer"
