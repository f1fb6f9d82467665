"""Operators of users: a function over tiles, from a notebook or from an installed package.

    @sigmerge.operator("mean", parameters=[sigmerge.parameter("scale", 1.0, "of the mean")])
    def mean(tile, site):
        tile.out[:] = site.settings["scale"] * tile.experts.mean(axis=0)

A package offers its operators under the entry point group `sigmerge.operators`, each under the name
that recipes use.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from sigmerge.errors import RecipeError, SigmergeError
from sigmerge.files.sources import callable_digest
from sigmerge.operators.base import OUTSIDE, Chunk, Operator, Parameter, Site, Tile

ENTRY_POINTS = "sigmerge.operators"
UNTOUCHED = 0x7FABCDEF
"""The bits of a NaN that no arithmetic returns: a coordinate that the function did not fill."""
TileFunction = Callable[[Tile, Site], object]


class TileOperator(Operator):
    """An operator that calls a function for every tile.

    With `vectors` the rows of `tile.experts` are task vectors and the function writes the merged
    task vector; otherwise they are the experts' values and it writes the merged values. With
    `whole` every tile holds a whole tensor, flat; `site.shape` is its shape.
    """

    def __init__(
        self,
        name: str,
        function: TileFunction,
        parameters: Sequence[Parameter],
        *,
        vectors: bool,
        whole: bool,
        title: str,
        paper: str,
    ) -> None:
        self.name, self.function, self.whole = name, function, whole
        self.title, self.paper = title, paper
        self.needs_reference = self.gives_vector = vectors
        self.parameters = (*parameters, OUTSIDE)

    def granule(self, site: Site) -> int:
        return site.size if self.whole else super().granule(site)

    def merge(self, chunk: Chunk, survey: Any) -> Iterator[Tile]:
        for tile in chunk.tiles("reference" if self.gives_vector else None):
            out = tile.out
            out.view(np.uint32).fill(UNTOUCHED)
            try:
                self.function(tile, chunk.site)
            except (Exception, SystemExit) as error:
                raise SigmergeError(
                    f"{self._where(chunk)} raised {type(error).__name__}: {error}"
                ) from error
            if tile.out is not out:
                raise SigmergeError(
                    f"{self._where(chunk)} replaced tile.out; write into it: tile.out[:] = …"
                )
            if (left := np.flatnonzero(out.view(np.uint32) == UNTOUCHED)).size:
                raise SigmergeError(
                    f"{self._where(chunk)} did not fill tile.out at flat index "
                    f"{tile.start + int(left[0])}."
                )
            yield tile

    def _where(self, chunk: Chunk) -> str:
        return f"Operator {self.name}, tensor {chunk.site.tensor}: the function"


@dataclass(frozen=True)
class Plugins:
    """The operators that users registered in this process or installed, by name."""

    registered: dict[str, Operator]

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.registered, *_installed())))

    def find(self, name: str) -> Operator | None:
        """The operator of that name, with the revision of its code and of what that uses now."""
        found = self.registered.get(name)
        if found is None and (point := _installed().get(name)):
            found = _load(point)
        if found is None:
            return None
        made = copy(found)
        made.revision = _revision(_origin(made))
        return made

    def add(self, made: Operator) -> None:
        """Register an operator. Running a notebook's cell again replaces the cell's own."""
        found = _installed().get(made.name)
        if found is not None and found.module != _origin(made).__module__:
            raise RecipeError(
                f"{_package(found)} installs an operator {made.name}; choose another name."
            )
        old = self.registered.get(made.name)
        if old is not None and _place(old) != _place(made):
            raise RecipeError(
                f"An operator {made.name} is registered already, by {_place(old)}; choose another "
                "name."
            )
        self.registered[made.name] = made


PLUGINS = Plugins({})


@cache
def _installed() -> dict[str, EntryPoint]:
    """The entry points of installed packages, by the operators' names."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise RecipeError(
                f"Two packages install an operator {point.name}: {_package(other)} and "
                f"{_package(point)}. Uninstall one of them."
            )
    return found


def _load(point: EntryPoint) -> Operator:
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise RecipeError(
            f"merge_method: {point.name} comes with {_package(point)}, and {point.value} cannot be "
            f"imported ({type(error).__name__}: {error}). Mend or uninstall that package."
        ) from error
    made = loaded() if isinstance(loaded, type) else loaded
    if not isinstance(made, Operator) or made.name != point.name:
        raise RecipeError(
            f"merge_method: {point.name} comes with {_package(point)}, and {point.value} is no "
            f"operator of that name. Decorate the function with "
            f'@sigmerge.operator("{point.name}").'
        )
    return made


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name}" if point.dist else "a package"


def _origin(made: Operator) -> TileFunction | type[Operator]:
    """The code that a user wrote."""
    return made.function if isinstance(made, TileOperator) else type(made)


def _place(made: Operator) -> str:
    return f"{_origin(made).__module__}.{_origin(made).__qualname__}"


def class_operator(name: str, kind: type[Operator]) -> Operator:
    """An operator of a user's class."""
    made = kind()
    made.name = name
    return made


def _revision(made: TileFunction | type[Operator]) -> str:
    """A digest of a user's code: a merge is not continued with code that changed.

    It is made whenever a recipe names the operator: values that the code uses may be others since
    it was registered. Code that no digest describes is another every time.
    """
    return callable_digest(made) or secrets.token_hex(16)


def parameter(
    name: str,
    default: float | int | bool | str,
    doc: str,
    *,
    choices: Sequence[str] = (),
    per_model: bool = False,
    low: float = -float("inf"),
    high: float = float("inf"),
) -> Parameter:
    """An option of an operator of yours; the default's type, or `choices`, is what it accepts.

    >>> sigmerge.parameter("density", 0.5, "share of entries that are kept", low=0, high=1).high
    1
    """
    if isinstance(default, str) != bool(choices) or (choices and default not in choices):
        raise TypeError(f"{name}: a text default needs choices, and must be one of them.")
    kind = tuple(choices) if choices else type(default)
    return Parameter(name, kind, doc, default, default, per_model, low, high)  # type: ignore[arg-type]
