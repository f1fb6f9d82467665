"""What is kept between runs, as tests look at it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sigmerge import kept
from sigmerge.files import digests
from sigmerge.files.cache import cache_place


@contextmanager
def another_cache(folder: Path) -> Iterator[Path]:
    """In this context nothing that was kept before is found; the place of what is kept."""
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, folder)
        yield kept_root()


def isolate(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nothing that was kept before is found from now on."""
    patch.setenv("SIGMERGE_CACHE", str(folder))
    for name in ("_unkept", "_unkept_parts"):
        patch.setattr(kept, name, {})
    patch.setattr(kept, "_said", set())
    patch.setattr(digests, "_read", {})


def kept_root() -> Path:
    return cache_place("kept")


def kept_values(name: str) -> list[Any]:
    """The values of all entries of a kind, the earliest first."""
    headers = [json.loads(file.read_text()) for file in kept_root().glob(f"{name}/*/*.json")]
    return [header["value"] for header in sorted(headers, key=lambda header: header["made"])]


def kept_parts(name: str, of: str = "") -> dict[str, Any]:
    """The parts of all growing entries of a kind whose `of` begins so."""
    found: dict[str, Any] = {}
    for file in kept_root().glob(f"{name}/*/*.jsonl"):
        lines = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
        if lines and lines[0]["header"]["of"].startswith(of):
            found |= {part: row for line in lines[1:] for part, row in line["parts"].items()}
    return found


def kept_answers(benchmark: str = "") -> dict[str, tuple[Any, Any]]:
    """What items got, by their ids: metrics and output."""
    found = kept_parts("answer", benchmark).items()
    return {part.split()[1]: (record["scores"], record["output"]) for part, record in found}
