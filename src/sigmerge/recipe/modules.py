"""The modules of a recipe: parts of a model, each with models, layers and values of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.modules import FAMILIES, LAYERLESS
from sigmerge.recipe.reading import Reading
from sigmerge.recipe.record import RecipeModel
from sigmerge.recipe.sections import ModelSection, ModuleSection
from sigmerge.recipe.settings import ParameterCheck
from sigmerge.recipe.slices import check_count

BY_FILTER = (
    "write models:, and give a part values of its own by what its tensors are called: "
    "weight: [{filter: vision_tower, value: 0.2}, {value: 0.5}]"
)
Modules = Mapping[str, ModuleSection]


def differing_modules(reading: Reading, given: Mapping[str, Any]) -> dict[str, ModuleSection]:
    """The sections of modules that are merged one by one; empty if something is wrong with them."""
    if sorted(given) not in [sorted(family) for family in FAMILIES]:
        known = "; or ".join(", ".join(family) for family in FAMILIES)
        reading.problem(
            ("modules",),
            f"{', '.join(given)} are merged one by one, and so must be all modules of a model: "
            f"{known} (mergekit writes a model without the tensors of the others). "
            f"Else {BY_FILTER}",
        )
        return {}
    sections = {}
    for name, content in given.items():
        section = reading.checked(ModuleSection, content, ("modules", name))
        if section is None:
            continue
        if told := _wrong(name, section):
            reading.problem(("modules", name), told)
        else:
            sections[name] = section
    return sections if len(sections) == len(given) else {}


def _wrong(name: str, section: ModuleSection) -> str:
    """What is wrong with what a module says it is merged of."""
    if section.models and section.slices:
        return "slices: and models: both say what is merged; give one"
    if not section.models and not section.slices:
        return "no expert is listed"
    if name in LAYERLESS and len(section.slices or ()) > 1:
        return "has no layers that could be stacked; give its models under models:"
    return ""


def all_slices(reading: Reading, modules: Modules) -> tuple[list[Any], list[tuple[str, bool]]]:
    """The slices of all modules, and of each its module and whether it is whole.

    The models of a module are one slice with all their layers.
    """
    found: list[Any] = []
    kinds: list[tuple[str, bool]] = []
    for name, section in modules.items():
        place = ("modules", name)
        for i, piece in enumerate(section.slices or ()):
            whole = name in LAYERLESS
            if whole:
                reading.note(f"{name} has no layers; it is taken whole, whatever layer_range says")
            reading.moved["slices", len(found)] = (*place, "slices", i)
            found.append(piece)
            kinds.append((name, whole))
        if section.models:
            at = ("slices", len(found))
            reading.moved[at], reading.moved[*at, "sources"] = place, (*place, "models")
            none = {"layer_range": [0, 0]}
            sources = [{**m, **none} if isinstance(m, dict) else m for m in section.models]
            found.append({"sources": sources})
            kinds.append((name, True))
    return found, kinds


def all_models(reading: Reading, modules: Modules) -> list[Any]:
    """Every model that stands in a module, once and without its parameters.

    What is wrong with one is reported where it stands first.
    """
    found: list[Any] = []
    known: list[Any] = []
    for name, section in modules.items():
        for i, entry in enumerate(section.models or ()):
            place = ("modules", name, "models", i)
            plain = same = entry
            if isinstance(entry, dict):
                plain = {key: value for key, value in entry.items() if key != "parameters"}
                checked = reading.checked(ModelSection, plain, place)
                path = reading.path((*place, "model"), checked.model) if checked else None
                same = (path, checked.name, checked.exemplars) if checked and path else plain
            if same not in known:
                reading.moved["models", len(found)] = place
                found.append(plain)
                known.append(same)
    return found


def joined_settings(
    reading: Reading, module: str, nearer: Mapping[str, Any], farther: Mapping[str, Any]
) -> dict[str, Any]:
    """A module's parameters; the recipe's hold where no filter of the module's matches."""
    joined = {**farther, **nearer}
    for name, value in nearer.items():
        place = reading.moved["parameters", name] = ("modules", module, "parameters", name)
        if name not in farther or (rules := _rules(value)) is None:
            continue
        if not rules:
            reading.passed_over(place, "an empty list has no value")
        behind = _rules(farther[name])
        first = len(rules)
        if behind is None:
            behind = [{"value": farther[name]}]
            reading.moved["parameters", name, first, "value"] = ("parameters", name)
        for i in range(len(behind)):
            reading.moved["parameters", name, first + i] = ("parameters", name, i)
        joined[name] = [*rules, *behind]
    return joined


def _rules(setting: Any) -> list[Any] | None:
    """The conditions of a setting; None if it is a value."""
    listed = [setting] if isinstance(setting, dict) else setting
    conditions = isinstance(listed, list) and all(isinstance(rule, dict) for rule in listed)
    return listed if conditions else None


def shared_settings(
    reading: Reading, modules: Modules, judge: ParameterCheck | None
) -> dict[str, Mapping[str, Any]]:
    """What each module says of all its models."""
    shared: dict[str, Mapping[str, Any]] = {}
    for name, section in modules.items():
        given = section.parameters or {}
        place = ("modules", name, "parameters")
        if "outside" in given:
            told = "is one for the whole recipe; write it under parameters: of the recipe"
            reading.problem((*place, "outside"), told)
        shared[name] = judge.settings(place, given) if judge else {}
    return shared


def by_module(
    reading: Reading, modules: Modules, judge: ParameterCheck | None, models: Sequence[RecipeModel]
) -> list[RecipeModel]:
    """The models with what each module says of them."""
    parts: dict[Path, dict[str, Mapping[str, Any]]] = {model.path: {} for model in models}
    for name, section in modules.items():
        place = ("modules", name)
        for i, entry in enumerate(section.models or ()):
            here = (*place, "models", i)
            checked = reading.checked(ModelSection, entry, here)
            path = reading.path((*here, "model"), checked.model) if checked else None
            if checked is None or judge is None or path not in parts:
                continue  # reported already, or the base model
            if name in parts[path]:
                reading.problem(here, f"{checked.model} is listed twice")
            own = checked.parameters or {}
            parts[path][name] = judge.settings((*here, "parameters"), own, per_model=True)
        count = sum(name in part for part in parts.values())
        check_count(reading, judge.operator if judge else None, place, count)
    # One that stands in none is the base model, which mergekit counts into a soup everywhere.
    return [replace(model, parts=parts[model.path] or None) for model in models]
