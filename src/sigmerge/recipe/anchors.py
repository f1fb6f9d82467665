"""Anchors whose weights are tuned: weights, and a repair, become a plain recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sigmerge.errors import RecipeError
from sigmerge.messages import unknown
from sigmerge.operators.base import Operator
from sigmerge.operators.table import OPERATORS, operator
from sigmerge.recipe.record import Recipe, RecipeModel
from sigmerge.recipe.template import base_key, tokenizer_keys

USUAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "task_arithmetic": {"weight": 0.4},
    "linear": {"weight": 1.0},
    "ties": {"weight": 1.0, "density": 0.2, "normalize": True},
    "dare_ties": {"weight": 1.0, "density": 0.5, "normalize": True},
    "dare_linear": {"weight": 0.4, "density": 0.5},
    "regmean": {"weight": 1.0},
    "fisher": {"weight": 1.0},
    "iso_c": {"weight": 1.0, "lambda": 1.3},
    "iso_cts": {"weight": 1.0, "lambda": 1.3},
    "tsv": {"weight": 1.0, "lambda": 1.3},
    "wudi": {"weight": 1.0, "step": "rms"},
    "boost": {"weight": 1.0, "lambda": 0.5},
    "blend": {"weight": 1.0, "on": ["tsv", "regmean"], "share": 0.5, "tsv.lambda": 1.3},
}
"""Settings of anchors that the recipe does not describe itself; others have their defaults."""
DEFAULT: Final = ("iso_c", "tsv", "task_arithmetic")
READ_TOO: Final = ("regmean", "blend")
"""What is tried besides, where every expert has exemplars."""


@dataclass(frozen=True)
class AnchorRecipe:
    """An operator of a pool without its weights. Paths are absolute: it means the same anywhere.

    An operator that divides by the sum of the weights has no `level`, unless it has `lambda`,
    which then follows the mean weight. One that is not `weighted` has neither: it is made as it is.
    """

    method: str
    models: Mapping[str, Mapping[str, Any]]
    shared: Mapping[str, Any]
    common: Mapping[str, Any]
    weights: Mapping[str, float]
    level: bool
    scale: float | None
    """λ of the operator where it carries the level, else None."""
    weighted: bool = True

    def recipe(
        self, weights: Sequence[float], repair: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The recipe with these weights; nothing but this recipe is needed to make it again."""
        models = [
            {**entry, "parameters": {**entry.get("parameters", {}), **self._weight(weight)}}
            for entry, weight in zip(self.models.values(), weights, strict=True)
        ]
        shared = dict(self.shared)
        if self.scale is not None:
            before = sum(self.weights.values())
            shared["lambda"] = self.scale * sum(weights) / before
        made = {"merge_method": self.method, **self.common, "models": models}
        made |= {"parameters": shared} if shared else {}
        return made | ({"repair": dict(repair)} if repair else {})

    def _weight(self, weight: float) -> dict[str, float]:
        return {"weight": float(weight)} if self.weighted else {}


def anchors_of(
    recipe: Recipe, names: Sequence[str] | None, shown: bool = False
) -> dict[str, AnchorRecipe]:
    """The anchors to tune: those that are named; else the recipe's own and the usual ones.

    Any operator with a weight for each expert can be one, and of those that read exemplars RegMean,
    Fisher, and the blend of TSV and RegMean. With `shown`, RegMean and that blend are among the
    usual ones, where every expert has exemplars.
    """
    if recipe.reference is None:
        raise RecipeError("base_model is missing: tuning needs the reference of the experts.")
    if len(recipe.models) < 2:
        raise RecipeError(
            "There is one expert only: tuning moves weight between experts of several domains."
        )
    own = recipe.method if recipe.operator is not None else None
    chosen = names
    if chosen is None:
        more = READ_TOO if shown and not _without_exemplars(recipe) else ()
        chosen = list(dict.fromkeys([*([own] if own else []), *DEFAULT, *more]))
    known = list(dict.fromkeys([*USUAL, *_weighted(), *([own] if own else [])]))
    problems = [
        f"anchors: {unknown('anchor', name, known)}" for name in chosen if name not in known
    ]
    problems += _unshown(recipe, [name for name in chosen if name in known])
    if not chosen:
        problems.append("anchors: none is listed")
    if problems:
        raise RecipeError("The tuning cannot be run:", problems)
    return {name: _own(recipe) if name == own else _usual(recipe, name) for name in chosen}


def _weighted() -> list[str]:
    """Operators of any number of experts that have a weight for each and read no exemplars."""
    return [
        name
        for name, each in ((name, operator(name)) for name in OPERATORS)
        if not each.needs
        and each.most is None
        and any(p.name == "weight" and p.per_model for p in each.parameters)
    ]


def _without_exemplars(recipe: Recipe) -> list[str]:
    return [model.name for model in recipe.models if model.exemplars is None]


def _unshown(recipe: Recipe, chosen: Sequence[str]) -> list[str]:
    """Problems of anchors that read exemplars, where experts have none."""
    lacking = ", ".join(_without_exemplars(recipe))
    return [
        f"anchors: {name} reads every expert's exemplars, and there are none of {lacking}; give "
        "exemplars: beside the model, or exemplars/NAME.jsonl in the pool's folder"
        for name in chosen
        if lacking and name in USUAL and _operator(name).needs
    ]


def _operator(method: str) -> Operator:
    """The operator of a usual anchor; a blend with its parts."""
    return operator(method, USUAL.get(method, {}).get("on"))


def _own(recipe: Recipe) -> AnchorRecipe:
    """The recipe's operator with the recipe's settings."""
    assert recipe.operator is not None
    given = recipe.given
    known = {p.name: p for p in recipe.operator.parameters}
    weighted = "weight" in known
    shared = {key: value for key, value in recipe.written.items() if key != "weight"}
    default = getattr(known["weight"], recipe.preset) if weighted else 1.0
    weights = {}
    for model in recipe.models:
        value = model.parameters.get("weight", recipe.parameters.get("weight", default))
        if not isinstance(value, int | float):
            raise RecipeError(
                f"{model.name}: its weight differs between layers or tensors; tuning moves one "
                "weight per expert. Give a number."
            )
        weights[model.name] = float(value)
    own: dict[str, dict[str, Any]] = {}
    for model in recipe.models:
        rest = {key: value for key, value in model.written.items() if key != "weight"}
        own[model.name] = _model(model, recipe.operator) | {"parameters": rest}
    common = _common(recipe, given, recipe.operator)
    made = _anchor(recipe.method, recipe.operator, own, shared, common, weights, recipe.preset)
    return made if weighted else replace(made, level=False, weighted=False)


def _usual(recipe: Recipe, method: str) -> AnchorRecipe:
    given = recipe.given
    chosen = _operator(method)
    settings = dict(USUAL.get(method, {}))
    default = next(p for p in chosen.parameters if p.name == "weight")
    weight = settings.pop("weight", getattr(default, recipe.preset))
    models = {m.name: _model(m, chosen) for m in recipe.models}
    weights = {m.name: weight for m in recipe.models}
    outside = recipe.written.get("outside")
    settings |= {"outside": outside} if outside else {}
    common = _common(recipe, given, chosen)
    return _anchor(method, chosen, models, settings, common, weights, recipe.preset)


def _model(model: RecipeModel, chosen: Operator) -> dict[str, Any]:
    """An expert without its parameters, and with its exemplars if the operator reads them."""
    shown = {"exemplars": str(model.exemplars)} if model.exemplars and chosen.needs else {}
    return {"model": str(model.path), "name": model.name, **shown}


def _common(recipe: Recipe, given: Mapping[str, Any], chosen: Operator) -> dict[str, Any]:
    common = {key: given[key] for key in ("preset", "dtype", "out_dtype") if key in given}
    capture = recipe.capture.model_dump(exclude_unset=True) if chosen.needs else {}
    if capture.get("folder"):
        capture["folder"] = str(recipe.folder / capture["folder"])
    common |= {"capture": capture} if capture else {}
    common |= {**base_key(recipe), "seed": recipe.seed}
    return common | tokenizer_keys(recipe)


def _anchor(
    method: str,
    chosen: Operator,
    models: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Any],
    common: Mapping[str, Any],
    weights: Mapping[str, float],
    preset: str,
) -> AnchorRecipe:
    known = {p.name: p for p in chosen.parameters}
    solved = method == "regmean" and shared.get("gram") != "task_vector"
    averages = (
        solved
        or method == "fisher"
        or (
            "normalize" in known
            and bool(shared.get("normalize", getattr(known["normalize"], preset)))
        )
    )
    scale = None
    if averages and "lambda" in known:
        given = shared.get("lambda", getattr(known["lambda"], preset))
        if not isinstance(given, int | float):
            raise RecipeError(
                "lambda: differs between layers or tensors; tuning moves one for all. Give a "
                "number."
            )
        if sum(weights.values()) == 0:
            raise RecipeError(
                f"weight: the weights of {method} sum to 0, and lambda follows their mean; give "
                "others."
            )
        scale = float(given)
    return AnchorRecipe(
        method, models, shared, common, weights, not averages or scale is not None, scale
    )
