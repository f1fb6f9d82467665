"""A checked recipe: what every command works from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sigmerge.operators.base import Operator, Site
from sigmerge.recipe.sections import (
    CaptureSection,
    RepairSection,
    SearchSection,
    TuneSection,
)
from sigmerge.recipe.settings import evaluate


@dataclass(frozen=True)
class RecipeModel:
    name: str
    path: Path
    parameters: Mapping[str, Any]
    exemplars: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. `operator` is None when the anchor is a checkpoint made elsewhere."""

    operator: Operator | None
    method: str
    reference: Path | None
    models: tuple[RecipeModel, ...]
    parameters: Mapping[str, Any]
    preset: str
    seed: int
    out_dtype: str | None
    tokenizer: Path | None
    anchor: Path | None
    repair: RepairSection | None
    folder: Path
    text: str
    notes: tuple[str, ...] = ()
    capture: CaptureSection = field(default_factory=CaptureSection)
    search: SearchSection | None = None
    tune: TuneSection | None = None
    chat_template: str | None = None

    @property
    def experts(self) -> dict[str, Path]:
        return {model.name: model.path for model in self.models}

    @property
    def inputs(self) -> list[Path]:
        """Every folder that is read, and so must not be written."""
        others = [path for path in (self.reference, self.tokenizer, self.anchor) if path]
        return [*others, *self.experts.values()]

    def site(self, tensor: str, size: int, block: int | None, depth: int) -> Site:
        """A tensor with the options that hold for it: filters and depth gradients resolved."""
        t = 0.0 if block is None else block / (depth - 1) if depth > 1 else 1.0
        settings = {}
        for parameter in self.operator.parameters if self.operator else ():
            name = parameter.name
            default = getattr(parameter, self.preset)
            shared = evaluate(self.parameters.get(name), tensor, t)
            if parameter.per_model:
                own = [evaluate(model.parameters.get(name), tensor, t) for model in self.models]
                settings[name] = tuple(_first(value, shared, default) for value in own)
            else:
                settings[name] = _first(shared, default)
        names = tuple(model.name for model in self.models)
        return Site(tensor, size, block, depth, names, settings, self.seed)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
