"""The modules of a recipe: parts of a model that are merged each with models and values of its own.

mergekit knows the modules of few model types, and by these names. Here the part that a tensor
belongs to follows from the components of its own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sigmerge.recipe.reading import Reading
from sigmerge.recipe.record import EYES, RecipeModel
from sigmerge.recipe.sections import ModelSection, ModuleSection
from sigmerge.recipe.settings import ParameterCheck
from sigmerge.recipe.slices import check_count

FAMILIES = (
    ("text_decoder", "multi_modal_projector", EYES[0]),
    ("text_decoder", "multi_modal_projector", EYES[1]),
    ("encoder", "decoder", "shared"),
)
"""The modules of models that see, and of those that encode and decode."""

BY_FILTER = (
    "write models:, and give a part values of its own by what its tensors are called: "
    "weight: [{filter: vision_tower, value: 0.2}, {value: 0.5}]"
)
Modules = Mapping[str, ModuleSection]


def differing_modules(reading: Reading, given: Mapping[str, Any]) -> dict[str, ModuleSection]:
    """The sections of modules that are not merged alike; empty if something is wrong with them."""
    if sorted(given) not in [sorted(family) for family in FAMILIES]:
        known = "; or ".join(", ".join(family) for family in FAMILIES)
        reading.problem(
            ("modules",),
            f"{', '.join(given)} are not merged alike, and so must be all modules of a model: "
            f"{known} (mergekit writes a model without the tensors of the others). "
            f"Else {BY_FILTER}",
        )
        return {}
    sections = {}
    for name, content in given.items():
        section = reading.checked(ModuleSection, content, ("modules", name))
        if section is not None and not section.models:
            stacked = (
                "the layers of several modules cannot be stacked in one recipe; write models:, or "
                "slices: of one module"
            )
            told = stacked if section.slices else "no expert is listed"
            reading.problem(("modules", name), told)
        elif section is not None:
            sections[name] = section
    return sections if len(sections) == len(given) else {}


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


def by_module(
    reading: Reading, modules: Modules, judge: ParameterCheck | None, models: Sequence[RecipeModel]
) -> tuple[list[RecipeModel], dict[str, Mapping[str, Any]]]:
    """The models with what each module says of them, and what it says of all its own."""
    parts: dict[Path, dict[str, Mapping[str, Any]]] = {model.path: {} for model in models}
    shared: dict[str, Mapping[str, Any]] = {}
    for name, section in modules.items():
        given = section.parameters or {}
        place = ("modules", name)
        if "outside" in given:
            told = "is one for the whole recipe; write it under parameters: of the recipe"
            reading.problem((*place, "parameters", "outside"), told)
        shared[name] = judge.settings((*place, "parameters"), given) if judge else {}
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
    return [replace(model, parts=parts[model.path] or None) for model in models], shared
