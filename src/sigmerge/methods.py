"""A frozen dataclass for every operator: `Ties(density=0.2, weight={"math": 1.0, "code": 0.8})`.

The classes are made from the operators' tables of parameters when they are first used. Their
defaults are the papers'. `methods.pyi` spells them out for editors and type checkers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, ClassVar

from sigmerge.errors import RecipeError
from sigmerge.files.yaml_documents import Place
from sigmerge.messages import unknown
from sigmerge.operators.base import Operator, Parameter
from sigmerge.operators.table import OF_OTHERS, OPERATORS, operator
from sigmerge.recipe.settings import ParameterCheck

PRESET = "paper"
ARGUMENT = {"lambda": "scale"}
"""Parameters whose names Python does not allow, and what their arguments are called."""


@dataclass(frozen=True)
class Method:
    """How a pool is merged: an operator with its parameters.

    A parameter is one value for all layers, or a list that runs from the first layer to the last.
    A parameter that experts have of their own may also be a mapping from their names.

    >>> method = sigmerge.Ties(density=0.2, weight={"math": 1.0, "coding": 0.5})
    >>> replace(method, density=0.5).density
    0.5
    """

    operator: ClassVar[str]

    def __post_init__(self) -> None:
        problems: list[str] = []

        def problem(path: Place, told: str, *meaning: str) -> None:
            problems.append(f"{'.'.join(map(str, path))}: {told}")

        known = self._parameters()
        check = ParameterCheck(
            self.made, PRESET, problem, problem, problem, lambda note: None
        )  # fmt: skip
        for argument, value in self.arguments().items():
            if argument not in known:
                continue
            name = known[argument].name
            if not isinstance(value, Mapping):
                check.settings((), {name: value})
            elif known[argument].per_model:
                for expert, each in value.items():
                    check.settings((expert,), {name: each}, per_model=True)
            else:
                problem((argument,), "is one value for all experts, not a mapping of them")
        if problems:
            raise RecipeError(f"{type(self).__name__} cannot be made:", problems)

    @staticmethod
    def of(operator: str | Operator, /, **arguments: Any) -> Method:
        """The method of an operator by its name in recipes, or of one of your own.

        >>> sigmerge.Method.of("linear", normalize=False)
        Linear(weight=1.0, normalize=False, outside='merge')
        """
        name = operator if isinstance(operator, str) else operator.name
        made = _class_of(name)
        known = [each.name for each in fields(made)]
        if wrong := [each for each in arguments if each not in known]:
            raise TypeError(f"{name}: {unknown('argument', wrong[0], known)}")
        return made(**arguments)

    def arguments(self) -> dict[str, Any]:
        """The values by the names that Python has for them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def section(self, experts: Mapping[str, str]) -> dict[str, Any]:
        """The keys of a recipe that say this method, for experts by name."""
        own: dict[str, dict[str, Any]] = {name: {} for name in experts}
        shared: dict[str, Any] = {}
        for name, (argument, value) in self._written().items():
            if not isinstance(value, Mapping):
                shared[name] = value
                continue
            if wrong := [each for each in value if each not in experts]:
                problem = unknown("expert", wrong[0], experts)
                raise RecipeError(f"{type(self).__name__}: {argument}: {problem}")
            for expert, each in value.items():
                own[expert][name] = each
        models = [
            {"model": place, "name": name} | ({"parameters": own[name]} if own[name] else {})
            for name, place in experts.items()
        ]
        return {
            "merge_method": self.operator,
            "preset": PRESET,
            "models": models,
            "parameters": shared,
        }

    def _written(self) -> dict[str, tuple[str, Any]]:
        """By the name that recipes have for it, every argument with its value."""
        known = self._parameters()
        named = {name: known[name].name for name in known}
        return {named.get(a, a): (a, value) for a, value in self.arguments().items()}

    def _parameters(self) -> dict[str, Parameter]:
        """The operator's parameters by their arguments."""
        return {ARGUMENT.get(each.name, each.name): each for each in self.made.parameters}

    def settings(self, experts: int) -> dict[str, Any]:
        """What an operator reads of its site, where all experts have the same numbers."""
        known, given = self._parameters(), self.arguments()
        return {
            known[name].name: (value,) * experts if known[name].per_model else value
            for name, value in given.items()
        }

    @property
    def made(self) -> Operator:
        """The operator that merges."""
        return operator(self.operator)


class _Scaled(Method):
    """LiNeS: what another method merges, scaled by depth."""

    on: Method

    def _written(self) -> dict[str, tuple[str, Any]]:
        return self.on._written() | super()._written() | {"on": ("on", self.on.operator)}

    @property
    def made(self) -> Operator:
        return operator(self.operator, self.on.operator)


class _Blended(Method):
    """A blend of what two methods merge."""

    on: tuple[Method, Method]

    def _written(self) -> dict[str, tuple[str, Any]]:
        written = super()._written() | {"on": ("on", [part.operator for part in self.on])}
        for part in self.on:
            for name, found in part._written().items():
                if name not in ("outside", "int8_mask"):
                    written[f"{part.operator}.{name}"] = found
        return written

    @property
    def made(self) -> Operator:
        return operator(self.operator, [part.operator for part in self.on])


def class_name(name: str) -> str:
    """What the class of an operator is called."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


CLASSES = {class_name(name): name for name in OPERATORS}
"""The operators by the names of their classes."""


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class_of(CLASSES[name])


def __dir__() -> list[str]:
    return [*CLASSES, "Method"]


def own_parameters(made: Operator) -> list[Parameter]:
    """The parameters that a dataclass has: those of LiNeS and of a blend without their inner
    methods', and none of those that are accepted for mergekit's sake and change nothing."""
    if made.name == "lines":
        return [each for each in made.parameters if each.name in ("alpha", "beta")]
    if made.name == "blend":
        return [each for each in made.parameters if "." not in each.name]
    return [each for each in made.parameters if each.name != "int8_mask"]


@cache
def _class_of(name: str) -> type[Method]:
    made = operator(name)
    given: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for each in own_parameters(made):
        argument, default = ARGUMENT.get(each.name, each.name), each.paper
        given.append(
            (argument, Any) if default is None else (argument, Any, field(default=default))
        )
    bases: tuple[type, ...] = (Method,)
    if name == "lines":
        bases = (_Scaled,)
        given.append(("on", Method, field(default_factory=lambda: Method.of("task_arithmetic"))))
    if name == "blend":
        bases = (_Blended,)
        parts = OF_OTHERS[name]
        given.append(("on", Any, field(default_factory=lambda: tuple(map(Method.of, parts)))))
    return make_dataclass(
        class_name(name), given, bases=bases, frozen=True, kw_only=True,
        namespace={"operator": name, "__doc__": _about(made), "__module__": __name__},
    )  # fmt: skip


def _about(made: Operator) -> str:
    lines = [f"{made.title}: {made.paper}.", ""]
    lines += [f"{ARGUMENT.get(p.name, p.name)}: {p.doc}" for p in own_parameters(made)]
    lines += ["", f">>> method = sigmerge.{class_name(made.name)}({_needed(made)})"]
    return "\n".join(lines)


def _needed(made: Operator) -> str:
    """The arguments without which there is no method, as an example writes them."""
    return ", ".join(f"{each.name}=0.5" for each in own_parameters(made) if each.paper is None)
