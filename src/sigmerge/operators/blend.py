"""A blend of two methods' merges: a share of one, the rest of the other (ours)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from sigmerge.core import Array
from sigmerge.core.merge import add_scaled
from sigmerge.errors import RecipeError
from sigmerge.operators.base import (
    OUTSIDE,
    WEIGHT,
    Chunk,
    Operator,
    Parameter,
    Pass,
    Passes,
    Site,
    Statistics,
    Tile,
)


class Of(NamedTuple):
    """What is known of the parts: one entry for each."""

    first: Any
    second: Any


class Blend(Operator):
    """θ = θ_ref + s τ_1 + (1 − s) τ_2, τ the task vectors that two other operators merge.

    Added up in float32, the first part's product first. An option of a part has the part's
    name before it (`tsv.lambda`). `weight` multiplies an expert's weights of both.
    """

    name = "blend"
    title = "Blend"
    paper = "ours: the mean of two merges of one pool (docs/methods.md)"

    def __init__(self, *parts: Operator) -> None:
        if len(parts) != 2 or parts[0].name == parts[1].name:
            raise RecipeError("parameters.on: a blend has two different operators: [tsv, regmean]")
        for part in parts:
            if part.name in ("lines", "blend"):
                raise RecipeError(f"parameters.on: {part.name} cannot be a part of a blend.")
        needs = {part.needs for part in parts if part.needs}
        if len(needs) > 1:
            told = " and ".join(part.name for part in parts)
            raise RecipeError(f"parameters.on: {told} read different things of the exemplars.")
        self.parts = Of(*parts)
        self.needs = next(iter(needs), "")
        self.solves = any(part.solves for part in parts)
        self.thins_on_gpu = all(part.thins_on_gpu for part in parts)
        self.least = max(part.least for part in parts)
        mosts = [part.most for part in parts if part.most is not None]
        self.most = min(mosts) if mosts else None
        revisions = [part.revision for part in parts if part.revision]
        self.revision = " ".join(revisions) or None
        own = Parameter("share", float, "of the first part; the second has the rest", 0.5, 0.5,
                        False, 0, 1)  # fmt: skip
        self.parameters = (WEIGHT, own, *map(_prefixed, self._options()), OUTSIDE)

    def _options(self) -> Iterator[tuple[Operator, Parameter]]:
        for part in self.parts:
            for each in part.parameters:
                if each.name not in ("outside", "int8_mask"):
                    yield part, each

    def with_parameters(self, given: Mapping[str, Any]) -> Operator:
        return Blend(*(part.with_parameters(own(part, given)) for part in self.parts))

    def check(self, sites: Sequence[Site]) -> list[str]:
        return [
            f"{part.name}: {problem}"
            for part in self.parts
            for problem in part.check([part_site(part, site) for site in sites])
        ]

    def check_statistics(self, sites: Sequence[Site], statistics: Statistics) -> list[str]:
        return [
            f"{part.name}: {problem}"
            for part in self.parts
            for problem in part.check_statistics([part_site(part, s) for s in sites], statistics)
        ]

    def granule(self, site: Site) -> int:
        return lcm(*(part.granule(part_site(part, site)) for part in self.parts))

    def scratch(self, site: Site) -> int:
        return max(part.scratch(part_site(part, site)) for part in self.parts) + 8 * site.size

    def operations(self, site: Site) -> float:
        return sum(part.operations(part_site(part, site)) for part in self.parts)

    def survey(self, sites: Sequence[Site]) -> Passes:
        found = []
        for part in self.parts:
            own_sites = [part_site(part, site) for site in sites]
            found.append((yield from self._passes(part, part.survey(own_sites))))
        return Of(*found)

    def prepare(self, site: Site, survey: Of) -> Passes:
        found = []
        for part, known in zip(self.parts, survey, strict=True):
            passes = part.prepare(part_site(part, site), known)
            found.append((yield from self._passes(part, passes)))
        return Of(*found)

    def _passes(self, part: Operator, passes: Passes) -> Passes:
        """A part's passes, over chunks as it sees them."""
        reply = None
        while True:
            try:
                step = passes.send(reply)
            except StopIteration as stop:
                return stop.value
            reply = yield Pass(_seen(part, step.visit), step.fold, _prepared(part, step.prepare))

    def merge(self, chunk: Chunk, survey: Of) -> Iterator[Tile]:
        share = float(chunk.site.settings["share"])
        total = np.zeros(chunk.size, np.float32)
        for number, factor in enumerate((share, 1.0 - share)):
            if factor:
                self._add(number, factor, chunk, survey, total)
        yield Tile(chunk.start, np.empty((0, chunk.size), np.float32), total)

    def _add(self, number: int, factor: float, chunk: Chunk, survey: Of, total: Array) -> None:
        """Add a part's task vector, times its factor."""
        part, known = self.parts[number], survey[number]
        notes: dict[str, Any] = {}
        one = _as_seen(part, chunk, chunk.state[number] if chunk.state else None, notes)
        formula = part.formula(one, known)
        if formula is not None:
            vector = formula if part.gives_vector else formula.plus_reference(-1.0)
            add_scaled(total, one.made(vector), factor)
        else:
            for tile in part.merge(one, known):
                if not part.gives_vector:
                    chunk.add_reference(tile, -1.0)
                first = tile.start - chunk.start
                add_scaled(total[first : first + tile.out.size], tile.out, factor)
        if notes:
            chunk.notes[part.name] = notes


def own(part: Operator, given: Mapping[str, Any]) -> dict[str, Any]:
    """A part's options among those of the blend."""
    head = f"{part.name}."
    return {key.removeprefix(head): v for key, v in given.items() if key.startswith(head)}


def part_site(part: Operator, site: Site) -> Site:
    """A tensor as a part sees it."""
    settings = site.settings
    found = own(part, settings) | {"outside": settings["outside"]}
    if "weight" in found:
        both = zip(settings["weight"], found["weight"], strict=True)
        found["weight"] = tuple(common * mine for common, mine in both)
    return replace(site, settings=found)


def _prefixed(option: tuple[Operator, Parameter]) -> Parameter:
    part, parameter = option
    return replace(parameter, name=f"{part.name}.{parameter.name}")


def _as_seen(part: Operator, chunk: Any, state: Any, notes: dict[str, Any]) -> Any:
    return replace(chunk, site=part_site(part, chunk.site), state=state, notes=notes)


def _seen(part: Operator, visit: Callable[[Chunk], Any]) -> Callable[[Chunk], Any]:
    return lambda chunk: visit(_as_seen(part, chunk, chunk.state, chunk.notes))


def _prepared(
    part: Operator, prepare: Callable[[Site], Passes] | None
) -> Callable[[Site], Passes] | None:
    return None if prepare is None else lambda site: prepare(part_site(part, site))
