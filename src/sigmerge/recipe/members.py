"""The folders of a recipe's models: downloads hub ids, joins adapters with their models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sigmerge.checkpoints.adapter_folders import adapter_config, home_of, is_adapter
from sigmerge.checkpoints.links import is_there
from sigmerge.errors import PoolError, RecipeError
from sigmerge.recipe.folders import find_model
from sigmerge.recipe.reading import Reading
from sigmerge.recipe.record import Recipe, RecipeSlice, RecipeSource


def fetched(reading: Reading, recipe: Recipe) -> Recipe:
    """The recipe with every hub id downloaded; a part of model+adapter may be one."""
    if not reading.remote:
        return recipe
    from sigmerge.checkpoints.hub import download

    local: dict[Path, Path] = {}
    for stand_in, (place, text) in reading.remote.items():
        try:
            parts = [find_model(part, reading.folder) or download(part)
                     for part in text.split("+")]  # fmt: skip
            local[stand_in] = Path("+".join(map(str, parts)))
        except RecipeError as error:
            reading.problem(place, str(error))
    reading.stop_on_problems()
    return _moved(recipe, lambda path: local.get(path, path))


def with_models(reading: Reading, recipe: Recipe) -> Recipe:
    """The recipe with adapters replaced by `model+adapter`."""

    def whole(path: Path) -> Path:
        if not is_adapter(path):
            return path
        try:
            return _with_model(reading, path, recipe.reference)
        except (PoolError, RecipeError) as error:
            reading.problem((), str(error))
            return path

    moved = _moved(recipe, whole)
    reading.stop_on_problems()
    return moved


def _with_model(reading: Reading, adapter: Path, reference: Path | None) -> Path:
    """`model+adapter` for an adapter: with the model it names, if that exists, else base_model."""
    named = adapter_config(adapter).get("base_model_name_or_path")
    named = named if isinstance(named, str) and named else None
    found = None
    if named is not None:
        with contextlib.suppress(RecipeError):
            found = find_model(named, reading.folder)
    if found is None and reference is not None and reference != adapter:
        if named is not None and Path(named).name not in (
            reference.name,
            *_hub_name(reference),
        ):
            reading.note(f"{adapter.name} was trained on {named}, and is read on base_model")
        found = reference
    if found is None and named is None:
        raise RecipeError(f"{adapter}: names no model; write it before it, as model+adapter")
    if found is None:
        from sigmerge.checkpoints.hub import download

        assert named is not None
        try:
            found = find_model(named, reading.folder) or download(named)
        except RecipeError as error:
            told = f"{adapter}: its model is not here; give it as model+adapter, or as base_model."
            raise RecipeError(f"{told} {error}") from None
    return Path(f"{found}+{adapter}")


def _moved(recipe: Recipe, move: Callable[[Path], Path]) -> Recipe:
    """The recipe with paths replaced."""

    def sources(piece: RecipeSlice) -> tuple[RecipeSource, ...]:
        return tuple(replace(source, path=move(source.path)) for source in piece.sources)

    return replace(
        recipe,
        reference=recipe.reference and move(recipe.reference),
        models=tuple(replace(model, path=move(model.path)) for model in recipe.models),
        slices=tuple(replace(piece, sources=sources(piece)) for piece in recipe.slices),
        tokenizer=recipe.tokenizer and _tokenizer(recipe, recipe.tokenizer, move),
        anchor=recipe.anchor and move(recipe.anchor),
    )


def _tokenizer(recipe: Recipe, folder: Path, move: Callable[[Path], Path]) -> Path:
    """The folder of a tokenizer: of an adapter that is asked for, its own; else its model's."""
    asked = folder != recipe.reference and is_adapter(folder)
    own = asked and is_there(folder / "tokenizer_config.json")
    return folder if own else home_of(move(folder))


def _hub_name(folder: Path) -> list[str]:
    """The name of a folder that is a download of the hub."""
    parts = [part for part in folder.parts if part.startswith("models--")]
    return [part.rpartition("--")[2] for part in parts]
