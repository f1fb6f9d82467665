"""The slices of a recipe: runs of layers, each with sources that are merged layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, count
from pathlib import Path

from sigmerge.operators.base import Operator
from sigmerge.recipe.reading import Reading
from sigmerge.recipe.record import RecipeModel, RecipeSlice, RecipeSource
from sigmerge.recipe.sections import SliceSection, SourceSection
from sigmerge.recipe.settings import ParameterCheck, Place


def read_slices(
    reading: Reading,
    pieces: Sequence[tuple[SliceSection, Sequence[SourceSection]]],
    judge: ParameterCheck | None,
    reference: Path | None,
    whole: Sequence[str],
) -> tuple[list[RecipeModel], tuple[RecipeSlice, ...]]:
    """The slices, and the experts in them: all models but the bases of task vectors.

    `whole` are sections of the recipe that need models with all their layers.
    """
    names: dict[Path, str] = {}
    slices = [
        _slice(reading, i, piece, sources, judge, reference, names)
        for i, (piece, sources) in enumerate(pieces)
    ]
    if slices and not reading.problems and not any(piece.depth for piece in slices):
        reading.problem(("slices",), "hold no layer together; a model has one at least")
    experts: dict[str, RecipeModel] = {}
    single = len(slices) == 1 and not slices[0].parameters
    for piece in slices:
        for source in piece.sources:
            if source.model != piece.base:
                own = source.parameters if single else {}
                experts.setdefault(source.model, RecipeModel(source.model, source.path, own))
    for key in whole if not single else ():
        reading.problem((key,), "needs whole models; give them under models:")
    return list(experts.values()), tuple(slices)


def _slice(
    reading: Reading,
    i: int,
    piece: SliceSection,
    sources: Sequence[SourceSection],
    judge: ParameterCheck | None,
    reference: Path | None,
    names: dict[Path, str],
) -> RecipeSlice:
    place: Place = ("slices", i)
    chosen = judge.operator if judge else None
    given = piece.parameters or {}
    shared = judge.settings((*place, "parameters"), given) if judge else {}
    start = reference
    if piece.base_model is not None:
        start = reading.path((*place, "base_model"), piece.base_model)
    found = []
    for j, source in enumerate(sources):
        here = (*place, "sources", j)
        path = reading.path((*here, "model"), source.model)
        own = source.parameters or {}
        own = judge.settings((*here, "parameters"), own, per_model=True) if judge else {}
        first, last = source.layer_range
        if first == last:
            empty = f"[{first}, {last}] holds no layer"
            reading.taken_as((*here, "layer_range"), empty, f"{empty}, and adds none")
        elif not 0 <= first < last:
            reading.problem((*here, "layer_range"), f"[{first}, {last}] holds no layer")
        if path is not None:
            name = names.setdefault(
                path, source.name or free_name(path, reference, ["reference", *names.values()])
            )
            found.append(RecipeSource(name, path, first, last, own))
    _check_sources(reading, place, found)
    needs = chosen is not None and chosen.needs_reference
    base = next((s.model for s in found if needs and s.path == start), None)
    if needs and base is None and start is not None and not reading.problems:
        reading.problem(
            (*place, "sources"),
            f"{chosen.name if chosen else ''} needs the base model among them",
        )
    check_count(reading, chosen, (*place, "sources"), len(found) - (base is not None))
    return RecipeSlice(tuple(found), base, shared)


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
    name = "base" if path == reference else path.name.partition("@")[0]
    numbered = (f"{name}-{k}" for k in count(2))
    return next(n for n in chain([name], numbered) if n not in set(taken))
