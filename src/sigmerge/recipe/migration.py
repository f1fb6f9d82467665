"""What a mergekit file gives here that mergekit 0.1.5 would not give: one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.adapter_folders import split_adapter
from sigmerge.errors import RecipeError
from sigmerge.files.yaml_documents import Place, Yaml, decoded, parse_yaml
from sigmerge.operators.table import MERGEKIT
from sigmerge.recipe.documents import named_documents, several, standing_in
from sigmerge.recipe.parser import load_recipe
from sigmerge.recipe.reading import OWN
from sigmerge.recipe.record import Recipe

DRAWN = ("dare_linear", "dare_ties", "della", "della_linear")
CUT = ("ties", "breadcrumbs", "breadcrumbs_ties", "sce")


@dataclass(frozen=True)
class Change:
    """Something that will differ, and the line and the key that it comes from."""

    line: int | None
    key: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.key}: {self.text}" if self.line else self.text


def migration(file: Path) -> tuple[Change, ...]:
    """What differs from mergekit, in the order of lines; RecipeError if the recipe cannot run.

    Of a file of several recipes, that of each, under its name.
    """
    if found := several(file):
        changes = []
        with standing_in(found) as recipes:
            for name, (written, above) in named_documents(file).items():
                changes += _changes(load_recipe(recipes[name]), written, above, name)
    else:
        text = decoded(file, "a recipe in YAML", RecipeError)
        changes = _changes(load_recipe(file), parse_yaml(text, str(file), RecipeError))
    return tuple(sorted(changes, key=lambda change: change.line or 1 << 30))


def _changes(recipe: Recipe, written: Yaml, above: int = 0, name: str = "") -> list[Change]:
    """Those of one recipe, which has so many lines above it, and a name among several."""
    data: Mapping[str, Any] = written.value
    places = [*_ours(data), *_numbers(recipe, data), *_models(recipe, data), *_vocabulary(data)]
    named = [name] if name else []
    changes = [
        Change(_line(place, written.lines, above), ".".join(map(str, (*named, *place))), text)
        for place, text in places
    ]
    return changes + [Change(None, "", ": ".join([*named, note])) for note in recipe.notes]


def _line(place: Place, lines: Mapping[Place, int], above: int) -> int | None:
    known = (lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines)
    line = next(known, None)
    return line and line + above


def _ours(data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    for key in data:
        if key in OWN:
            yield (key,), "is a key of sigmerge; mergekit passes over it"
    method = str(data.get("merge_method"))
    if method not in MERGEKIT:
        yield ("merge_method",), f"mergekit does not have {method}"


def _numbers(recipe: Recipe, data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    method = recipe.method
    if method in DRAWN:
        yield (
            ("merge_method",),
            "entries are dropped by other draws: mergekit's come from torch's generator, and are "
            "the same again only with --random-seed; here seed: decides them, 0 by default",
        )
    if method in CUT:
        yield (
            ("merge_method",),
            "where the cut falls among entries of equal size, the first ones are kept; mergekit's "
            "sort leaves that open",
        )
    if method == "arcee_fusion":
        yield (
            ("merge_method",),
            "quantiles are exact; mergekit samples tensors of more than a million entries",
        )
    dtype = str(data.get("dtype") or "").removeprefix("torch.")
    if dtype in ("bfloat16", "float16"):
        yield (
            ("dtype",),
            f"arithmetic is float32, rounded once to {data.get('out_dtype') or dtype}; mergekit "
            f"computes in {dtype}, so that last digits differ",
        )
    elif not dtype:
        yield (
            ("merge_method",),
            "without dtype: mergekit computes in the type of the models; here it is float32, "
            "rounded once to that type",
        )


def _models(recipe: Recipe, data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    paths = [recipe.reference, *recipe.experts.values()]
    if any(path is not None and split_adapter(path)[1] for path in paths):
        yield (
            (next(key for key in ("models", "slices", "modules", "base_model") if key in data),),
            "adapters are added in float32 where they are read; mergekit stores the model with its "
            "adapter first, rounded to the model's type",
        )
    counts: dict[str, set[int]] = {}
    for piece in recipe.slices:
        counts.setdefault(piece.module, set()).add(len(piece.sources))
    for module in (module for module, some in counts.items() if len(some) > 1):
        yield (
            ("modules", module, "slices") if module else ("slices",),
            "what lies behind the layers comes from the last slice with all of its sources; "
            "mergekit drops some where it has more than the first",
        )
    if "output_slices" in data:
        yield ("output_slices",), "is read as slices; mergekit 0.1.5 does not know it"
    if recipe.reference is None and (recipe.slices or len(recipe.models) > 1):
        yield (
            ("merge_method",),
            "without base_model: configuration and tokenizer are the first model's; mergekit takes "
            "any of them, another one from run to run",
        )


def _vocabulary(data: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    section = data.get("tokenizer")
    wanted = data.get("tokenizer_source")
    if isinstance(section, dict):
        wanted = section.get("source", "union")
    if wanted is None:
        return
    place = ("tokenizer",) if isinstance(section, dict) else ("tokenizer_source",)
    yield (
        place,
        "rows behind the last token stay if all models have the same tokens; mergekit cuts them "
        "off",
    )
    if wanted in ("union", "base"):
        yield (
            place,
            "a token of base_model's tokenizer that has no row gets one; mergekit takes it out of "
            "the tokenizer",
        )
    if wanted == "union":
        yield place, "new tokens come in the order of models and ids; mergekit's order changes"
