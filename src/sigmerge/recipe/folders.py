"""Where the models of a recipe lie: local folders first, then the hub."""

from __future__ import annotations

import re
from pathlib import Path

from sigmerge.checkpoints.adapter_folders import split_adapter
from sigmerge.checkpoints.remote import place_of
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.objects import url_of

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?$")


def find_model(text: str, folder: Path) -> Path | None:
    """A local folder, looked for in the working folder and beside the recipe; None for a hub id.

    A hub id is `owner/name` whose owner is no local folder; anything else never reaches the hub.
    `model+adapter` is found part by part, and None if a part is a hub id. An address of a remote
    store is found by what stands in for it here.
    """
    if "+" not in text and url_of(text):
        try:
            return place_of(text)
        except PoolError as error:
            raise RecipeError(str(error)) from None
    try:
        given = Path(text).expanduser()
        tried = list(dict.fromkeys([Path.cwd() / given, folder / given]))
        for place in tried:
            if place.exists() or place.is_symlink():
                return place.absolute() if place.is_symlink() else place.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise RecipeError(f"{text!r}: cannot be a folder ({error})") from None
    if text.count("+") == 1 and all(text.split("+")):
        model, adapter = (find_model(part, folder) or Path(part) for part in text.split("+"))
        both = Path(f"{model}+{adapter}")
        return both if split_adapter(both)[1] else None
    if "+" in text:
        raise RecipeError(f"{text!r}: one model and one adapter, as in model+adapter")
    owner = text.partition("/")[0]
    local = (
        given.is_absolute()
        or owner in (".", "..", "~")
        or any((root / owner).exists() for root in (Path.cwd(), folder))
    )
    if not local and _HUB_ID.match(text):
        return None
    raise RecipeError(f"{text!r}: no such folder (looked in {', '.join(map(str, tried))})")
