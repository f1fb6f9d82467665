"""The table of operators. One line a name; a module is imported when its operator is asked for."""

from __future__ import annotations

from importlib import import_module

from sigmerge.errors import RecipeError
from sigmerge.operators.base import Operator
from sigmerge.words import unknown

OPERATORS = {
    "linear": "linear:Linear",
    "task_arithmetic": "task_arithmetic:TaskArithmetic",
    "ties": "ties:Ties",
    "dare_linear": "dare:DareLinear",
    "dare_ties": "dare:DareTies",
    "cabs": "cabs:Cabs",
    "fisher": "fisher:Fisher",
    "regmean": "regmean:RegMean",
    "cat": "cat:Cat",
    "lot": "lot:Lot",
    "lines": "lines:Lines",
}

NOT_SUPPORTED = (
    "slerp",
    "nuslerp",
    "multislerp",
    "karcher",
    "della",
    "della_linear",
    "breadcrumbs",
    "breadcrumbs_ties",
    "model_stock",
    "sce",
    "nearswap",
    "arcee_fusion",
    "ram",
    "ramplus_tl",
    "passthrough",
)
"""Methods of mergekit that sigmerge does not have; a recipe that names one is told so."""


def operator(name: str, on: str | None = None) -> Operator:
    """The operator of that name; `on` is what LiNeS scales."""
    if name in NOT_SUPPORTED:
        raise RecipeError(
            f"merge_method: {name} is a mergekit method that sigmerge does not have. "
            f"It has: {', '.join(OPERATORS)}."
        )
    if name not in OPERATORS:
        raise RecipeError(f"merge_method: {unknown('operator', name, OPERATORS)}")
    module, _, attribute = OPERATORS[name].partition(":")
    made = getattr(import_module(f"sigmerge.operators.{module}"), attribute)
    if name != "lines":
        return made()
    if on == "lines":
        raise RecipeError("parameters.on: lines cannot stand on lines.")
    return made(operator(on or "task_arithmetic"))
