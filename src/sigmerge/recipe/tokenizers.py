"""The tokenizer, vocabulary and chat template of a recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigmerge.checkpoints.adapter_folders import is_adapter
from sigmerge.errors import PoolError, RecipeError
from sigmerge.messages import nearest
from sigmerge.recipe.reading import ALIKE, Reading
from sigmerge.recipe.record import Recipe, RecipeModel
from sigmerge.recipe.sections import (
    RecipeSection,
    TokenizerSection,
    TokenModelSection,
    TokenRowSection,
)
from sigmerge.recipe.settings import Place

if TYPE_CHECKING:  # imported where rows are moved
    from sigmerge.checkpoints.token_rows import MissingRows
    from sigmerge.checkpoints.vocabularies import TokenSource, VocabularyRequest


def read_tokenizer(
    reading: Reading,
    top: RecipeSection,
    reference: Path | None,
    models: list[RecipeModel],
    seed: int,
) -> tuple[Path | None, VocabularyRequest | None]:
    """The folder of the tokenizer that is taken, and the vocabulary that is asked for."""
    section = reading.optional(TokenizerSection, top.tokenizer, "tokenizer")
    wanted = top.tokenizer_source
    place: Place = ("tokenizer_source",)
    if section is not None:
        if wanted is not None:
            reading.problem(("tokenizer",), "and tokenizer_source say the same; give one")
        if section.pad_to_multiple_of == 0:
            pad: Place = ("tokenizer", "pad_to_multiple_of")
            reading.taken_as(pad, "must be 1 or more, not 0", "0 adds no rows")
        wanted, place = section.source, ("tokenizer", "source")
    if wanted is None:
        return reference, None
    from sigmerge.checkpoints.vocabularies import VocabularyRequest

    vocabulary = VocabularyRequest(
        union=wanted == "union",
        base=_member(reference, reference, models),
        tokens=_tokens(reading, section, reference, models),
        pad=(section.pad_to_multiple_of or None) if section else None,
        missing=_missing(reading, section, seed),
    )
    if wanted in ("base", "union"):
        return reference, vocabulary
    named = [model.path for model in models if wanted == model.name]
    if named and not is_adapter(reading.folder / wanted):
        return named[0], vocabulary
    near = nearest(wanted, ("base", "union"), ALIKE)
    if near and not any((root / wanted).exists() for root in (Path.cwd(), reading.folder)):
        reading.problem(place, f"{wanted!r}: no such folder; did you mean {near!r}?")
        return None, vocabulary
    return reading.path(place, wanted), vocabulary


def tokens_recipe(
    model: str | os.PathLike[str],
    donor: str | os.PathLike[str],
    missing: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """The recipe of one model with the tokenizer of another."""
    source = os.fspath(donor)
    if source in ("base", "union"):
        source = f"./{source}"  # a folder of that name
    return {
        "merge_method": "passthrough",
        "models": [{"model": os.fspath(model)}],
        "tokenizer": {"source": source, "missing": dict(missing)},
        "seed": seed,
    }


def _missing(reading: Reading, section: TokenizerSection | None, seed: int) -> MissingRows | None:
    """How rows are formed that no model has."""
    if section is None or section.missing is None:
        return None
    from sigmerge.checkpoints.token_rows import MissingRows

    if section.source in ("base", "union"):
        reading.problem(("tokenizer", "missing"), "goes with the source of a model: its tokenizer "
                        "is taken, and its rows tell what new ones are made of")  # fmt: skip
    return MissingRows(**section.missing.model_dump(), seed=seed)


def _member(path: Path | None, reference: Path | None, models: Sequence[RecipeModel]) -> str | None:
    """The name of a model in its pool; None if it is no member."""
    if path is not None and path == reference:
        return next((model.name for model in models if model.path == path), "reference")
    return next((model.name for model in models if model.path == path), None)


def _tokens(
    reading: Reading,
    section: TokenizerSection | None,
    reference: Path | None,
    models: Sequence[RecipeModel],
) -> dict[str, TokenSource]:
    """Where rows of single tokens come from."""
    from sigmerge.checkpoints.vocabularies import TokenSource

    found: dict[str, TokenSource] = {}
    for token, entry in ((section.tokens or {}) if section else {}).items():
        place: Place = ("tokenizer", "tokens", token)
        row = reading.checked(TokenRowSection, {} if entry is None else entry, place)
        if row is None:
            continue
        given = row.source
        if isinstance(given, str):
            given = {"kind": "model_token", "model": given, "token": token}
        if given is None:
            found[token] = TokenSource(force=row.force)
            continue
        source = reading.checked(TokenModelSection, given, (*place, "source"))
        if source is None or source.model is None:
            found[token] = TokenSource(zero=True, force=row.force)
            continue
        named = [model.name for model in models if source.model == model.name]
        path = None if named else reading.path((*place, "source"), source.model)
        name = named[0] if named else _member(path, reference, models)
        if name is None and path is not None:
            reading.problem((*place, "source"), f"{source.model} is none of the models")
        found[token] = TokenSource(
            name, token=source.token, token_id=source.token_id, force=row.force
        )
    return found


def read_chat_template(reading: Reading, recipe: Recipe, wanted: str | None) -> str | None:
    """The template that goes before the tokenizer's own."""
    from sigmerge.checkpoints.companions import chat_template_of
    from sigmerge.recipe.templates import chat_template

    home = recipe.home
    models = dict.fromkeys(model for model in recipe.inputs if model != recipe.anchor)
    try:
        if wanted is not None:
            return chat_template(wanted, reading.folder, models)
        others = [model.name for model in models if chat_template_of(model)]
        if others and chat_template_of(home) is None:
            reading.note(
                f"{home.name} has no chat template, and neither has the result; to take the "
                f"one of {others[0]}, say chat_template: auto"
            )
    except (PoolError, RecipeError) as error:
        reading.problem(("chat_template",), str(error))
    return None
