"""Hub ids, through huggingface_hub."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sigmerge.errors import MissingExtra, RecipeError

WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


def cached(identifier: str) -> Path | None:
    """The snapshot of `owner/name` that the hub's cache holds; nothing is downloaded."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise MissingExtra(f"The hub id {identifier}", ["huggingface_hub"], ["hub"]) from None
    name, _, revision = identifier.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def download(identifier: str) -> Path:
    """The local snapshot of `owner/name` or `owner/name@revision`, downloaded if need be."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise MissingExtra(f"The hub id {identifier}", ["huggingface_hub"], ["hub"]) from None
    name, _, revision = identifier.partition("@")
    options = {"revision": revision or None, "allow_patterns": WANTED}
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(name, local_files_only=True, **options))
        return Path(snapshot_download(name, **options))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RecipeError(
            f"{identifier!r}: no such folder, and the hub could not provide it ({reason})"
        ) from None
