"""Resolves the models of a recipe: local folders first, then the hub."""

from __future__ import annotations

import re
from pathlib import Path

from sigmerge.checkpoints.adapter_folders import split_adapter
from sigmerge.checkpoints.remote import place_of
from sigmerge.errors import PoolError, RecipeError
from sigmerge.files.objects import url_of

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?$")
_REVISION = re.compile(r"^([^@]+)@[\w.-]+$")


def is_hub_id(text: str, folder: Path | None = None) -> bool:
    """Whether this is `owner/name` whose owner is no folder here, or in `folder`."""
    owner, roots = text.partition("/")[0], [Path.cwd(), *([folder] if folder else [])]
    return bool(_HUB_ID.match(text)) and not any((root / owner).exists() for root in roots)


def find_model(text: str, folder: Path) -> Path | None:
    """A local folder, looked for in the working folder and beside the recipe; None for a hub id.

    A hub id is `owner/name` whose owner is no local folder; anything else never reaches the hub.
    `model+adapter` is found part by part, and None if a part is a hub id. An address of a remote
    store is found by what stands in for it here. A folder is found without its revision, too.
    """
    if "+" not in text and url_of(text):
        try:
            return place_of(text)
        except PoolError as error:
            raise RecipeError(str(error)) from None
    if found := _local(text, folder):
        return found
    if text.count("+") == 1 and all(text.split("+")):
        model, adapter = (find_model(part, folder) or Path(part) for part in text.split("+"))
        both = Path(f"{model}+{adapter}")
        return both if split_adapter(both)[1] else None
    if "+" in text:
        raise RecipeError(f"{text!r}: one model and one adapter, as in model+adapter")
    if found := _without_revision(text, folder):
        return found
    if is_hub_id(text, folder):
        return None
    tried = ", ".join(map(str, _tried(text, folder)))
    raise RecipeError(f"{text!r}: no such folder (looked in {tried})")


def idle_revisions(text: str, folder: Path) -> list[str]:
    """Models given as `model@revision` that are local folders, which have no revisions."""
    parts = [] if _local(text, folder) else text.split("+")
    return [p for p in parts if not _local(p, folder) and _without_revision(p, folder)]


def _without_revision(text: str, folder: Path) -> Path | None:
    """The local folder of `model@revision`."""
    revised = _REVISION.match(text)
    return _local(revised[1], folder) if revised else None


def _local(text: str, folder: Path) -> Path | None:
    try:
        for place in _tried(text, folder):
            if place.exists() or place.is_symlink():
                return place.absolute() if place.is_symlink() else place.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise RecipeError(f"{text!r}: cannot be a folder ({error})") from None
    return None


def _tried(text: str, folder: Path) -> list[Path]:
    given = Path(text).expanduser()
    return list(dict.fromkeys([Path.cwd() / given, folder / given]))
