"""The folders of a recipe's models: those of hub ids; joins adapters with their models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from sigmerge.checkpoints.adapter_folders import (
    adapter_config,
    home_of,
    is_adapter,
    split_adapter,
)
from sigmerge.checkpoints.folder import on_hub
from sigmerge.checkpoints.links import is_there
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.objects import remote_root
from sigmerge.progress import Progress, shown
from sigmerge.recipe.folders import find_model
from sigmerge.recipe.reading import Reading
from sigmerge.recipe.record import Recipe, RecipeSlice, RecipeSource


def fetched(reading: Reading, recipe: Recipe) -> Recipe:
    """The recipe with the folder of every hub id; a part of model+adapter may be one.

    Weights that are not here are headers in it, see checkpoints/hub.py.
    """
    if not reading.remote:
        return recipe
    from sigmerge.checkpoints.hub import stand_in

    local: dict[Path, Path] = {}
    for named, (place, text) in reading.remote.items():
        try:
            parts = [find_model(part, reading.folder) or stand_in(part)
                     for part in text.split("+")]  # fmt: skip
            local[named] = Path("+".join(map(str, parts)))
        except (PoolError, RecipeError) as error:
            reading.problem(place, str(error))
    reading.stop_on_problems()
    return moved(recipe, lambda path: local.get(path, path))


def in_hub(recipe: Recipe) -> list[Path]:
    """The folders of a recipe that stand in for models of the hub, whose weights are not here."""
    places = str(remote_root())
    folders = [each for each in recipe.inputs if str(each).startswith(places)]
    if not folders:
        return []
    from sigmerge.checkpoints.hub import weights_of

    return [folder for folder in folders if weights_of(folder)]


def with_weights(
    recipe: Recipe,
    progress: Progress | None = None,
    wanted: Callable[[Path], Collection[str]] | None = None,
) -> Recipe:
    """The recipe with the weights of models of the hub downloaded: the `wanted` files of each
    folder, or all."""
    folders = in_hub(recipe)
    if not folders:
        return recipe
    from sigmerge.checkpoints.hub import bring, weights_of

    with shown(progress) as bar:
        brought = {f: bring(f, wanted(f) if wanted else weights_of(f), bar) for f in folders}

    def here(path: Path) -> Path:
        model, adapter = split_adapter(path)
        parts = [brought.get(part, part) for part in (model, adapter) if part]
        return Path("+".join(map(str, parts)))

    return moved(recipe, here)


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

    behind = moved(recipe, whole)
    reading.stop_on_problems()
    return behind


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
        from sigmerge.checkpoints.hub import stand_in

        assert named is not None
        try:
            found = find_model(named, reading.folder) or stand_in(named)
        except RecipeError as error:
            told = f"{adapter}: its model is not here; give it as model+adapter, or as base_model."
            raise RecipeError(f"{told} {error}") from None
    return Path(f"{found}+{adapter}")


def moved(recipe: Recipe, move: Callable[[Path], Path]) -> Recipe:
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
    found = on_hub(folder)
    return [found.rpartition("/")[2]] if found else []
