"""Pickled weights, only on request: loaded weights-only and kept as safetensors in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sigmerge.errors import MissingExtra, OutputError, PoolError
from sigmerge.files.cache import cache_folder, cache_place, kept_json, write_note
from sigmerge.files.digests import digest_now, file_digests, identity
from sigmerge.files.documents import whole
from sigmerge.files.identity import changed
from sigmerge.files.locks import locked
from sigmerge.files.regular import is_regular


def as_safetensors(pickles: list[Path]) -> list[Path]:
    """A safetensors twin of every pickle. Code inside a pickle is never run."""
    return [_twin(pickle) for pickle in pickles]


def _twin(pickle: Path) -> Path:
    """The twin, made by one process at a time: another may be reading it already."""
    before = identity(pickle)
    key = hashlib.sha256(before.encode()).hexdigest()[:24]
    twin = cache_folder("unpickled") / f"{key}.safetensors"
    if _is_whole(twin):
        return twin
    try:
        with locked(twin.with_suffix(".lock"), wait=True):
            if not _is_whole(twin):
                _convert(pickle, twin)
                if identity(pickle) != before:
                    raise changed(str(pickle))
                note = {"pickle": str(pickle.absolute()), "identity": before,
                        "digest": digest_now(twin)}  # fmt: skip
                write_note(twin.with_suffix(".json"), note)
    except OSError as error:
        raise OutputError(f"{twin}: cannot be written ({error}).") from None
    return twin


def pickle_of(file: Path) -> Path | None:
    """The pickle that a weight file was made of, which is still the same; None if it is none's."""
    if file.parent != cache_place("unpickled"):
        return None
    note = kept_json(file.with_suffix(".json"), {"pickle", "identity"})
    if note is None:
        return None
    pickle = Path(str(note["pickle"]))
    if not is_regular(pickle) or identity(pickle) != note["identity"]:
        raise changed(str(pickle))
    return pickle


def _is_whole(twin: Path) -> bool:
    """Whether a twin is there as it was made; the note beside it is written last."""
    note = kept_json(twin.with_suffix(".json"), {"digest"})
    if note is None or not is_regular(twin):
        return False
    return file_digests([twin])[twin] == note["digest"]


def _convert(pickle: Path, twin: Path) -> None:
    try:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtra("torch", "models", "Reading pickled weights") from None
    try:
        state = torch.load(pickle, map_location="cpu", weights_only=True, mmap=True)
        copies = {name: value.contiguous().clone() for name, value in state.items()}
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PoolError(f"{pickle}: cannot be loaded weights-only ({reason}).") from None
    try:
        with whole(twin) as partial:
            save_file(copies, partial)
    except SafetensorError as error:
        raise OutputError(f"{twin}: cannot be written ({error}).") from None
