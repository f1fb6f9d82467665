"""A recipe whose coefficients are searched: a genotype becomes a plain recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sigmerge.checkpoints.vocabularies import TokenSource
from sigmerge.recipe.record import Recipe
from sigmerge.recipe.space import Genotype, Space


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
    given = recipe.given
    kept = ("preset", "dtype", "out_dtype")
    common: dict[str, Any] = {key: given[key] for key in kept if key in given}
    common |= base_key(recipe) | tokenizer_keys(recipe)
    models = {model.name: str(model.path) for model in recipe.models}
    return Template(recipe.method, models, recipe.written, common)


def base_key(recipe: Recipe) -> dict[str, Any]:
    """The base model of a recipe, if it has one, with what stands in for its architecture, and
    whether experts are matched with its."""
    matched = {"match_experts": True} if recipe.match_experts else {}
    if recipe.reference is None:
        return matched
    path, architecture = str(recipe.reference), recipe.architecture
    if architecture is None:
        return {"base_model": path, **matched}
    base = {"model": {"path": path}, "override_architecture": architecture}
    return {"base_model": base, **matched}


def tokenizer_keys(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says about tokenizer and chat template, wherever it is read: absolute paths,
    and the template itself."""
    template = {"chat_template": recipe.chat_template} if recipe.chat_template else {}
    return {**_vocabulary_key(recipe), **template}


def _vocabulary_key(recipe: Recipe) -> dict[str, Any]:
    wanted = recipe.vocabulary
    if wanted is None:
        return {}
    places = {**recipe.experts, "reference": recipe.reference}

    def entry(token: str, source: TokenSource) -> dict[str, Any]:
        if source.zero:
            return {"source": {"kind": "zero"}, "force": source.force}
        if source.model is None:
            return {"force": source.force}
        by_id = source.token_id is not None
        which = {"token_id": source.token_id} if by_id else {"token": source.token or token}
        model = {"kind": "model_token", "model": str(places[source.model]), **which}
        return {"source": model, "force": source.force}

    section: dict[str, Any] = {"source": "union" if wanted.union else str(recipe.tokenizer)}
    if not wanted.union and recipe.tokenizer in (None, recipe.reference):
        section["source"] = "base"
    if wanted.tokens:
        section["tokens"] = {token: entry(token, s) for token, s in wanted.tokens.items()}
    if wanted.pad:
        section["pad_to_multiple_of"] = wanted.pad
    if wanted.missing:
        section["missing"] = {k: v for k, v in asdict(wanted.missing).items() if k != "seed"}
    return {"tokenizer": section}


def candidate_seed(seed: int, index: int) -> int:
    """The seed of a candidate's random drops, from the run's seed and the candidate's index."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
