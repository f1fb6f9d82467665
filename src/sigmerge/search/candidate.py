"""Candidates: a genotype as a plain recipe, and its weights in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.reader import Reader
from sigmerge.checkpoints.writer import Layout
from sigmerge.kernels.convert import STORAGE, WIDEN
from sigmerge.recipe import Recipe
from sigmerge.search.evolve import Genotype, Space

Weights = Mapping[str, np.ndarray[Any, Any]]
"""Floating tensors by name, float32, holding exactly what the stored type can."""


@dataclass(frozen=True)
class Template:
    """A recipe without what is searched. Its paths are absolute: it means the same anywhere."""

    method: str
    models: Mapping[str, str]
    parameters: Mapping[str, Any]
    common: Mapping[str, Any]

    def candidate(self, space: Space, genotype: Genotype, seed: int) -> dict[str, Any]:
        """The recipe of a genotype; nothing but this recipe is needed to make it again."""
        each = space.settings(genotype, list(self.models))
        shared = {k: v for k, v in self.parameters.items() if k not in space.parameters}
        return self._recipe(self.method, each, shared, seed)

    def anchor(self, method: str, seed: int, **setting: float) -> dict[str, Any]:
        """A plain merge of the pool in which all experts have the same setting."""
        shared = {k: v for k, v in self.parameters.items() if k == "outside"}
        return self._recipe(method, dict.fromkeys(self.models, setting), shared, seed)

    def _recipe(
        self, method: str, each: Mapping[str, Any], shared: Mapping[str, Any], seed: int
    ) -> dict[str, Any]:
        models = [
            {"model": path, "name": name, "parameters": dict(each[name])}
            for name, path in self.models.items()
        ]
        recipe = {"merge_method": method, **self.common, "models": models, "seed": seed}
        return {**recipe, "parameters": dict(shared)} if shared else recipe


def template(recipe: Recipe) -> Template:
    """What stays of a recipe when its coefficients are searched."""
    given = yaml.safe_load(recipe.text)
    common = {key: given[key] for key in ("preset", "dtype", "out_dtype") if key in given}
    if recipe.reference:
        common["base_model"] = str(recipe.reference)
    if recipe.tokenizer and recipe.tokenizer != recipe.reference:
        common["tokenizer_source"] = str(recipe.tokenizer)
    models = {model.name: str(model.path) for model in recipe.models}
    return Template(recipe.method, models, given.get("parameters") or {}, common)


def candidate_seed(seed: int, index: int) -> int:
    """The seed of a candidate's random drops, from the run's seed and the candidate's index."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


class Memory:
    """A sink for `merge_blocks` that keeps the merge, as it would read when stored and loaded."""

    def __init__(self, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.done: dict[str, Any] = {}
        self._dtypes = {n: slot.dtype for n, slot in layout.slots.items() if slot.dtype in WIDEN}
        self.weights = {name: np.empty(shapes[name], np.float32) for name in self._dtypes}

    def write(self, tensor: str, start: int, raw: np.ndarray[Any, Any]) -> None:
        flat = self.weights[tensor].reshape(-1)
        WIDEN[self._dtypes[tensor]](raw, flat[start : start + raw.size])

    def write_bytes(self, tensor: str, data: memoryview) -> None:
        if tensor in self.weights:
            self.write(tensor, 0, np.frombuffer(data, STORAGE[self._dtypes[tensor]]))

    def finish(self, block: str, record: Any = None) -> None:
        pass


def stored_weights(checkpoint: Checkpoint) -> Weights:
    """The floating tensors of a checkpoint."""
    reader = Reader()
    weights = {}
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype in WIDEN:
            weights[name] = np.empty(tensor.shape, np.float32)
            WIDEN[tensor.dtype](reader.raw(tensor), weights[name].reshape(-1))
    return weights
