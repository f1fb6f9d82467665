"""The slices of a recipe: runs of layers, each with sources that are merged layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from sigmerge.checkpoints.plain import WEIGHTS
from sigmerge.operators.base import Operator
from sigmerge.recipe.reading import Reading
from sigmerge.recipe.record import RecipeModel, RecipeSlice, RecipeSource
from sigmerge.recipe.sections import SliceSection, SourceSection
from sigmerge.recipe.settings import ParameterCheck, Place


class WrittenSlice(NamedTuple):
    """A slice as it is written. A `whole` one stands for the models of its module."""

    section: SliceSection
    sources: Sequence[SourceSection]
    module: str = ""
    whole: bool = False


def read_slices(
    reading: Reading,
    pieces: Sequence[WrittenSlice],
    judge: ParameterCheck | None,
    reference: Path | None,
    whole: Sequence[str],
    weights: Mapping[str, Any],
) -> tuple[list[RecipeModel], tuple[RecipeSlice, ...]]:
    """The slices, and the experts in them: all models but the bases of task vectors.

    `whole` are sections of the recipe that need models with all their layers. `weights` are those
    that all models of a module share.
    """
    names: dict[Path, str] = {}
    slices = [
        _slice(reading, i, piece, judge, reference, names, weights.get(piece.module))
        for i, piece in enumerate(pieces)
    ]
    for module in dict.fromkeys(piece.module for piece in slices):
        own = [piece for piece in slices if piece.module == module]
        if not reading.problems and not any(piece.whole or piece.depth for piece in own):
            place: Place = ("modules", module, "slices") if module else ("slices",)
            reading.problem(place, "hold no layer together; a model has one at least")
    experts: dict[str, RecipeModel] = {}
    single = len(slices) == 1 and not slices[0].parameters
    for piece in slices:
        for source in piece.sources:
            if source.model != piece.base:
                given = (source.parameters, source.written) if single else ({}, {})
                found = RecipeModel(source.model, source.path, given[0], written=given[1])
                experts.setdefault(source.model, found)
    for key in whole if not single else ():
        reading.problem((key,), "needs whole models; give them under models:")
    return list(experts.values()), tuple(slices)


def _slice(
    reading: Reading,
    i: int,
    piece: WrittenSlice,
    judge: ParameterCheck | None,
    reference: Path | None,
    names: dict[Path, str],
    weight: Any,
) -> RecipeSlice:
    place: Place = ("slices", i)
    chosen = judge.operator if judge else None
    given = piece.section.parameters or {}
    shared = judge.settings((*place, "parameters"), given) if judge else {}
    start = reference
    if piece.section.base_model is not None:
        start = reading.path((*place, "base_model"), piece.section.base_model)

    def named(path: Path, name: str | None = None) -> str:
        taken = ["reference", *names.values()]
        return names.setdefault(path, name or free_name(path, reference, taken))

    found = []
    for j, source in enumerate(piece.sources):
        here = (*place, "sources", j)
        path = reading.path((*here, "model"), source.model)
        own = source.parameters or {}
        own = judge.settings((*here, "parameters"), own, per_model=True) if judge else {}
        if not piece.whole:
            _check_range(reading, (*here, "layer_range"), source)
        if path is not None:
            first, last = (0, 0) if piece.whole else source.layer_range
            name, written = named(path, source.name), source.parameters or {}
            found.append(RecipeSource(name, path, first, last, own, written))
    needs = chosen is not None and chosen.needs_reference
    joins = judge is not None and (needs or in_soup(judge, weight))
    if piece.whole and start is not None and joins and start not in [s.path for s in found]:
        found.append(RecipeSource(named(start), start, 0, 0, {}))
    _check_sources(reading, place, found)
    base = next((s.model for s in found if needs and s.path == start), None)
    if needs and base is None and start is not None and not reading.problems:
        reading.problem(
            (*place, "sources"),
            f"{chosen.name if chosen else ''} needs the base model among them",
        )
    check_count(reading, chosen, (*place, "sources"), len(found) - (base is not None))
    return RecipeSlice(tuple(found), base, shared, piece.module, piece.whole)


def in_soup(judge: ParameterCheck, weight: Any) -> bool:
    """Whether mergekit counts a base model that is not listed into a soup.

    `weight` is the one that all models share.
    """
    name = judge.operator.name
    counts = name == "karcher" or (name == "linear" and weight is not None)
    return counts and judge.preset == "mergekit"


def _check_range(reading: Reading, place: Place, source: SourceSection) -> None:
    first, last = source.layer_range
    told = f"[{first}, {last}] holds no layer"
    if first == last:
        reading.taken_as(place, told, f"{told}, and adds none")
    elif not 0 <= first < last:
        reading.problem(place, told)


def _check_sources(reading: Reading, place: Place, sources: Sequence[RecipeSource]) -> None:
    lengths = [source.last - source.first for source in sources]
    if len(set(lengths)) > 1:
        told = ", ".join(f"{s.model} has {n}" for s, n in zip(sources, lengths, strict=True))
        reading.problem((*place, "sources"), f"must all have as many layers; {told}")
    models = [source.model for source in sources]
    for model in sorted({m for m in models if models.count(m) > 1}):
        reading.problem((*place, "sources"), f"{model} stands there twice")


def check_count(reading: Reading, chosen: Operator | None, place: Place, count: int) -> None:
    """Whether there are as many models as the operator takes."""
    if chosen is None or reading.problems:
        return
    most = chosen.most if chosen.most is not None else count
    if not chosen.least <= count <= most:
        bound = f"at least {chosen.least}" if count < chosen.least else f"at most {most}"
        beside = " beside the base model" if chosen.needs_reference else ""
        reading.problem(place, f"{chosen.name} takes {bound}{beside}, and {count} are listed")


def free_name(path: Path, reference: Path | None, taken: Iterable[str]) -> str:
    """A model's name, where the recipe gives none: its folder's, numbered where that is taken."""
    own = path.stem if path.suffix in WEIGHTS else path.name
    name = "base" if path == reference else own.partition("@")[0]
    numbered = (f"{name}-{k}" for k in count(2))
    return next(n for n in chain([name], numbered) if n not in set(taken))
