"""Settings of an operator: a value, a gradient over depth, or conditions by tensor name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sigmerge.files.yaml_documents import Place
from sigmerge.messages import nearest, shown, unknown
from sigmerge.operators.base import LARGEST_NUMBER, Operator, Parameter
from sigmerge.operators.table import MERGEKIT

OURS = ("outside", "scope", "elect", "cancelled", "on")
"""Parameters of these operators that mergekit does not have."""
NEEDED = ("weight", "t")
"""Parameters without which mergekit stops."""
FAMILY = (
    "weight", "normalize", "rescale", "lambda", "density", "gamma", "epsilon", "int8_mask", "t",
    "scale", "filter_wise", "select_topk", "nuslerp_flatten", "nuslerp_row_wise", "eps",
    "normalize_weights", "max_iter", "tol", "r", "alpha",
)  # fmt: skip
"""Parameters of mergekit's methods. Files keep them when their merge_method changes; mergekit
passes over those that a method does not read."""


CONDITION = ("filter", "value")
"""Keys of a condition."""
SATURATED = ("density",)
"""Parameters that mergekit takes beyond their upper bound, where they mean the bound."""
EMPTIED = ("ties", "della", "della_linear", "breadcrumbs", "breadcrumbs_ties")
"""Methods in which mergekit takes them below their lower bound too."""


def bounded(parameter: Parameter, value: Any) -> Any:
    """A value that the parameter can have, where a gradient runs beyond the bounds or between
    whole numbers."""
    if parameter.kind is int and isinstance(value, float):
        return round(value)
    beyond = parameter.name in SATURATED and isinstance(value, int | float)
    return min(max(value, parameter.low), parameter.high) if beyond else value


def matches(pattern: str | None, tensor: str) -> bool:
    """Whether a filter is for a tensor. transformers 5, and so mergekit, calls Mixtral's mixture
    `mlp`, which is stored as `block_sparse_moe`: a filter may say either."""
    names = (tensor, tensor.replace(".block_sparse_moe.", ".mlp."))
    return pattern in (None, "*") or any(str(pattern) in name for name in names)


def evaluate(setting: Any, tensor: str, t: float) -> Any:
    """A setting's value for one tensor: the first filter that matches, a gradient at depth t."""
    if isinstance(setting, Conditions):
        for pattern, value in setting.rules:
            if matches(pattern, tensor):
                return evaluate(value, tensor, t)
        return None
    if isinstance(setting, list):
        if not all(isinstance(v, float | int) and not isinstance(v, bool) for v in setting):
            return setting[int(t * (len(setting) - 1))]
        position = t * (len(setting) - 1)
        low = int(position)
        high = min(len(setting) - 1, low + 1)
        return (1 - (position - low)) * setting[low] + (position - low) * setting[high]
    return setting


@dataclass(frozen=True)
class Conditions:
    rules: tuple[tuple[str | None, Any], ...]


@dataclass(frozen=True)
class ParameterCheck:
    """Checks an operator's parameters; `problem` is called with what is wrong.

    `passed_over` is called with what mergekit does not look at, `taken_as` with what is wrong and
    its meaning to mergekit, `note` with what is known to it.
    """

    operator: Operator
    preset: str
    problem: Callable[[Place, str], None]
    passed_over: Callable[[Place, str], None]
    taken_as: Callable[[Place, str, str], None]
    note: Callable[[str], None]

    def settings(
        self, path: Place, given: Mapping[str, Any], per_model: bool = False
    ) -> dict[str, Any]:
        known = {p.name: p for p in self.operator.parameters}
        checked = {}
        for name, value in given.items():
            parameter = known.get(name)
            if parameter is None:
                self._stranger((*path, name), known)
            elif per_model and not parameter.per_model:
                told = "belongs to the merge as a whole; move it to the top-level parameters:"
                self._idle((*path, name), told, parameter)
            elif (setting := self._setting((*path, name), value, parameter)) is not None:
                checked[name] = setting
        return checked

    def _idle(self, path: Place, message: str, parameter: Parameter) -> None:
        """Report a wrong value: a problem, or a note where mergekit ignores the parameter."""
        ours = self.operator.name not in MERGEKIT or parameter.name in OURS
        (self.problem if ours else self.passed_over)(path, message)

    def _stranger(self, path: Place, known: Mapping[str, Any]) -> None:
        """A parameter that the operator does not have; mergekit passes over it.

        Not so where it is nearly one that the operator has: then its value was meant.
        """
        method, name = self.operator.name, str(path[-1])
        if method in MERGEKIT and name in FAMILY:
            self.note(f"{name} is ignored: {method} does not read it, in mergekit neither")
        else:
            wrong = method not in MERGEKIT or nearest(name, known) is not None
            told = unknown(f"parameter of {method}", name, known)
            (self.problem if wrong else self.passed_over)(path, told)

    def _setting(self, path: Place, value: Any, parameter: Parameter) -> Any:
        """A scalar, a gradient over depth, or conditions by tensor name."""
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            return self._conditions(path, value, parameter)
        if isinstance(value, list):
            if not value:
                self._idle(path, "an empty list has no value", parameter)
                return None
            return [self._scalar((*path, i), v, parameter) for i, v in enumerate(value)]
        return bounded(parameter, self._scalar(path, value, parameter))

    def _conditions(self, path: Place, given: list[Any], parameter: Parameter) -> Conditions:
        rules = []
        for i, rule in enumerate(given):
            if "value" not in rule:
                self.problem((*path, i), "a condition has the keys filter and value")
                continue
            if not isinstance(rule.get("filter"), str | None):
                self.problem((*path, i, "filter"), "must be part of a tensor's name")
                continue
            for key in (str(key) for key in rule if key not in CONDITION):
                self._idle((*path, i, key), unknown("key here", key, CONDITION), parameter)
            inner = self._setting((*path, i, "value"), rule["value"], parameter)
            rules.append((rule.get("filter"), inner))
        return Conditions(tuple(rules))

    def _scalar(self, path: Place, value: Any, parameter: Parameter) -> Any:
        if parameter.auto and value == "auto":
            return value
        kind = parameter.kind
        if isinstance(kind, tuple):
            if "none" in kind and (truth := _truth(value)) is not None:
                usual = getattr(parameter, self.preset)
                value = "none" if not truth else kind[0] if usual == "none" else usual
            if isinstance(value, str) and value in kind:
                return value
            self.problem(path, f"must be one of {', '.join(kind)}, not {shown(value)}")
            return None
        if kind is bool:
            if (truth := _truth(value)) is not None:
                return truth
            self.problem(path, f"must be true or false, not {shown(value)}")
            return None
        return self._numeric(path, value, parameter)

    def _numeric(self, path: Place, value: Any, parameter: Parameter) -> float | None:
        """A number within bounds. mergekit takes true as 1, and SATURATED ones beyond theirs."""
        lenient, whole = self.operator.name in MERGEKIT, parameter.kind is int
        number = float(value) if lenient and isinstance(value, bool) else _number(value)
        kind = f"must be a {'whole ' if whole else ''}number, not {shown(value)}"
        if number is None or (whole and number != int(number)):
            self.problem(path, kind)
            return None
        if isinstance(value, bool):
            self.taken_as(path, kind, f"{str(value).lower()} is read as {number:g}")
        low, high = max(parameter.low, -LARGEST_NUMBER), min(parameter.high, LARGEST_NUMBER)
        if not low <= number <= high:
            wrong = f"must lie between {low:g} and {high:g}, not {shown(value)}"
            if not (meaning := self._beyond(parameter, number)):
                self.problem(path, wrong)
                return None
            self.taken_as(path, wrong, f"{shown(value)} {meaning}")
        return int(number) if whole else number

    def _beyond(self, parameter: Parameter, number: float) -> str:
        """How mergekit reads a number beyond the bounds; "" if it rejects it."""
        method = self.operator.name
        if method not in MERGEKIT or parameter.name not in SATURATED:
            return ""
        if number > parameter.high:
            return f"keeps all, as {parameter.high:g} does"
        return f"keeps none, as {parameter.low:g} does" if method in EMPTIED else ""


def _truth(value: Any) -> bool | None:
    """A truth value as mergekit reads it: 1, "yes" and "on" are true."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
